"""The reference solution: play on a page of one's own, from what it says, and note the calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from agentrl_jax.protocol import Task, ToolCall

from . import forms, goals, tasks
from .goals import Goal
from .listing import Element
from .page import Page

MOST = 24


def solve(task: Task) -> tuple[ToolCall, ...]:
    """One call a turn. Needs the browser: what a click reveals is not in the task."""
    return _solution(task.data["source"], task.kind, task.split, task.data["page"])


@lru_cache(maxsize=1024)
def _solution(source: str, kind: str, split: str, seed: int) -> tuple[ToolCall, ...]:
    page = Page()
    try:
        page.open(tasks.document(source, kind, split, seed), seed)
        if source == "forms":
            return _by_names(page, forms.make(kind, split, seed).steps)
        return _by_goal(page, goals.goal(kind, page.query, page.view["elements"]))
    finally:
        page.close()


def _by_names(page: Page, steps: Sequence[tuple[str, ...]]) -> tuple[ToolCall, ...]:
    calls = []
    for tool, *rest in steps:
        role, name = (
            (rest[0], rest[1]) if tool == "click" else ({"type": "textbox", "select": "combobox"}[tool], rest[0])
        )
        number = next(e["number"] for e in page.view["elements"] if (e["role"], e["name"]) == (role, name))
        extra = {"type": {"text": rest[-1]}, "select": {"option": rest[-1]}, "click": {}}[tool]
        calls.append(ToolCall(name=tool, arguments={"element": number, **extra}))
        page.act(tool, calls[-1].arguments)
    return tuple(calls)


def _by_goal(page: Page, goal: Goal) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    opened: set[int] = set()
    while not page.view["ended"]:
        if len(calls) == MOST:
            raise ValueError(f"web: {MOST} calls do not lead to {goal}")
        call = _next(goal, page.view["elements"], opened)
        error = page.act(call.name, call.arguments)
        if error is not None and call.name == "type":  # its click went through, and something has come up
            call, error = ToolCall(name="click", arguments={"element": call.arguments["element"]}), None
        if error is not None:
            raise ValueError(f"web: the reference solution's {call.name} {dict(call.arguments)} fails: {error}")
        calls.append(call)
    return tuple(calls)


def _next(goal: Goal, elements: Sequence[Element], opened: set[int]) -> ToolCall:
    """What brings the page nearer to the goal: away with what stands in between, then the first thing that differs."""
    popup = [element for element in elements if element["role"] == "button" and element["name"] == "Cancel"]
    if popup and goal.fill is not None:
        return _click(popup[0])
    for index, text in (goal.fill or {}).items():
        field = goals.fields(elements)[index]
        if field["value"] != text:
            return ToolCall(name="type", arguments={"element": field["number"], "text": text})
    if goal.checked is not None:
        for index, box in enumerate(goals.boxes(elements)):
            if box["checked"] != (index in goal.checked):
                return _click(box)
    for element in elements:
        if goal.option is not None and element["role"] == "combobox" and element["value"] != goal.option:
            return ToolCall(name="select", arguments={"element": element["number"], "option": goal.option})
    pressed = [e for e in elements if e["name"] == goal.press and e["role"] in ("button", "link", "tab")]
    if not pressed:  # behind a tab, a heading or, on a page without any, a folder that nobody has opened yet
        doors = [element for element in elements if element["role"] in ("tab", "heading")]
        doors = doors or [element for element in elements if element.get("icon") == "folder"]
        pressed = [element for element in doors if element["number"] not in opened]
        opened.add(pressed[0]["number"])
    return _click(pressed[0])


def _click(element: Element) -> ToolCall:
    return ToolCall(name="click", arguments={"element": element["number"]})
