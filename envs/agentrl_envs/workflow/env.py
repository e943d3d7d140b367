"""The environment: one tenant in a database of its own, one request, typed tools."""

from __future__ import annotations

from typing import Any

from agentrl_jax.protocol import Action, EnvironmentSpec, EnvStatus, Message, Observation, Snapshot, Status, Task

from . import dry, policy, schema, tenant
from .backends import backend
from .options import Options

OVER = "the task is over"
NO_CALL = "error call a tool"
UNREADABLE = "error bad call"


class WorkflowEnvironment:
    """A retail service's tenant. Everything follows from `task.data`: the tenant is the task's, so the members of a
    group meet the same world, and the episode's `seed` changes nothing.

    The whole state lies in the database, so a snapshot taken here can be restored into any other instance.
    """

    def __init__(self, spec: EnvironmentSpec, options: Options) -> None:
        self.spec = spec
        self._options = options
        self._backend = backend(options)
        self._connection: Any = None

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        data = task.data
        rows = dict(tenant.build(data["tenant"], task.split, task.kind, data["reason"], self._options.handles).rows)
        rows["episode"] = [(record, 0) for record in data["relevant"]]
        self._connection = self._backend.create(rows)
        system = policy.system_text(self._options.system, self._options.policies)
        messages = [Message(role="system", content=system)] if system else []
        return Observation(content=(*messages, Message(role="user", content=data["text"])))

    def step(self, action: Action) -> Observation:
        try:
            return self._step(self._open(), action)
        except schema.Unavailable as error:  # the tenant is lost with its server: to ask again is no use
            lost = Message(role="tool", content=str(error))
            down = EnvStatus(service=self._options.backend)
            return Observation(content=(lost,), status=Status.ERROR, env_status=down)

    def _step(self, connection: schema.Connection, action: Action) -> Observation:
        if finished(connection) is not None:
            return _answer([OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            plain = self._options.wording == "plain"  # the reader's words are not in a small vocabulary
            return _answer([UNREADABLE if plain else f"error {action.error[:120]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status, gain, over = [], Status.OK, 0.0, False
        for call in action.calls:
            if over:
                texts.append(OVER)
                status = Status.INVALID_ACTION
                continue
            reply = dry.execute(connection, dry.prepare(connection, self._options, call))
            texts.append(reply.text)
            status = status if reply.status is Status.OK else reply.status
            over = reply.finished is not None
            if reply.read is not None:
                seen = connection.execute("UPDATE episode SET value = 1 WHERE id = ? AND value = 0", (reply.read,))
                gain = 1.0 if seen.rowcount else gain
        return _answer(texts, status, terminated=over, gain=gain)

    def snapshot(self) -> Snapshot:
        return self._backend.snapshot(self._open())

    def restore(self, snapshot: Snapshot) -> None:
        self.close()
        self._connection = self._backend.restore(snapshot)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self) -> schema.Connection:
        if self._connection is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._connection


def finished(connection: schema.Connection) -> str | None:
    """The result that `finish` was called with, or None."""
    row = connection.execute("SELECT value FROM episode WHERE id = 'finished'").fetchone()
    return None if row is None else row[0]


def _answer(texts: list[str], status: Status, *, terminated: bool = False, gain: float = 0.0) -> Observation:
    return Observation(
        content=tuple(Message(role="tool", content=text) for text in texts),
        status=status,
        terminated=terminated,
        evidence_gain=gain,
    )
