"""Where PostgreSQL's SQL differs from SQLite's: column types, and three statements. All else is said alike.

`episode.value` holds a number or a word, so it is jsonb here, which keeps them apart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .. import schema

_NUMBERS = {("products", "price"), ("products", "stock")}
_HANDLES = {
    ("payments", "customer"), ("orders", "customer"), ("orders", "product"), ("orders", "payment"),
    ("orders", "address"),
}  # fmt: skip
_OTHERWISE = {
    "UPDATE episode SET value = 1 WHERE id = ? AND value = 0": (
        "UPDATE episode SET value = '1' WHERE id = %s AND value = '0'"
    ),
    "INSERT OR IGNORE INTO episode VALUES (?, 1)": "INSERT INTO episode VALUES (%s, '1') ON CONFLICT DO NOTHING",
    "INSERT INTO episode VALUES ('finished', ?)": "INSERT INTO episode VALUES ('finished', to_jsonb(%s::text))",
}


@lru_cache(maxsize=256)
def translated(statement: str) -> str:
    """The statement as PostgreSQL and its driver read it."""
    return _OTHERWISE.get(statement) or statement.replace("?", "%s")


def tables(handles: str) -> tuple[str, ...]:
    """The statements that create the tenant's tables, for handles that are numbers ("short") or text ("real")."""
    handle = "integer" if handles == "short" else "text"
    statements = []
    for table, columns in schema.TABLES.items():
        kinds = [_kind(table, column, handle) for column in columns]
        body = ", ".join(f"{column} {kind}" for column, kind in zip(columns, kinds, strict=True))
        statements.append(f"CREATE TABLE {table} ({body}, PRIMARY KEY (id))")
    return tuple(statements)


def insert(table: str) -> str:
    columns = schema.TABLES[table]
    return f"INSERT INTO {table} VALUES ({', '.join(['%s'] * len(columns))})"


def stored(table: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row as it goes into `insert`."""
    from psycopg.types.json import Jsonb

    return (row[0], Jsonb(row[1])) if table == "episode" else row


def _kind(table: str, column: str, handle: str) -> str:
    if table == "episode":
        return "text" if column == "id" else "jsonb"
    if column == "id" or (table, column) in _HANDLES:
        return handle
    return "integer" if (table, column) in _NUMBERS else "text"
