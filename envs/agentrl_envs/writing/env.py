"""The environment: a brief, a draft, edits, and a submission."""

from __future__ import annotations

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Status, Task

from ..json_state import JsonState
from . import tools

OVER = "the task is over"
NO_CALL = "error: call a tool; when the draft is as it should be, call submit"
SYSTEM = "Edit the draft until it does all that the brief asks, then submit it."


class WritingEnvironment(JsonState):
    """Everything follows from the task; the episode's seed changes nothing. The state is the draft's lines."""

    def __init__(self, spec: EnvironmentSpec, system: bool) -> None:
        self.spec = spec
        self._system = system

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


def _answer(texts: list[str], status: Status, *, terminated: bool = False) -> Observation:
    content = tuple(Message(role="tool", content=text) for text in texts)
    return Observation(content=content, status=status, terminated=terminated)
