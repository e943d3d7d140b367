"""The environment: a brief, a draft, edits, and a submission."""

from __future__ import annotations

import hashlib
import json

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Snapshot, Status, Task

from . import tools
from .tools import State

OVER = "the task is over"
NO_CALL = "error: call a tool; when the draft is as it should be, call submit"
SYSTEM = "Edit the draft until it does all that the brief asks, then submit it."


class WritingEnvironment:
    """Everything follows from the task; the episode's seed changes nothing. The state is the draft's lines."""

    def __init__(self, spec: EnvironmentSpec, system: bool) -> None:
        self.spec = spec
        self._system = system
        self._state: State | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        lines = task.data["draft"].split("\n")
        self._state = {"lines": lines, "submitted": False}
        messages = [Message(role="system", content=SYSTEM)] if self._system else []
        asked = f"{task.data['brief']['text']}\n\nThe draft so far:\n{tools.numbered(lines)}"
        return Observation(content=(*messages, Message(role="user", content=asked)))

    def step(self, action: Action) -> Observation:
        state = self._open()
        if state["submitted"]:
            return _answer([OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status = [], Status.OK
        for call in action.calls:
            reply = tools.Reply(OVER, Status.INVALID_ACTION) if state["submitted"] else tools.execute(state, call)
            texts.append(reply.text)
            status = status if reply.status is Status.OK else reply.status
        return _answer(texts, status, terminated=state["submitted"])

    def snapshot(self) -> Snapshot:
        content = json.dumps(self._open(), sort_keys=True).encode()
        return Snapshot(data=content, hash=hashlib.sha256(content).hexdigest())

    def restore(self, snapshot: Snapshot) -> None:
        self._state = json.loads(snapshot.data)

    def close(self) -> None:
        self._state = None

    def _open(self) -> State:
        if self._state is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._state


def _answer(texts: list[str], status: Status, *, terminated: bool = False) -> Observation:
    content = tuple(Message(role="tool", content=text) for text in texts)
    return Observation(content=content, status=status, terminated=terminated)
