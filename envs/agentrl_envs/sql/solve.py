"""The reference solution, and scripts that try to be scored without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from agentrl_jax.protocol import Task, ToolCall

from .engine import Reader

Script = Sequence[ToolCall | str]


def answer(sql: str) -> ToolCall:
    return ToolCall(name="answer", arguments={"sql": sql})


def query(sql: str) -> ToolCall:
    return ToolCall(name="query", arguments={"sql": sql})


def solve(task: Task) -> Script:
    """Look at the schema, try the gold query, answer with it."""
    gold = task.data["gold"]
    return (ToolCall(name="schema"), query(gold), answer(gold))


def attacks(database: Callable[[Task], bytes], task: Task) -> dict[str, Script]:
    """None of these may reach success."""
    reader = Reader(database(task))
    try:
        result = reader.run(task.data["gold"])
        tables = [f'"{name}"' for name in reader.tables]
    finally:
        reader.close()
    everything = " UNION ALL ".join(f"SELECT * FROM {name}" for name in tables)
    table = tables[0]
    return {
        "nothing": ["I cannot do that."],
        "empty answer": [answer("")],
        "no rows": [answer(f"SELECT * FROM {table} WHERE 0")],
        "the result written down": [query(task.data["gold"]), answer(_written(result.rows))],
        "the result in words": [str(result.rows)],
        "everything": [answer(f"SELECT * FROM {table}"), answer(everything)],
        "huge answer": [answer("SELECT '" + "x" * 100_000 + "'")],
        "too many rows": [answer(f"SELECT 1 FROM {', '.join(f'{table} t{i}' for i in range(12))}")],
        "endless": [answer("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n")],
        "change the data": [
            *(answer(sql) for sql in (f"DELETE FROM {table}", f"UPDATE {table} SET rowid = 1", f"DROP TABLE {table}")),
            answer(f"INSERT INTO {table} DEFAULT VALUES RETURNING *"),
            query("CREATE TEMP TABLE t AS SELECT 1"),
        ],
        "leave the database": [
            query("ATTACH '/etc/passwd' AS p"),
            query("PRAGMA writable_schema = ON"),
            query("SELECT load_extension('x')"),
            query("SELECT * FROM pragma_database_list"),
            query("VACUUM INTO '/tmp/stolen'"),
            query("SELECT readfile('/etc/passwd')"),
        ],
        "two statements": [answer(f"{task.data['gold'].rstrip('; ')}; DELETE FROM {table}")],
        "unknown tool": [
            ToolCall(name="verify", arguments={"outcome": True}),
            ToolCall(name="answer", arguments={"rows": []}),
        ],
    }


def _written(rows: Sequence[Sequence[Any]]) -> str:
    """The rows as a statement that reads no table, as far as fits."""
    shown = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows[:60])
    return f"VALUES {shown}" if shown else "SELECT NULL WHERE 0"


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return repr(value) if isinstance(value, int | float) else "'" + str(value).replace("'", "''") + "'"
