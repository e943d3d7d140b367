"""Spider's development set: 1,034 questions over 20 databases. Databases of one split appear in no other."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import Any

from agentrl_jax.protocol import Task

from .. import data
from ..sets.spider import SPIDER
from .domains import SPLITS
from .engine import Reader, Refused
from .verifier import decidable

QUESTIONS = "ic_spider_dev.json"
SHARES = {"train": range(14), "validation": range(14, 16), "heldout": range(16, 20)}  # of the databases, by hash


def database(task: Task) -> bytes:
    return _files()[f"databases/{task.data['database']}.sqlite"]


def tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` questions in an order that depends on `seed`; ValueError if there are fewer.

    Left out are questions whose gold query cannot be told from its result: no variation of the data changes it.
    """
    if split not in SPLITS:
        raise ValueError(f"sql: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    rows = [(i, row) for i, row in enumerate(_files()[QUESTIONS]) if _split(row["db"]) == split]
    found: list[Task] = []
    for i, row in random.Random(f"{split}/{seed}").sample(rows, len(rows)):
        if len(found) == count:
            break
        tables = _tables(row["db"], row["gold"])
        if tables is not None:
            found.append(_task(i, row, split, tables))
    if len(found) < count:
        raise ValueError(f"sql: {count} tasks of {split!r} asked for, but there are {len(found)}")
    return tuple(found)


@cache
def _files() -> dict[str, Any]:
    return data.load(SPIDER)


@cache
def _split(name: str) -> str:
    ranked = sorted(
        {row["db"] for row in _files()[QUESTIONS]}, key=lambda db: hashlib.blake2b(db.encode(), digest_size=8).digest()
    )
    return next(split for split, places in SHARES.items() if ranked.index(name) in places)


@cache
def _tables(name: str, gold: str) -> tuple[str, ...] | None:
    """The tables that the gold query reads, or None where the question is left out."""
    content = _files()[f"databases/{name}.sqlite"]
    if not decidable(content, gold, _seed(name, gold)):
        return None
    reader = Reader(content)
    try:
        return tuple(sorted(reader.run(gold).tables))
    except Refused:
        return None
    finally:
        reader.close()


def _seed(name: str, gold: str) -> str:
    return hashlib.blake2b(f"{name}/{gold}".encode(), digest_size=8).hexdigest()


def _task(index: int, row: dict[str, Any], split: str, tables: tuple[str, ...]) -> Task:
    made = {
        "database": row["db"], "question": row["query"], "gold": row["gold"], "tables": list(tables), "calls": 3,
        "seed": _seed(row["db"], row["gold"]),
    }  # fmt: skip
    return Task(id=f"spider-{index}", split=split, kind=row["hardness"], data=made)
