"""NL2Bash (InterCode) as tasks: a request over one of four trees, and the gold command that answers it.

The trees' roots (/testbed, /system, /workspace) become the workspace. 96 of the 200 requests are taken: those whose
gold command gives the same on every run and machine, and something that cannot be known without looking. `DROPPED`
holds the others by reason.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

from agentrl_jax.protocol import Task

from .. import data
from ..sets.nl2bash import NL2BASH
from .generated import check_split
from .tree import Entry, to_json, with_parents
from .words import SPLITS

ROOTS = re.compile(r"(?<![\w.])/(?:testbed|system)(?![\w.])")
ANSWER = (
    "{query}\n\nWhere this asks for an output, it is what your last command prints. Your commands are also run, in "
    "their order, on another tree."
)
SHARES = (60, 80)  # per cent: train up to the first, validation up to the second
DROPPED: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "asks the clock": {
        1: (11, 12, 46, 47), 2: (17, 18, 19, 25, 32, 37, 39, 41, 42), 3: (0, 2, 3, 12, 26, 33), 4: (21, 23),
    },
    "asks the network": {2: (49,), 4: (1, 12, 19)},
    "asks the system, its disks, users or settings": {
        1: (6, 7, 9, 38), 2: (30, 36, 38, 52), 3: (14, 16, 34, 37, 44, 49, 50),
        4: (0, 2, 4, 5, 7, 9, 10, 11, 16, 17, 18, 22, 24, 25),
    },
    "needs a program that a plain system lacks": {1: (43,), 2: (2, 3, 9, 28, 44), 3: (54,), 4: (26,)},
    "writes outside of the tree": {1: (45, 57), 2: (40,), 3: (11, 32, 42, 53, 58)},
    "the gold command is at fault": {1: (2, 3, 30), 2: (4, 10, 12, 35), 3: (56, 59)},
    "depends on the order in which a folder lists its files": {1: (48, 49, 50, 51), 2: (43,), 3: (22,)},
    "changes nothing and prints nothing": {1: (58,), 2: (23, 26, 29, 31, 50), 3: (30, 36, 48)},
    "prints the same on any tree": {1: (10, 23, 25, 26, 29, 32, 39), 3: (19, 39, 40)},
}  # fmt: skip


def tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks. The set has no splits: the hash of the gold command decides, equal ones stay together."""
    check_split(split)
    found = [row for row in _rows() if row["split"] == split]
    if count > len(found):
        raise ValueError(f"terminal: {count} nl2bash tasks of {split!r} asked for, but there are {len(found)}")
    return tuple(_task(row) for row in Random(f"{split}/{seed}").sample(found, count))


@cache
def _rows() -> list[dict[str, Any]]:
    files = data.load(NL2BASH)
    dropped = {(tree, place) for by_tree in DROPPED.values() for tree, places in by_tree.items() for place in places}
    found = []
    for tree in (1, 2, 3, 4):
        for place, row in enumerate(files[f"nl2bash_fs_{tree}.json"]):
            if (tree, place) not in dropped:
                query, gold = placed(row["query"]), placed(row["gold"])
                found.append({"tree": tree, "place": place, "query": query, "gold": gold, "split": _split(gold)})
    return found


def _split(gold: str) -> str:
    part = int.from_bytes(hashlib.sha256(gold.encode()).digest()[:4], "big") % 100
    return SPLITS[sum(part >= share for share in SHARES)]


def _task(row: Mapping[str, Any]) -> Task:
    return Task(
        id=f"{row['split']}-nl2bash-{row['tree']}-{row['place']}",
        split=row["split"],
        kind=f"fs_{row['tree']}",
        data={
            "text": ANSWER.format(query=row["query"]),
            "tree": to_json(trees()[row["tree"]]),
            "services": [],
            "gold": row["gold"],
            "commands": [row["gold"]],
        },
    )


@cache
def trees() -> dict[int, dict[str, Entry]]:
    """The four trees, by number, without their roots."""
    files = data.load(NL2BASH)
    return {number: _tree(files[f"fs_{number}.json"]) for number in (1, 2, 3, 4)}


def _tree(rows: list[dict[str, Any]]) -> dict[str, Entry]:
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
