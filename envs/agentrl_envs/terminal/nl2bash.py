"""NL2Bash (InterCode) as tasks: a request over one of four trees, and the gold command that answers it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from agentrl_jax.protocol import Task

from .. import data
from ..sets.nl2bash import NL2BASH
from .tree import Entry, with_parents

ROOTS = re.compile(r"(?<![\w.])/(?:testbed|system)(?![\w.])")


def tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    return ()


@cache
def trees() -> dict[int, dict[str, Entry]]:
    """The four trees, their roots made the workspace."""
    return {number: _tree(data.load(NL2BASH)[f"fs_{number}.json"]) for number in (1, 2, 3, 4)}


def _tree(rows: list[dict[str, Any]]) -> dict[str, Entry]:
    import base64

    found = {}
    for row in rows:
        path = row["path"].strip("/").partition("/")[2]
        content = base64.b64decode(row["b64"]) if "b64" in row else row.get("text", "").encode()
        if path:
            found[path] = Entry(row["type"], int(row["mode"], 8), content)
    return with_parents(found)


def placed(text: str) -> str:
    """A request or a command with the trees' roots replaced by the workspace's path."""
    return ROOTS.sub("/workspace", text)
