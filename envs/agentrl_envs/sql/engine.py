"""Runs one statement of a policy on a database: it can read every table and do nothing else, within fixed limits.

An authorizer decides while SQLite compiles the statement, so that nothing of a refused one runs. The limit on work
counts SQLite's own instructions and stops the same statement at the same place on every machine; time and memory are
watched behind it for statements whose single instructions are expensive.
"""

from __future__ import annotations

import resource
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agentrl_jax.protocol import Status

from . import text

INSTRUCTIONS = 5_000_000
SECONDS = 5.0  # of this thread on a processor: on a busy machine a clock would stop what elsewhere ends
MEMORY_KIB = 256 * 1024
CHARACTERS = 4000  # of a statement
EXPANSIONS = 256
ROWS = 10_000  # of an answer
_EVERY = 500  # instructions between two looks at the limits
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 50_000, sqlite3.SQLITE_LIMIT_COLUMN: 100, sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50, sqlite3.SQLITE_LIMIT_ATTACHED: 0, sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200, sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 20,
}  # fmt: skip
_CATALOGUE = {"sqlite_master", "sqlite_schema"}
# Files and extensions; what differs between two runs or two machines; one call that can take minutes.
_FORBIDDEN = {
    "load_extension", "readfile", "writefile", "edit", "fts3_tokenizer", "random", "randomblob", "changes",
    "total_changes", "last_insert_rowid", "sqlite_version", "sqlite_source_id", "sqlite_compileoption_used",
    "sqlite_compileoption_get", "sqlite_offset", "current_timestamp", "current_date", "current_time",
    "printf", "format",
}  # fmt: skip
_HERE = ("now", "localtime", "utc", "subsec", "subsecond")  # read the clock or the time zone
_CLOCKS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime")


class Refused(Exception):
    """The statement was not carried out; the message is for the policy, `status` says why."""

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Result:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool  # rows beyond the limit were left unread
    tables: frozenset[str]  # that the statement reads


@dataclass(slots=True)
class _Watch:
    """What the callbacks of one statement saw."""

    left: int = INSTRUCTIONS // _EVERY
    until: float = 0.0
    memory: int = 0
    stopped: str = ""
    denied: str = ""
    tables: set[str] = field(default_factory=set)


class Reader:
    """One database in memory, open for reading."""

    def __init__(self, data: bytes) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._connection.deserialize(data)
        self._connection.text_factory = lambda raw: raw.decode(errors="replace")
        self._connection.execute("PRAGMA query_only = ON")
        self._connection.execute("PRAGMA temp_store = MEMORY")
        rows = self._connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.tables = tuple(sorted((name for (name,) in rows if not name.startswith("sqlite_")), key=str.lower))
        self._known = {name.lower() for name in self.tables} | _CATALOGUE
        self._watch = _Watch()
        self._calendar = sqlite3.connect(":memory:")
        for name in _CLOCKS:
            self._connection.create_function(name, -1, _timeless(self._calendar, name), deterministic=True)
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_authorizer(self._authorize)
        self._connection.set_progress_handler(self._progress, _EVERY)

    def close(self) -> None:
        self._connection.close()
        self._calendar.close()

    def run(self, sql: str, limit: int = ROWS) -> Result:
        """The first `limit` rows of one SELECT. Raises `Refused` with a status and words for the policy."""
        if not sql.strip():
            raise Refused("the statement is empty", Status.INVALID_ACTION)
        if len(sql) > CHARACTERS:
            raise Refused(f"the statement has {len(sql)} characters; at most {CHARACTERS}", Status.INVALID_ACTION)
        if text.expansions(sql) > EXPANSIONS:
            raise Refused("the WITH clauses multiply out to too many subqueries", Status.INVALID_ACTION)
        self._watch = watch = _Watch(
            until=time.thread_time() + SECONDS, memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + MEMORY_KIB
        )
        try:
            cursor = self._connection.execute(sql)
            if cursor.description is None:
                raise Refused("only SELECT statements are answered", Status.DENIED)
            rows = cursor.fetchmany(limit + 1)
            columns = tuple(column[0] for column in cursor.description)
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            raise self._refusal(error, watch) from None
        return Result(columns, rows[:limit], len(rows) > limit, frozenset(watch.tables))

    def _refusal(self, error: Exception, watch: _Watch) -> Refused:
        if watch.stopped:
            return Refused(watch.stopped, Status.TIMEOUT)
        if watch.denied:
            return Refused(f"not allowed: {watch.denied}; only SELECT on this database's tables is", Status.DENIED)
        message = str(error)
        if "user-defined function" in message:
            message = "there is no clock: give date functions a date"
        return Refused(message[:300] or type(error).__name__, Status.INVALID_ACTION)

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        watch = self._watch
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() not in _FORBIDDEN:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and (first or "").lower() in self._known:
            watch.tables.add((first or "").lower())
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and not second:  # rows of a common table expression, counted
            return sqlite3.SQLITE_OK
        named = second if action == sqlite3.SQLITE_FUNCTION else first
        watch.denied = watch.denied or f"{_ACTIONS.get(action, 'this statement')} {named or ''}"[:80].strip()
        return sqlite3.SQLITE_DENY

    def _progress(self) -> int:
        watch = self._watch
        watch.left -= 1
        if watch.left < 0:
            watch.stopped = f"stopped after {INSTRUCTIONS:,} instructions: the statement does too much work"
        elif time.thread_time() > watch.until:
            watch.stopped = f"stopped after {SECONDS:g} seconds"
        elif watch.left % 16 == 0 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > watch.memory:
            watch.stopped = "stopped: the statement takes too much memory"
        return 1 if watch.stopped else 0


_ACTIONS = {
    sqlite3.SQLITE_INSERT: "INSERT", sqlite3.SQLITE_UPDATE: "UPDATE", sqlite3.SQLITE_DELETE: "DELETE",
    sqlite3.SQLITE_ATTACH: "ATTACH", sqlite3.SQLITE_DETACH: "DETACH", sqlite3.SQLITE_PRAGMA: "PRAGMA",
    sqlite3.SQLITE_READ: "reading", sqlite3.SQLITE_FUNCTION: "function", sqlite3.SQLITE_TRANSACTION: "transaction",
}  # fmt: skip


def _as_sqlite_reads(value: Any) -> str:
    """The word that SQLite's date functions see: a blob is read as text, and text ends with its first NUL."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text.partition("\0")[0].strip().lower()


def _timeless(calendar: sqlite3.Connection, name: str) -> Callable[..., Any]:
    """SQLite's date function of this name, which raises where it would read the clock or the time zone."""
    least = 2 if name == "strftime" else 1

    def function(*values: Any) -> Any:
        if len(values) < least or any(_as_sqlite_reads(value) in _HERE for value in values):
            raise ValueError(name)
        return calendar.execute(f"SELECT {name}({', '.join('?' * len(values))})", values).fetchone()[0]

    return function
