"""The environment: a store of notes, a dialogue in chunks, questions when it is over."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from agentrl_jax.protocol import Action, EnvironmentSpec, Json, Message, Observation, Snapshot, Status, Task

from . import machine
from .machine import Limits, State

NO_CALL = "error: call a tool; noop reads on"
SYSTEM = (
    "You listen to a long conversation and keep notes; questions follow when it is over. They are about {people} only. "
    "Keep what is told about them as short notes: add, update when something changes (no note may hold what is no "
    "longer true), delete what is to be forgotten, never write down what is not to be kept. noop reads the next turns. "
    "The store holds {notes} notes and {characters} characters. Every message shows the whole store, so you need "
    "nothing of earlier messages. Answer each question with the bare value and the number of the note that holds it, "
    "or with unknown and 0 if no note can say it."
)


def unpack(snapshot: Snapshot) -> State:
    fields = json.loads(snapshot.data)["state"]
    return State(**{**fields, "notes": {int(number): text for number, text in fields["notes"].items()}})


class MemoryEnvironment:
    """Everything follows from the task; the seed changes nothing.

    The dialogue never has to be in the policy's context: each window repeats the store, and answers count only with
    the note that holds them, so a rollout may forget every message but the first (the rules) and the last.
    """

    def __init__(self, spec: EnvironmentSpec, limits: Limits) -> None:
        self.spec = spec
        self._limits = limits
        self._data: dict[str, Json] | None = None
        self._state = State()

    def reset(self, task: Task, seed: int) -> Observation:
        data = json.loads(json.dumps(dict(task.data)))
        self._data, self._state = data, State()
        rules = SYSTEM.format(
            people=", ".join(task.data["people"]), notes=self._limits.notes, characters=self._limits.characters
        )
        window = machine.window(data, self._limits, self._state)
        return Observation(content=(Message(role="system", content=rules), Message(role="user", content=window)))

    def step(self, action: Action) -> Observation:
        data = self._open()
        if machine.over(data, self._state):
            return _observe([machine.OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _observe([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _observe([NO_CALL], Status.INVALID_ACTION)
        texts, status, before = [], Status.OK, self._held(data)
        for call in action.calls:
            self._state, reply = machine.apply(data, self._limits, self._state, call)
            texts.append(reply.text)
            status = status if reply.status is Status.OK else reply.status
        gain = max(0.0, self._held(data) - before)
        return _observe(texts, status, terminated=machine.over(data, self._state), gain=gain)

    def snapshot(self) -> Snapshot:
        content = json.dumps({"data": self._open(), "state": asdict(self._state)}, sort_keys=True).encode()
        return Snapshot(data=content, hash=hashlib.sha256(content).hexdigest())

    def restore(self, snapshot: Snapshot) -> None:
        self._data, self._state = json.loads(snapshot.data)["data"], unpack(snapshot)

    def close(self) -> None:
        self._data = None

    def _open(self) -> dict[str, Json]:
        if self._data is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._data

    def _held(self, data: dict) -> float:
        """The share of the questions' values that stand in some note."""
        wanted = [q["answer"] for q in data["questions"] if q["answer"] != "unknown"]
        return sum(any(machine.holds(text, value) for text in self._state.notes.values()) for value in wanted) / len(
            wanted
        )


def _observe(texts: list[str], status: Status, *, terminated: bool = False, gain: float = 0.0) -> Observation:
    return Observation(
        content=tuple(Message(role="tool", content=text) for text in texts),
        status=status,
        terminated=terminated,
        evidence_gain=gain,
    )
