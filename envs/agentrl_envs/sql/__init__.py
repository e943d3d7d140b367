"""Questions over SQLite databases: look at the schema, try queries, answer with a query.

The answer is judged by what it returns, on the database and on seeded variations of it. Sources: generated (the
default), `spider` (1,034 questions over 20 databases) and `chinook` (a media shop's database, generated questions).
"""

from __future__ import annotations

from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Tool

from . import chinook, generated, solve, spider, verifier
from .engine import CHARACTERS, INSTRUCTIONS, ROWS
from .env import SqlEnvironment

__all__ = ["suite"]
VERSION = "1"
SOURCES = {
    "generated": (generated.tasks, generated.database),
    "spider": (spider.tasks, spider.database),
    "chinook": (chinook.tasks, chinook.database),
}


def suite(source: str = "generated", rows: int = 20, characters: int = 2000, max_calls: int = 12) -> Suite:
    """The sql suite.

    `source`: "generated", "spider" or "chinook" (the latter two raise `data.DataError` where the set is missing).
    `rows`, `characters`: how much of a query's result is shown. Other values raise ValueError.
    """
    if source not in SOURCES:
        raise ValueError(f"sql: source={source!r} is not known; expected one of {', '.join(SOURCES)}")
    if not 1 <= rows <= ROWS or not 200 <= characters <= 100_000:
        raise ValueError(f"sql: rows={rows}, characters={characters}; expected 1..{ROWS} and 200..100000")
    if max_calls < 3:
        raise ValueError(f"sql: max_calls={max_calls}; the reference solution needs 3")
    tasks, database = SOURCES[source]
    spec = EnvironmentSpec(
        name="sql",
        version=VERSION,
        tools=_tools(rows),
        budget=Budget(steps=max_calls, tool_calls=max_calls, write_actions=0, retries=6, finishing=("answer",)),
        fork="native",
        side_effects="none",
    )
    return Suite(
        spec=spec,
        make=lambda: SqlEnvironment(spec, database, rows, characters),
        tasks=tasks,
        verify=verifier.verify,
        verifier_version=verifier.VERSION,
        solve=solve.solve,
        attacks=partial(solve.attacks, database),
    )


def _tools(rows: int) -> tuple[Tool, ...]:
    def takes(*required: str, **properties: str) -> dict:
        return {
            "type": "object",
            "properties": {name: {"type": "string", "description": text} for name, text in properties.items()},
            "required": list(required),
            "additionalProperties": False,
        }

    limits = f"one SELECT of at most {CHARACTERS} characters, stopped after {INSTRUCTIONS:,} instructions"
    return (
        Tool(
            name="schema",
            description="The tables with their columns; with a table, its first rows as well.",
            parameters=takes(table="one table's name; all tables if left out"),
        ),
        Tool(
            name="query",
            description=f"Run a query and see its first {rows} rows.",
            parameters=takes("sql", sql=limits),
        ),
        Tool(
            name="answer",
            description="Answer with a query; this ends the task.",
            parameters=takes("sql", sql=limits),
        ),
    )
