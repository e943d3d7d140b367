"""Seeded variations of a database: other data under the same constraints, on which a right query is still right.

Rows are left out, and what refers to them; values change places within a column. Keys, foreign keys, unique columns
and what one column says about another (a code and its name) stay as they are, so that queries which agree because of
them agree on the variation too. A result that was written down instead of queried does not.
"""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .compare import Expected, expected, matches, orders
from .engine import Reader, Refused

WANTED = 2
ATTEMPTS = 24


@dataclass(frozen=True, slots=True)
class Reference:
    """One foreign key."""

    child: str
    columns: tuple[str, ...]
    parent: str
    keys: tuple[str, ...]


@dataclass(slots=True)
class Table:
    name: str
    columns: list[str]
    fixed: set[str] = field(default_factory=set)  # columns of keys
    references: list[Reference] = field(default_factory=list)


def choose(data: bytes, gold: str, seed: str) -> list[tuple[bytes, Expected]]:
    """Up to `WANTED` variations on which the gold query's answer on `data` is wrong, and what is right there.

    Preferred are those where something is returned and nothing is tied that was not tied before. Empty where no
    variation changes the answer: such a question cannot tell a query from its result.
    """
    original = _expected(data, gold)
    good: list[tuple[bytes, Expected]] = []
    usable: list[tuple[bytes, Expected]] = []
    for attempt in range(ATTEMPTS):
        bold = attempt >= ATTEMPTS // 2  # little has changed nothing so far: leave more out
        varied = vary(data, original.tables, random.Random(f"{seed}/{attempt}"), (0.3, 0.7) if bold else (0.1, 0.4))
        try:
            there = _expected(varied, gold)
        except Refused:
            continue
        if any(matches(original.rows, there, order) for order in orders(original.rows, there)):
            continue
        (good if there.rows and there.tied <= original.tied else usable).append((varied, there))
        if len(good) == WANTED:
            break
    return [*good, *usable][:WANTED]


def _expected(data: bytes, gold: str) -> Expected:
    reader = Reader(data)
    try:
        return expected(reader, gold)
    finally:
        reader.close()


def vary(data: bytes, names: Collection[str], rng: random.Random, shares: tuple[float, float] = (0.1, 0.4)) -> bytes:
    """A variation of the tables in `names` (small letters); others change only as far as references demand it.

    `shares`: between which a table's share of rows left out is drawn.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.deserialize(data)
        connection.text_factory = bytes  # text that is not UTF-8 is carried through as it is
        tables = _tables(connection)
        chosen = [table for table in tables if table.name.lower() in names]
        kept = [reference for table in tables for reference in table.references if not _orphans(connection, reference)]
        connection.execute("BEGIN")
        for table in chosen:
            _drop(connection, table, rng.uniform(*shares), rng)
        while any(_delete_orphans(connection, reference) for reference in kept):
            pass
        for table in chosen:
            for column in _movable(connection, table):
                _shuffle(connection, table, column, rng)
        connection.execute("COMMIT")
        return connection.serialize()
    finally:
        connection.close()


def _q(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _pragma(connection: sqlite3.Connection, name: str, of: str) -> list[tuple[Any, ...]]:
    return [tuple(map(_text, row)) for row in connection.execute(f"PRAGMA {name}({_q(of)})")]


def _tables(connection: sqlite3.Connection) -> list[Table]:
    names = [_text(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    tables = {name.lower(): Table(name, []) for name in sorted(names) if not name.startswith("sqlite_")}
    keys: dict[str, list[str]] = {}
    for key, table in tables.items():
        info = _pragma(connection, "table_info", table.name)
        table.columns = [row[1] for row in info]
        keys[key] = [row[1] for row in sorted(info, key=lambda row: row[5]) if row[5]]
        table.fixed.update(keys[key])
        for index in _pragma(connection, "index_list", table.name):
            if index[2]:
                table.fixed.update(row[2] for row in _pragma(connection, "index_info", index[1]) if row[2])
    for table in tables.values():
        grouped: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        for row in _pragma(connection, "foreign_key_list", table.name):
            grouped[row[0]].append(row)
        for rows in grouped.values():
            parent = tables.get(rows[0][2].lower())
            if parent is None:
                continue
            columns = tuple(row[3] for row in rows)
            table.fixed.update(columns)
            to = tuple(row[4] for row in rows) if rows[0][4] else tuple(keys[parent.name.lower()])
            if len(to) == len(columns):
                parent.fixed.update(to)
                table.references.append(Reference(table.name, columns, parent.name, to))
    return list(tables.values())


def _dangling(reference: Reference) -> str:
    same = " AND ".join(
        f"p.{_q(key)} = {_q(reference.child)}.{_q(column)}"
        for column, key in zip(reference.columns, reference.keys, strict=True)
    )
    some = " AND ".join(f"{_q(column)} IS NOT NULL" for column in reference.columns)
    return f"{_q(reference.child)} WHERE {some} AND NOT EXISTS (SELECT 1 FROM {_q(reference.parent)} p WHERE {same})"


def _orphans(connection: sqlite3.Connection, reference: Reference) -> int:
    return connection.execute(f"SELECT count(*) FROM {_dangling(reference)}").fetchone()[0]


def _delete_orphans(connection: sqlite3.Connection, reference: Reference) -> int:
    return connection.execute(f"DELETE FROM {_dangling(reference)}").rowcount


def _drop(connection: sqlite3.Connection, table: Table, share: float, rng: random.Random) -> None:
    rows = [row[0] for row in connection.execute(f"SELECT rowid FROM {_q(table.name)} ORDER BY rowid")]
    gone = rng.sample(rows, round(share * len(rows)))
    connection.executemany(f"DELETE FROM {_q(table.name)} WHERE rowid = ?", [(row,) for row in gone])


def _movable(connection: sqlite3.Connection, table: Table) -> Iterator[str]:
    """Columns outside of keys that neither determine another repeated column nor are determined by one."""
    rows = connection.execute(f"SELECT * FROM {_q(table.name)}").fetchall()
    values = {column: [row[i] for row in rows] for i, column in enumerate(table.columns)}
    for column in table.columns:
        if column in table.fixed:
            continue
        others = [values[other] for other in table.columns if other != column]
        if not any(_says(values[column], other) or _says(other, values[column]) for other in others):
            yield column


def _says(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether equal values of `one` come with equal values of `other`, where either repeats at all."""
    first: dict[Any, Any] = {}
    repeated = False
    for key, value in zip(one, other, strict=True):
        if key in first:
            repeated = True
            if first[key] != value:
                return False
        first[key] = value
    return repeated and len(set(first.values())) > 1


def _shuffle(connection: sqlite3.Connection, table: Table, column: str, rng: random.Random) -> None:
    """Inside SQLite, so that each value keeps its type and its bytes."""
    rows = [row[0] for row in connection.execute(f"SELECT rowid FROM {_q(table.name)} ORDER BY rowid")]
    origins = rng.sample(rows, len(rows))
    name, value = _q(table.name), _q(column)
    connection.execute("CREATE TEMP TABLE moved (home INTEGER PRIMARY KEY, origin INTEGER, value)")
    connection.executemany("INSERT INTO moved (home, origin) VALUES (?, ?)", zip(rows, origins, strict=True))
    connection.execute(f"UPDATE moved SET value = (SELECT {value} FROM {name} t WHERE t.rowid = origin)")
    connection.execute(f"UPDATE {name} SET {value} = (SELECT value FROM moved WHERE home = {name}.rowid)")
    connection.execute("DROP TABLE moved")
