"""The environment: one question, an index that every episode shares, and a small state of its own."""

from __future__ import annotations

from collections.abc import Callable

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Status, Task

from ..json_state import JsonState
from . import tools
from .index import Index
from .tools import State

OVER = "the task is over"
NO_CALL = "error: call a tool; when you know the answer and have cited the evidence, call answer"
SYSTEM = (
    "Answer the question from the documents. Search, open what looks right, cite a quote for every fact that the "
    "answer rests on, then answer in as few words as possible. A forum may be wrong; a page about a namesake is about "
    "something else."
)


class SearchEnvironment(JsonState):
    """Everything follows from the task; the episode's seed changes nothing.

    The state is what was opened, cited and answered, and which documents and searches are still to fail. The corpus is
    immutable and named in the state, so a snapshot can be restored into any instance of the same suite.
    """

    def __init__(self, spec: EnvironmentSpec, index: Callable[[str], Index], results: int, system: bool) -> None:
        self.spec = spec
        self._index = index
        self._results = results
        self._system = system

    def reset(self, task: Task, seed: int) -> Observation:
        self._state = start(task)
        self._index(self._state["corpus"])  # opens it now: a missing one is an error of the start, not of a step
        messages = [Message(role="system", content=SYSTEM)] if self._system else []
        return Observation(content=(*messages, Message(role="user", content=task.data["text"])))

    def step(self, action: Action) -> Observation:
        state = self._open()
        if state["answer"] is not None:
            return _answer([OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status = [], Status.OK
        before = covered(state)
        index = self._index(state["corpus"])
        for call in action.calls:
            if state["answer"] is not None:
                texts.append(OVER)
                status = Status.INVALID_ACTION
                continue
            reply = tools.execute(index, self._results, state, call)
            texts.append(reply.text)
            status = status if reply.status is Status.OK else reply.status
        gain = (covered(state) - before) / len(state["support"])
        return _answer(texts, status, terminated=state["answer"] is not None, gain=gain)


def start(task: Task) -> State:
    """The state before the first action. `support`: for each hop the documents that hold it, for the evidence gain."""
    data = task.data
    return {
        "corpus": data["corpus"], "support": [list(hop["documents"]) for hop in data["hops"]],
        "opened": [], "citations": [], "searches": 0, "answer": None,
        "gone": list(data["gone"]), "flaky": list(data["flaky"]), "timeouts": data["timeouts"],
    }  # fmt: skip


def covered(state: State) -> int:
    """How many hops have a supporting document that was opened."""
    return sum(not set(state["opened"]).isdisjoint(documents) for documents in state["support"])


def _answer(texts: list[str], status: Status, *, terminated: bool = False, gain: float = 0.0) -> Observation:
    return Observation(
        content=tuple(Message(role="tool", content=text) for text in texts),
        status=status,
        terminated=terminated,
        evidence_gain=gain,
    )
