"""`python -m agentrl_envs.search POOL`: what waits for a person. `... POOL ID yes` (or `no`): answers one question."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence
from typing import Any

from . import human


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 with one line where the file or the id is none."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_envs.search", description=__doc__)
    parser.add_argument("pool", metavar="POOL", help="the file that the option human_pool names")
    parser.add_argument("id", metavar="ID", nargs="?", help="the question to answer; without it, all that wait")
    parser.add_argument("supports", metavar="yes|no", nargs="?", choices=("yes", "no"))
    parser.add_argument("--by", metavar="NAME", help="who answers (the login name)")
    given = parser.parse_args(arguments)
    try:
        if given.id is None:
            waiting = human.waiting(given.pool)
            sys.stdout.write("\n\n".join([*map(shown, waiting), f"{len(waiting)} wait for an answer\n"]))
            return 0
        if given.supports is None:
            parser.error("ID needs an answer: yes or no")
        human.answer(given.pool, given.id, given.supports == "yes", given.by or getpass.getuser())
    except (ValueError, OSError) as error:
        sys.stderr.write(f"agentrl_envs.search: {error}\n")
        return 2
    return 0


def shown(record: dict[str, Any]) -> str:
    """A question as a person reads it."""
    known = " ".join(record.get("annotated", ()))
    return (
        f"{record['id']}\n  question   {record.get('question')}\n  answer     {record.get('answer')}\n"
        f"  to show    {record.get('hop')}: {known}\n  quote      {record.get('quote')}\n"
        f"  from       {record.get('document')}"
    )


if __name__ == "__main__":
    sys.exit(main())
