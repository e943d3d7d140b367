"""`cases` and `reference` are plain modules of this folder; tests/golden/make_parity.py imports them too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
