"""The retail environment: one user's rows, one request."""

from __future__ import annotations

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Status, Task

from ..json_state import JsonState
from .service import Catalogue, Denied, Invalid, execute

NO_CALL = "error: call a tool; when nothing is left to do, call finish"


class RetailEnvironment(JsonState):
    """Everything follows from the task; the episode's seed changes nothing."""

    def __init__(self, spec: EnvironmentSpec, catalogue: Catalogue, system: str) -> None:
        self.spec = spec
        self._catalogue = catalogue
        self._system = system

    def reset(self, task: Task, seed: int) -> Observation:
        self._state = self._catalogue.tenant(task)
        messages = [Message(role="system", content=self._system)] if self._system else []
        return Observation(content=(*messages, Message(role="user", content=task.data["instruction"])))

    def step(self, action: Action) -> Observation:
        state = self._open()
        if state["finished"]:
            return _answer(["the conversation is over"], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status = [], Status.OK
        for call in action.calls:
            if state["finished"]:
                texts.append("the conversation is over")
                status = Status.INVALID_ACTION
                continue
            try:
                texts.append(execute(self._catalogue, state, call))
            except Invalid as error:
                texts.append(f"error: {error}")
                status = Status.INVALID_ACTION
            except Denied as error:
                texts.append(f"denied: {error}")
                status = Status.DENIED if status is Status.OK else status
        return _answer(texts, status, terminated=state["finished"])


def _answer(texts: list[str], status: Status, *, terminated: bool = False) -> Observation:
    readable = (text.encode("utf-8", "replace").decode() for text in texts)  # a policy may write half a character
    content = tuple(Message(role="tool", content=text) for text in readable)
    return Observation(content=content, status=status, terminated=terminated)
