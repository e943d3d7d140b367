"""The environment: one page in a browser context of its own. A state is the way to it: task, seed and action log."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Snapshot, Status, Task, ToolCall

from . import listing, tasks, tools
from .page import Page

OVER = "the task is over"
NO_CALL = "error: call a tool"
ENDED = "the page has ended the task"
FINISHED = "finished"
INTRODUCTION = "The page, by numbered elements:"


class Diverged(RuntimeError):
    """A replayed log led to another page: browser, pages or environment are not those that it was recorded with."""


class WebEnvironment:
    """A page of the task. Everything follows from `task`, so the members of a group meet the same page, and the
    episode's `seed` changes nothing. Snapshots are replayed on `restore`, each observation's hash compared."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._page: Page | None = None
        self._task: Task | None = None
        self._seed = 0
        self._log: list[list[Any]] = []  # [tool, arguments, hash of the answer] of each call that met the page
        self._pressed: str | None = None  # the name of what was clicked last
        self._finished = False

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        self._task, self._seed, self._log = task, seed, []
        self._pressed, self._finished = None, False
        self._page = Page()
        self._page.open(tasks.document(task), task.data["page"])
        text = f"{self._page.query}\n\n{INTRODUCTION}\n{listing.text(self._page.view['elements'])}"
        self._log.append(["reset", {}, _hash(text)])
        return Observation(content=(Message(role="user", content=text),))

    def step(self, action: Action) -> Observation:
        self._open()
        if self._over:
            return _answer([OVER] * max(1, len(action.calls)), Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:120]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status = [], Status.OK
        for call in action.calls:
            text, right = self._perform(call)
            texts.append(text)
            status = status if right else Status.INVALID_ACTION
        return _answer(texts, status, terminated=self._over)

    def snapshot(self) -> Snapshot:
        page, task = self._open(), self._task
        assert task is not None
        view = page.view
        state = {
            "task": {"id": task.id, "split": task.split, "kind": task.kind, "data": dict(task.data)},
            "seed": self._seed,
            "log": self._log,
            "query": page.query,
            "pressed": self._pressed,
            "finished": self._finished,
            "elements": view["elements"],
            "ended": view["ended"],
            "reward": view["reward"],
            "submitted": view["submitted"],
            "page": page.digest(),
        }
        data = json.dumps(state, sort_keys=True, separators=(",", ":")).encode()
        return Snapshot(data=data, hash=hashlib.sha256(data).hexdigest()[:32])

    def restore(self, snapshot: Snapshot) -> None:
        """Replays the snapshot's log on a page of its own. Diverged if an answer or the end is another one."""
        state = json.loads(snapshot.data)
        self.reset(Task(**state["task"]), state["seed"])
        for index, (name, arguments, recorded) in enumerate(state["log"]):
            if index:
                self._perform(ToolCall(name=name, arguments=arguments))
            if self._log[index][2] != recorded:
                self.close()
                raise Diverged(f"the page answers otherwise than recorded after action {index} ({name})")
        if self.snapshot().hash != snapshot.hash:
            self.close()
            raise Diverged("the page gave the recorded answers and is in another state")

    def close(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            page.close()

    @property
    def _over(self) -> bool:
        return self._finished or (self._page is not None and self._page.view["ended"])

    def _open(self) -> Page:
        if self._page is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._page

    def _perform(self, call: ToolCall) -> tuple[str, bool]:
        """The answer to one call, and whether it was a right one."""
        page = self._open()
        if self._over:
            return OVER, False
        if error := tools.wrong(call):
            return error, False
        if call.name == "read":
            start = call.arguments["line"]
            return listing.text(page.view["elements"], start, full=True), True  # type: ignore[arg-type]
        if call.name == "finish":
            self._finished, text, error = True, FINISHED, None
        else:
            text, error = self._act(page, call)
        self._log.append([call.name, dict(call.arguments), _hash(text)])
        return text, error is None

    def _act(self, page: Page, call: ToolCall) -> tuple[str, str | None]:
        number = call.arguments["element"]
        name = next((element["name"] for element in page.view["elements"] if element["number"] == number), None)
        if name is None:
            return f"error: there is no element {number} on the page", "absent"
        error = page.act(call.name, call.arguments)
        if error is not None:
            return f"error: {error}", error
        if call.name == "click":
            self._pressed = name
        return ENDED if page.view["ended"] else listing.text(page.view["elements"]), None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _answer(texts: list[str], status: Status, *, terminated: bool = False) -> Observation:
    content = tuple(Message(role="tool", content=text) for text in texts)
    return Observation(content=content, status=status, terminated=terminated)
