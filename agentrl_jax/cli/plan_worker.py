"""The process that compiles for `agentrl plan`: a request as JSON on its standard input, figures on its output."""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from pathlib import Path
from typing import Any

from agentrl_jax.errors import UserError


def main() -> int:
    """Compiles what the request names; one such process of a user at a time, since each takes gigabytes."""
    asked = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr  # whatever else prints must not mix with the figures
    try:
        found = _compile(asked)
    except UserError as error:
        found = {"error": str(error)}
    json.dump(found, answer)
    return 0


def _compile(asked: dict[str, Any]) -> dict[str, Any]:
    from agentrl_jax.cli.main import _resolved
    from agentrl_jax.recipes.plan import compiling, shapes

    config = _resolved(argparse.Namespace(config=asked["config"], overrides=asked["overrides"]))
    cache = Path(asked["cache"])
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = shapes.request(config, asked["topology"], asked["mesh"])
        if asked["rows"]:
            return {"tried": compiling.try_each(wanted, asked["rows"], cache)}
        return {"programs": compiling.compile_all(wanted, cache)}


if __name__ == "__main__":
    sys.exit(main())
