"""What the policy reads: the schema in a line per table, and rows cut to fit."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

CELL = 80  # characters of one value
SCHEMA = 6000  # characters of a schema


def schema(data: bytes) -> dict[str, str]:
    """A line per table, by its name: columns with their types, keys, and what they refer to."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(data)
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: _line(connection, name) for name in sorted(names, key=str.lower) if name[:7] != "sqlite_"}
    finally:
        connection.close()


def _line(connection: sqlite3.Connection, table: str) -> str:
    quoted = '"' + table.replace('"', '""') + '"'
    refers = {
        row[3]: f" -> {row[2]}({row[4] or 'key'})" for row in connection.execute(f"PRAGMA foreign_key_list({quoted})")
    }
    columns = [
        f"{_name(row[1])} {row[2].lower() or 'any'}{' key' if row[5] else ''}{refers.get(row[1], '')}"
        for row in connection.execute(f"PRAGMA table_info({quoted})")
    ]
    (rows,) = connection.execute(f"SELECT count(*) FROM {quoted}").fetchone()
    return f"{_name(table)} ({', '.join(columns)}), {rows} rows"


def _name(name: str) -> str:
    return name if name.replace("_", "a").isalnum() else f'"{name}"'


def cut(text: str, limit: int) -> tuple[str, bool]:
    """The text within `limit` characters, and whether it was cut."""
    return (text, False) if len(text) <= limit else (text[: limit - 20] + "\n... cut", True)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], more: bool, limit: int) -> tuple[str, bool]:
    """The rows under their columns' names within `limit` characters, and whether anything was cut."""
    lines, whole = [" | ".join(_cell(column)[0] for column in columns)], not more
    length = len(lines[0])
    for row in rows:
        cells = [_cell(value) for value in row]
        line = " | ".join(cell for cell, _ in cells)
        length += len(line) + 1
        if length > limit - 60:
            more, whole = True, False
            break
        whole = whole and all(complete for _, complete in cells)
        lines.append(line)
    shown = len(lines) - 1
    lines.append(f"(the first {shown} rows; there are more)" if more else f"({shown} row{'' if shown == 1 else 's'})")
    text, over = cut("\n".join(lines), limit)
    return text, over or not whole


def _cell(value: Any) -> tuple[str, bool]:
    if value is None:
        return "NULL", True
    if isinstance(value, float):
        return f"{value:.10g}", True
    shown = f"x'{value[:CELL].hex()}'" if isinstance(value, bytes) else str(value)
    shown = shown.replace("\n", "\\n").replace("\r", "\\r")
    return (shown, True) if len(shown) <= CELL else (shown[: CELL - 3] + "...", False)
