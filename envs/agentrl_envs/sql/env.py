"""The environment: one database that can be read, one question, and a query as its answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Snapshot, Status, Task, ToolCall

from . import show
from .engine import ROWS, Reader, Refused

OVER = "the task is over"
NO_CALL = "error: call a tool; when you know the query, call answer"
SYSTEM = (
    "Answer the question about the SQLite database with one SELECT statement. Look at the schema, try queries, then "
    "call answer with the final query: not with its result. It is judged by the rows it returns, here and on other "
    "data of the same schema: exactly the columns asked for, repeated rows as often as they occur, in order where the "
    "question asks for one."
)


@dataclass(slots=True)
class State:
    """What an episode adds to its database: the tables of the gold query that were seen, and the answer."""

    needed: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    answer: str | None = None


class Reply(NamedTuple):
    text: str
    status: Status = Status.OK
    tables: frozenset[str] = frozenset()


def pack(state: State, data: bytes) -> Snapshot:
    """The state and the database as bytes; the hash is over the state and the database's own hash."""
    head = json.dumps(asdict(state), sort_keys=True).encode()
    content = len(head).to_bytes(4, "big") + head + data
    return Snapshot(data=content, hash=hashlib.sha256(head + hashlib.sha256(data).digest()).hexdigest())


def unpack(snapshot: Snapshot) -> tuple[State, bytes]:
    size = int.from_bytes(snapshot.data[:4], "big")
    return State(**json.loads(snapshot.data[4 : 4 + size])), snapshot.data[4 + size :]


class SqlEnvironment:
    """A database follows from its task, so the members of a group meet the same one and the seed changes nothing."""

    def __init__(self, spec: EnvironmentSpec, database: Callable[[Task], bytes], rows: int, characters: int) -> None:
        self.spec = spec
        self._database = database
        self._rows, self._characters = rows, characters
        self._state = State()
        self._data = b""
        self._reader: Reader | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        self._start(State(needed=sorted(task.data["tables"])), self._database(task))
        question = Message(role="user", content=task.data["question"])
        return Observation(content=(Message(role="system", content=SYSTEM), question))

    def step(self, action: Action) -> Observation:
        reader = self._open()
        if self._state.answer is not None:
            return _answer([OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status, before = [], Status.OK, len(self._state.seen)
        for call in action.calls:
            over = self._state.answer is not None
            reply = Reply(OVER, Status.INVALID_ACTION) if over else self._carry_out(reader, call)
            self._state.seen += sorted((set(self._state.needed) & reply.tables) - set(self._state.seen))
            texts.append(reply.text)
            status = status if reply.status is Status.OK else reply.status
        gain = (len(self._state.seen) - before) / max(1, len(self._state.needed))
        return _answer(texts, status, terminated=self._state.answer is not None, gain=gain)

    def snapshot(self) -> Snapshot:
        self._open()
        return pack(self._state, self._data)

    def restore(self, snapshot: Snapshot) -> None:
        self._start(*unpack(snapshot))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _start(self, state: State, data: bytes) -> None:
        self.close()
        self._state, self._data, self._reader = state, data, Reader(data)

    def _open(self) -> Reader:
        if self._reader is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._reader

    def _carry_out(self, reader: Reader, call: ToolCall) -> Reply:
        wrong = _wrong(self.spec, call)
        if wrong:
            return Reply(f"error: {wrong}", Status.INVALID_ACTION)
        try:
            if call.name == "schema":
                return self._schema(reader, call.arguments.get("table"))
            if call.name == "query":
                return self._query(reader, str(call.arguments["sql"]))
            return self._take(reader, str(call.arguments["sql"]))
        except Refused as error:
            return Reply(f"error: {error}", error.status)

    def _schema(self, reader: Reader, table: object) -> Reply:
        lines = show.schema(self._data)
        if table is None:
            text, over = show.cut("\n".join(lines.values()), show.SCHEMA)
            return Reply(text, Status.TRUNCATED if over else Status.OK)
        name = next((name for name in lines if name.lower() == str(table).lower()), None)
        if name is None:
            return Reply(
                f"error: no table {str(table)[:40]!a}; there are {', '.join(lines)}"[:600], Status.INVALID_ACTION
            )
        quoted = '"' + name.replace('"', '""') + '"'
        reply = self._query(reader, f"SELECT * FROM {quoted} LIMIT 3")
        return reply._replace(text=f"{lines[name]}\n{reply.text}")

    def _query(self, reader: Reader, sql: str) -> Reply:
        result = reader.run(sql, self._rows)
        text, over = show.table(result.columns, result.rows, result.more, self._characters)
        return Reply(text, Status.TRUNCATED if over else Status.OK, result.tables)

    def _take(self, reader: Reader, sql: str) -> Reply:
        """The query is the answer, if it runs; what it returns is not shown."""
        result = reader.run(sql)
        if result.more:
            raise Refused(f"the query returns more than {ROWS} rows", Status.INVALID_ACTION)
        self._state.answer = sql
        return Reply("answered", tables=result.tables)


def _wrong(spec: EnvironmentSpec, call: ToolCall) -> str:
    """What is wrong with a call, in a few words; empty if nothing is."""
    tool = next((tool for tool in spec.tools if tool.name == call.name), None)
    if tool is None:
        return f"unknown tool {call.name[:40]!a}; there are {', '.join(tool.name for tool in spec.tools)}"
    known, needed = tool.parameters["properties"], set(tool.parameters["required"])
    if set(call.arguments) - set(known) or needed - set(call.arguments):
        optional = [f"{name} (optional)" if name not in needed else name for name in known]
        return f"{tool.name} takes {', '.join(optional)}"
    bad = next((name for name, value in call.arguments.items() if not isinstance(value, str)), None)
    return f"{bad} must be a text" if bad else ""


def _answer(texts: list[str], status: Status, *, terminated: bool = False, gain: float = 0.0) -> Observation:
    return Observation(
        content=tuple(Message(role="tool", content=text) for text in texts),
        status=status,
        terminated=terminated,
        evidence_gain=gain,
    )
