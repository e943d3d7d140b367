"""A tenant in SQLite: rows of any entity by key, forked by copying the database's bytes.

The hash of a state is kept up to date by every write: the sum, modulo 2**256, of a hash of every row. It depends on
the rows and not on how they lie in pages, and a snapshot costs a copy of the bytes, however many rows there are.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl_jax.protocol import Snapshot

Row = dict[str, Any]
Tables = dict[str, dict[str, Row]]  # entity -> key -> row
_SIZE = 2**256
_CREATE = """
CREATE TABLE rows (entity TEXT NOT NULL, key TEXT NOT NULL, row TEXT NOT NULL, PRIMARY KEY (entity, key)) WITHOUT ROWID;
CREATE TABLE digest (value TEXT NOT NULL);
"""


def _hash(*cells: str) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(cells).encode()).digest(), "big")


def _written(value: int) -> str:
    return f"{value % _SIZE:064x}"


def create(rows: Iterable[tuple[str, str, Row]]) -> bytes:
    """A database of (entity, key, row), as bytes."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    cells = [(entity, key, text(row)) for entity, key, row in rows]
    try:
        connection.executescript(_CREATE)
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", cells)
        connection.execute("INSERT INTO digest VALUES (?)", (_written(sum(_hash(*row) for row in cells)),))
        connection.execute("COMMIT")
        return connection.serialize()
    finally:
        connection.close()


def open_bytes(data: bytes) -> sqlite3.Connection:
    """A private copy of the database."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.deserialize(data)
    return connection


def snapshot(connection: sqlite3.Connection) -> Snapshot:
    """The whole tenant; the hash is equal iff the rows are."""
    (value,) = connection.execute("SELECT value FROM digest").fetchone()
    return Snapshot(data=connection.serialize(), hash=value)


def audit(connection: sqlite3.Connection) -> str:
    """The hash, computed from all rows."""
    return _written(sum(_hash(*cells) for cells in connection.execute("SELECT entity, key, row FROM rows")))


def text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=True)


def get(connection: sqlite3.Connection, entity: str, key: str) -> Row | None:
    found = connection.execute("SELECT row FROM rows WHERE entity = ? AND key = ?", (entity, key)).fetchone()
    return None if found is None else json.loads(found[0])


def put(connection: sqlite3.Connection, entity: str, key: str, row: Row | None) -> None:
    """Inserts, replaces, or with None deletes a row; every write goes through here, since it keeps the hash."""
    old = get(connection, entity, key)
    ((value,),) = connection.execute("SELECT value FROM digest").fetchall()
    moved = int(value, 16)
    connection.execute("BEGIN")
    try:
        if old is not None:
            moved -= _hash(entity, key, text(old))
            connection.execute("DELETE FROM rows WHERE entity = ? AND key = ?", (entity, key))
        if row is not None:
            moved += _hash(entity, key, text(row))
            connection.execute("INSERT INTO rows VALUES (?, ?, ?)", (entity, key, text(row)))
        connection.execute("UPDATE digest SET value = ?", (_written(moved),))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def rows(connection: sqlite3.Connection, entity: str) -> list[Row]:
    """Every row of an entity, by key."""
    found = connection.execute("SELECT row FROM rows WHERE entity = ? ORDER BY key", (entity,))
    return [json.loads(row) for (row,) in found]


def dump(connection: sqlite3.Connection) -> Tables:
    """Everything but the episode's own bookkeeping."""
    tables: Tables = {}
    for entity, key, row in connection.execute("SELECT entity, key, row FROM rows WHERE entity != 'episode'"):
        tables.setdefault(entity, {})[key] = json.loads(row)
    return tables
