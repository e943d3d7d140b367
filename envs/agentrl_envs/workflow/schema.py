"""The tenant's tables in SQLite, and the three things done with a whole database: create, dump, snapshot.

Handles (the primary keys) carry no declared type, so that one schema holds small integers and text handles alike.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from agentrl_jax.protocol import Snapshot

Handle = int | str
Rows = Mapping[str, Iterable[tuple[Any, ...]]]

# `episode` is the environment's own bookkeeping: the relevant records (0 unread, 1 read) and how the task was finished.
TABLES: dict[str, tuple[str, ...]] = {
    "customers": ("id", "name"),
    "addresses": ("id", "line"),
    "payments": ("id", "customer", "kind"),
    "products": ("id", "name", "price", "stock"),
    "orders": ("id", "customer", "product", "status", "payment", "address"),
    "episode": ("id", "value"),
}
SERVICE_TABLES = tuple(name for name in TABLES if name != "episode")
_CREATE = "PRAGMA page_size=512;" + "".join(
    f"CREATE TABLE {table} ({columns[0]} PRIMARY KEY, {', '.join(columns[1:])}) WITHOUT ROWID;"
    for table, columns in TABLES.items()
)
_INSERT = {name: f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})" for name, columns in TABLES.items()}


class Connection(Protocol):
    """What a tenant is looked up and changed through: an `sqlite3.Connection`, or what is used as one."""

    def execute(self, statement: str, parameters: Sequence[Any] = ..., /) -> Any: ...


class Unavailable(RuntimeError):
    """The server that holds the tenant does not answer."""


class Change(NamedTuple):
    """One cell of one row gets a new value."""

    table: str
    key: Handle
    column: str
    value: Any


def _empty() -> bytes:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(_CREATE)
    data = connection.serialize()
    connection.close()
    return data


_EMPTY = _empty()


def create(rows: Rows) -> sqlite3.Connection:
    """A fresh, private database in memory that holds `rows`; nothing is shared with any other tenant."""
    connection = open_bytes(_EMPTY)
    connection.execute("BEGIN")
    for table, values in rows.items():
        connection.executemany(_INSERT[table], values)
    connection.execute("COMMIT")
    return connection


def open_bytes(data: bytes) -> sqlite3.Connection:
    """The database that `Connection.serialize` wrote, in memory; autocommit."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.deserialize(data)
    return connection


def dump(connection: Connection, tables: Iterable[str] = TABLES) -> dict[str, dict[Handle, tuple[Any, ...]]]:
    """Every row of `tables` by primary key, in key order."""
    return {
        table: {row[0]: row for row in connection.execute(f"SELECT * FROM {table} ORDER BY id")} for table in tables
    }


def snapshot(connection: sqlite3.Connection) -> Snapshot:
    """The whole database as bytes, and a sha256 over its rows: equal iff the rows are, whatever the page layout."""
    content = repr([(table, list(rows.values())) for table, rows in dump(connection).items()])
    return Snapshot(data=connection.serialize(), hash=hashlib.sha256(content.encode()).hexdigest())


def apply(connection: Connection, changes: Iterable[Change]) -> None:
    """Carries the changes out."""
    for table, key, column, value in changes:
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (value, key))


def difference(before: Mapping[str, Mapping], after: Mapping[str, Mapping]) -> set[Change]:
    """What differs between two dumps, cell by cell; a whole row that appears or vanishes is the column `*`."""
    changes: set[Change] = set()
    for table, old in before.items():
        new = after[table]
        for key in old.keys() | new.keys():
            if key not in old or key not in new:
                changes.add(Change(table, key, "*", new.get(key)))
                continue
            cells = zip(TABLES[table], old[key], new[key], strict=True)
            changes.update(Change(table, key, column, to) for column, was, to in cells if was != to)
    return changes
