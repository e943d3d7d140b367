"""The environment: one page in a browser context of its own, forked by replay."""

from __future__ import annotations

from agentrl_jax.protocol import Action, EnvironmentSpec, Json, Message, Observation, Status, Task, ToolCall

from ..replaying import OVER, ReplayingEnvironment
from . import listing, tasks, tools
from .page import Page

NO_CALL = "error: call a tool"
ENDED = "the page has ended the task"
FINISHED = "finished"
INTRODUCTION = "The page, by numbered elements:"


class WebEnvironment(ReplayingEnvironment):
    """A page of the task. Everything follows from `task`, so the members of a group meet the same page, and the
    episode's `seed` changes nothing."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._page: Page | None = None
        self._pressed: str | None = None  # the name of what was clicked last
        self._finished = False

    def begin(self, task: Task, seed: int) -> Observation:
        self._pressed, self._finished = None, False
        self._page = Page()
        html = tasks.document(task.data["source"], task.kind, task.split, task.data["page"])
        self._page.open(html, task.data["page"])
        text = f"{self._page.query}\n\n{INTRODUCTION}\n{listing.text(self._page.view['elements'])}"
        return Observation(content=(Message(role="user", content=text),))

    def act(self, action: Action) -> Observation:
        if action.error is not None:
            return _answer([f"error: {action.error[:120]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        page = self._opened()
        replies = [self._perform(page, call) for call in action.calls]
        status = Status.OK if all(right for _, right in replies) else Status.INVALID_ACTION
        return _answer([text for text, _ in replies], status, terminated=self._over(page))

    def end(self) -> None:
        page, self._page = self._page, None
        if page is not None:
            page.close()

    def measured(self) -> Json:
        """The page as it is, what it says of itself, and a hash of what a listing does not show."""
        page = self._opened()
        return {**page.view, "query": page.query, "pressed": self._pressed, "page": page.digest()}

    def _opened(self) -> Page:
        if self._page is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._page

    def _over(self, page: Page) -> bool:
        return self._finished or page.view["ended"]

    def _perform(self, page: Page, call: ToolCall) -> tuple[str, bool]:
        """The answer to one call, and whether it was a right one."""
        if self._over(page):
            return OVER, False
        if error := tools.wrong(call):
            return error, False
        if call.name == "finish":
            self._finished = True
            return FINISHED, True
        elements = page.view["elements"]
        if call.name == "read":
            return listing.text(elements, call.arguments["line"], full=True), True  # type: ignore[arg-type]
        number = call.arguments["element"]
        name = next((element["name"] for element in elements if element["number"] == number), None)
        if name is None:
            return f"error: there is no element {number} on the page", False
        if error := page.act(call.name, call.arguments):
            return f"error: {error}", False
        if call.name == "click":
            self._pressed = name
        return ENDED if page.view["ended"] else listing.text(page.view["elements"]), True


def _answer(texts: list[str], status: Status, *, terminated: bool = False) -> Observation:
    content = tuple(Message(role="tool", content=text) for text in texts)
    return Observation(content=content, status=status, terminated=terminated)
