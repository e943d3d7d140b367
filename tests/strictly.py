"""How a test starts Python in a process of its own: warnings are errors there too, as pyproject.toml has it for pytest.

All but one: processes of a session share what they compiled (tests/conftest.py), JAX writes such a file in place, and
whoever reads one that is half written, or was left so by a process that a test killed, warns and compiles it again.
"""

import sys

_CACHE = [f"ignore:Error {doing} persistent compilation cache" for doing in ("reading", "writing")]
STRICT = [sys.executable, "-W", "error", *(word for line in _CACHE for word in ("-W", line))]
