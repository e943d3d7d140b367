"""The environment: one service's tenant, one request, a typed API."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Snapshot, Status, Task

from . import api, tenant

NO_CALL = "error: call a tool; when nothing is left to do, call finish"
OVER = "the task is over"
SYSTEM = (
    "You act for {me} in the service {service}. Do what is asked with the tools and nothing else: whatever changes "
    "that was not asked for counts against you. Look up what you need with the list tools. Run every write dry first "
    "(dry_run true), read what it would do, then repeat it with dry_run false. When everything is done, call finish."
)


class AgentDiffEnvironment:
    """The tenant follows from the task, so the members of a group meet the same one; the seed changes nothing.

    Everything an episode adds (who acts, what was run dry, whether it is over) lies in the database as well.
    """

    def __init__(self, spec: EnvironmentSpec, templates: Callable[[Task], bytes]) -> None:
        self.spec = spec
        self._templates = templates
        self._connection: sqlite3.Connection | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        data = task.data
        self._connection = tenant.open_bytes(self._templates(task))
        for key, value in (("me", data["me"]), ("service", data["service"])):
            tenant.put(self._connection, "episode", key, {"value": value})
        system = SYSTEM.format(me=data["me"], service=data["service"])
        return Observation(
            content=(Message(role="system", content=system), Message(role="user", content=data["prompt"]))
        )

    def step(self, action: Action) -> Observation:
        connection = self._open()
        if finished(connection):
            return _answer([OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status = [], Status.OK
        for call in action.calls:
            try:
                texts.append(carry_out(connection, call))
            except api.Refused as error:
                texts.append(f"{'denied' if error.status is Status.DENIED else 'error'}: {error}")
                status = error.status
        return _answer(texts, status, terminated=finished(connection))

    def snapshot(self) -> Snapshot:
        return tenant.snapshot(self._open())

    def restore(self, snapshot: Snapshot) -> None:
        self.close()
        self._connection = tenant.open_bytes(snapshot.data)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._connection


def finished(connection: sqlite3.Connection) -> bool:
    return tenant.get(connection, "episode", "finished") is not None


def carry_out(connection: sqlite3.Connection, call) -> str:
    """One call on the tenant; raises `api.Refused`. Also what the verifier repeats."""
    if finished(connection):
        raise api.Refused(OVER)
    held: Mapping | None = tenant.get(connection, "episode", "service")
    service = (held or {"value": ""})["value"]
    return api.execute(connection, service, call)


def _answer(texts: list[str], status: Status, *, terminated: bool = False) -> Observation:
    content = tuple(Message(role="tool", content=text) for text in texts)
    return Observation(content=content, status=status, terminated=terminated)
