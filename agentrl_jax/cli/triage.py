"""`agentrl triage RUN_DIR`: the newest episodes of a run in four tables, by who is answerable."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from agentrl_jax.errors import UserError
from agentrl_jax.report.triage import MAX_UNKNOWN, table, triage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `agentrl triage`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run directory, such as runs/quickstart")
    parser.add_argument("--last", type=int, default=100, metavar="N", help="episodes to look at, the newest (100)")
    parser.add_argument(
        "--max-unknown", type=float, default=MAX_UNKNOWN, metavar="SHARE", help="warn above this unknown rate (0.05)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables; the warning goes to stderr."""
    if arguments.last < 1:
        raise UserError(f"--last {arguments.last}: expected at least 1")
    if not 0 <= arguments.max_unknown <= 1:
        raise UserError(f"--max-unknown {arguments.max_unknown}: expected a share, from 0 to 1")
    run_dir = Path(arguments.run_dir)
    found = triage(run_dir, arguments.last, arguments.max_unknown)
    print(json.dumps(found.to_json(), indent=2, ensure_ascii=False) if arguments.json else table(found, run_dir))
    if found.warning is not None:
        print(f"agentrl: warning: {found.warning}", file=sys.stderr)
    return 0
