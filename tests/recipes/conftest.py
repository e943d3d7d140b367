"""The fake suites of the rollout tests serve here too; workers find them by module path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
