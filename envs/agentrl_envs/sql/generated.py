"""Generated questions: twelve kinds over the four domains, each with its gold query."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import lru_cache

from agentrl_jax.protocol import Task

from .domains import DOMAINS, SPLITS, Domain, build, link
from .engine import Reader
from .verifier import decidable

Made = tuple[str, str]  # question, gold
ATTEMPTS = 20


class _Draw:
    """Picks values that occur in the database."""

    def __init__(self, reader: Reader, rng: random.Random) -> None:
        self._reader, self._rng = reader, rng

    def value(self, table: str, column: str) -> str:
        sql = f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT NULL ORDER BY 1"
        return str(self._rng.choice(self._reader.run(sql).rows)[0])

    def pick(self, *options: str) -> str:
        return self._rng.choice(options)

    def middle(self, table: str, column: str) -> int:
        """A number between the quarters of a column."""
        rows = [
            row[0] for row in self._reader.run(f"SELECT {column} FROM {table} ORDER BY 1").rows if row[0] is not None
        ]
        return int(self._rng.choice(rows[len(rows) // 4 : 3 * len(rows) // 4 + 1]))


def _count(d: Domain, draw: _Draw) -> Made:
    e = draw.pick("parent", "item")
    entity = d.parent if e == "parent" else d.item
    column, words, _ = entity.category
    value = draw.value(entity.table, column)
    return (
        f"How many {entity.noun} have the {words} {value}?",
        f"SELECT count(*) FROM {entity.table} WHERE {column} = '{value}'",
    )


def _list(d: Domain, draw: _Draw) -> Made:
    column, words, *_ = d.item.number
    n = draw.middle(d.item.table, column)
    return (
        f"List the names of the {d.item.noun} whose {words} is above {n}, the highest {words} first.",
        f"SELECT name FROM {d.item.table} WHERE {column} > {n} ORDER BY {column} DESC",
    )


def _group(d: Domain, draw: _Draw) -> Made:
    column, words, _ = d.parent.category
    return (
        f"For each {words}, how many {d.parent.noun} are there? Give the {words} and the number.",
        f"SELECT {column}, count(*) FROM {d.parent.table} GROUP BY {column}",
    )


def _join(d: Domain, draw: _Draw) -> Made:
    value = draw.value(d.event, d.state[0])
    return (
        f"Give the names of the {d.parent.noun} that have {d.events} whose {d.state[0]} is {value}, each name once.",
        f"SELECT DISTINCT p.name FROM {d.parent.table} p JOIN {d.event} e ON e.{link(d.parent)} = p.id "
        f"WHERE e.{d.state[0]} = '{value}'",
    )


def _top(d: Domain, draw: _Draw) -> Made:
    return (
        f"Which of the {d.item.noun} has the most {d.events}? Give its name and the number of {d.events}.",
        f"SELECT i.name, count(*) FROM {d.item.table} i JOIN {d.event} e ON e.{link(d.item)} = i.id "
        f"GROUP BY i.id ORDER BY count(*) DESC LIMIT 1",
    )


def _none(d: Domain, draw: _Draw) -> Made:
    return (
        f"Give the names of the {d.parent.noun} that have no {d.events}.",
        f"SELECT name FROM {d.parent.table} p WHERE NOT EXISTS "
        f"(SELECT 1 FROM {d.event} e WHERE e.{link(d.parent)} = p.id)",
    )


def _average(d: Domain, draw: _Draw) -> Made:
    column, words, *_ = d.amount
    category, category_words, _ = d.item.category
    return (
        f"What is the average {words} of the {d.events} for each {category_words} of the {d.item.noun}? Give the "
        f"{category_words} and the average; a missing {words} does not count.",
        f"SELECT i.{category}, avg(e.{column}) FROM {d.event} e JOIN {d.item.table} i ON i.id = e.{link(d.item)} "
        f"GROUP BY i.{category}",
    )


def _having(d: Domain, draw: _Draw) -> Made:
    n = int(draw.pick("3", "4", "5"))
    return (
        f"Which of the {d.parent.noun} have at least {n} {d.events}? Give name and number, sorted by name.",
        f"SELECT p.name, count(*) FROM {d.parent.table} p JOIN {d.event} e ON e.{link(d.parent)} = p.id "
        f"GROUP BY p.id HAVING count(*) >= {n} ORDER BY p.name",
    )


def _above(d: Domain, draw: _Draw) -> Made:
    column, words, *_ = d.parent.number
    return (
        f"Give name and {words} of the {d.parent.noun} whose {words} is above the average of all {d.parent.noun}.",
        f"SELECT name, {column} FROM {d.parent.table} WHERE {column} > (SELECT avg({column}) FROM {d.parent.table})",
    )


def _sum(d: Domain, draw: _Draw) -> Made:
    column, words, *_ = d.amount
    name = draw.value(d.parent.table, "name")
    return (
        f"What is the total {words} of all {d.events} of {name}? If there are none, say 0.",
        f"SELECT coalesce(sum(e.{column}), 0) FROM {d.event} e JOIN {d.parent.table} p ON p.id = e.{link(d.parent)} "
        f"WHERE p.name = '{name}'",
    )


def _distinct(d: Domain, draw: _Draw) -> Made:
    category, words, _ = d.parent.category
    value = draw.value(d.parent.table, category)
    return (
        f"How many different {d.item.noun} occur in {d.events} of {d.parent.noun} with the {words} {value}?",
        f"SELECT count(DISTINCT e.{link(d.item)}) FROM {d.event} e JOIN {d.parent.table} p "
        f"ON p.id = e.{link(d.parent)} WHERE p.{category} = '{value}'",
    )


def _missing(d: Domain, draw: _Draw) -> Made:
    column, words, *_ = d.amount
    return (
        f"Give the id of the {d.events} whose {words} is missing, each with the name among the {d.item.noun}.",
        f"SELECT e.id, i.name FROM {d.event} e JOIN {d.item.table} i ON i.id = e.{link(d.item)} "
        f"WHERE e.{column} IS NULL",
    )


KINDS: dict[str, Callable[[Domain, _Draw], Made]] = {
    "count": _count, "list": _list, "group": _group, "join": _join, "top": _top, "none": _none, "average": _average,
    "having": _having, "above": _above, "sum": _sum, "distinct": _distinct, "missing": _missing,
}  # fmt: skip


def database(task: Task) -> bytes:
    return _built(*task.data["database"])


@lru_cache(maxsize=32)
def _built(domain: str, split: str, seed: int) -> bytes:
    return build(next(d for d in DOMAINS if d.name == domain), split, seed)


def tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` tasks, kinds and domains in turn, each over a database of its own."""
    if split not in SPLITS:
        raise ValueError(f"sql: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    return tuple(_task(split, seed, index) for index in range(count))


def _task(split: str, seed: int, index: int) -> Task:
    kind = list(KINDS)[index % len(KINDS)]
    domain = DOMAINS[(index // len(KINDS) + index + seed) % len(DOMAINS)]
    name = f"{split}-{kind}-{seed}-{index}"
    for attempt in range(ATTEMPTS):
        key = int.from_bytes(hashlib.blake2b(f"{name}/{attempt}".encode(), digest_size=6).digest(), "big")
        data = _built(domain.name, split, key)
        reader = Reader(data)
        try:
            question, gold = KINDS[kind](domain, _Draw(reader, random.Random(key)))
            result = reader.run(gold)
        finally:
            reader.close()
        if result.rows and decidable(data, gold, name):
            break
    else:
        raise RuntimeError(f"sql: no database of {ATTEMPTS} decides the generated question {name}")
    made = {
        "database": [domain.name, split, key], "question": question, "gold": gold,
        "tables": sorted(result.tables), "calls": 3, "seed": name,
    }  # fmt: skip
    return Task(id=name, split=split, kind=kind, data=made)
