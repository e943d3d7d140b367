"""A tenant in SQLite: rows of any entity by key, forked by copying the database's bytes.

The hash of a state is kept up to date by triggers: the sum, modulo 2**256, of a hash of every row. It depends on the
rows and not on how they lie in pages, and taking a snapshot costs a copy of the bytes, however many rows there are.
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
INSERT INTO digest VALUES ('0');
CREATE TRIGGER added AFTER INSERT ON rows BEGIN
  UPDATE digest SET value = digested(value, 1, NEW.entity, NEW.key, NEW.row);
END;
CREATE TRIGGER removed AFTER DELETE ON rows BEGIN
  UPDATE digest SET value = digested(value, -1, OLD.entity, OLD.key, OLD.row);
END;
CREATE TRIGGER changed AFTER UPDATE ON rows BEGIN
  UPDATE digest SET value = digested(value, -1, OLD.entity, OLD.key, OLD.row);
  UPDATE digest SET value = digested(value, 1, NEW.entity, NEW.key, NEW.row);
END;
"""


def _digested(value: str, sign: int, *cells: str) -> str:
    row = int.from_bytes(hashlib.sha256(json.dumps(cells).encode()).digest(), "big")
    return f"{(int(value, 16) + sign * row) % _SIZE:x}"


def _open() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.create_function("digested", 5, _digested, deterministic=True)
    return connection


def create(rows: Iterable[tuple[str, str, Row]]) -> bytes:
    """A database of (entity, key, row), as bytes."""
    connection = _open()
    try:
        connection.executescript(_CREATE)
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO rows VALUES (?, ?, ?)", ((e, k, text(row)) for e, k, row in rows))
        connection.execute("COMMIT")
        return connection.serialize()
    finally:
        connection.close()


def open_bytes(data: bytes) -> sqlite3.Connection:
    """A private copy of the database."""
    connection = _open()
    connection.deserialize(data)
    return connection


def snapshot(connection: sqlite3.Connection) -> Snapshot:
    """The whole tenant; the hash is equal iff the rows are."""
    (value,) = connection.execute("SELECT value FROM digest").fetchone()
    return Snapshot(data=connection.serialize(), hash=f"{int(value, 16):064x}")


def audit(connection: sqlite3.Connection) -> str:
    """The hash, computed from all rows."""
    value = "0"
    for cells in connection.execute("SELECT entity, key, row FROM rows"):
        value = _digested(value, 1, *cells)
    return f"{int(value, 16):064x}"


def text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, ensure_ascii=True)


def get(connection: sqlite3.Connection, entity: str, key: str) -> Row | None:
    found = connection.execute("SELECT row FROM rows WHERE entity = ? AND key = ?", (entity, key)).fetchone()
    return None if found is None else json.loads(found[0])


def put(connection: sqlite3.Connection, entity: str, key: str, row: Row | None) -> None:
    """Inserts, replaces, or with None deletes a row."""
    if row is None:
        connection.execute("DELETE FROM rows WHERE entity = ? AND key = ?", (entity, key))
    elif get(connection, entity, key) is None:
        connection.execute("INSERT INTO rows VALUES (?, ?, ?)", (entity, key, text(row)))
    else:
        connection.execute("UPDATE rows SET row = ? WHERE entity = ? AND key = ?", (text(row), entity, key))


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
