"""What a MiniWoB++ page asks for, found from its text alone: the second opinion beside the page's own reward.

A goal says how the page must look when it is submitted, or what must be clicked. `solve.py` works towards it and
`verifier.py` compares the end with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .listing import Element


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`fill`: the value of the n-th textbox (from 0); `checked`: which of the checkboxes and radio buttons, and no
    others; `option`: of the only list; `press`: the name of what is clicked last."""

    fill: Mapping[int, str] | None = None
    checked: frozenset[int] | None = None
    option: str | None = None
    press: str = "Submit"


def fields(elements: Sequence[Element]) -> list[Element]:
    return [element for element in elements if element["role"] == "textbox"]


def boxes(elements: Sequence[Element]) -> list[Element]:
    return [element for element in elements if element["role"] in ("checkbox", "radio")]


def wrong(goal: Goal, elements: Sequence[Element], pressed: str | None) -> str:
    """Where the page's end differs from the goal, or ""."""
    if pressed is None or pressed != goal.press:
        return f"last clicked {pressed!r}, not {goal.press!r}"
    for index, text in (goal.fill or {}).items():
        held = fields(elements)[index]["value"] if index < len(fields(elements)) else None
        if held != text:
            return f"textbox {index + 1} holds {str(held)[:60]!r}, not {text!r}"
    if goal.checked is not None:
        held = {index for index, box in enumerate(boxes(elements)) if box["checked"]}
        if held != goal.checked:
            return f"checked are {sorted(held)}, not {sorted(goal.checked)}"
    if goal.option is not None:
        chosen = [element["value"] for element in elements if element["role"] == "combobox"]
        if chosen != [goal.option]:
            return f"chosen is {chosen}, not {goal.option!r}"
    return ""


def goal(kind: str, query: str, elements: Sequence[Element]) -> Goal:
    """The goal of a page as it is opened. ValueError if its text is not of this kind."""
    try:
        return _KINDS[kind](query, elements)
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise ValueError(f"web: this is no page of kind {kind!r}: {query[:120]!r}") from error


def _quoted(query: str) -> list[str]:
    return re.findall(r'"([^"]*)"', query)


def _press(query: str, _: Sequence[Element]) -> Goal:
    name = _quoted(query)[-1]
    return Goal(press="Close" if name == "x" else name)


def _tab(query: str, _: Sequence[Element]) -> Goal:
    return Goal(press=re.search(r"Tab #\d+", query)[0])  # type: ignore[index]


def _checks(query: str, elements: Sequence[Element]) -> Goal:
    names = re.match(r"Select (.*) and click Submit", query)[1].split(", ")  # type: ignore[index]
    found = boxes(elements)
    wanted = [] if names == ["nothing"] else [next(i for i, b in enumerate(found) if b["name"] == n) for n in names]
    return Goal(checked=frozenset(wanted))


def _option(query: str, _: Sequence[Element]) -> Goal:
    return Goal(option=re.match(r"Select (.*) from the list", query)[1])  # type: ignore[index]


def _text(query: str, _: Sequence[Element]) -> Goal:
    text = _quoted(query)[0]
    if "upper case" in query:
        text = text.upper()
    elif "lower case" in query:
        text = text.lower()
    return Goal(fill={0: text})


def _date(query: str, _: Sequence[Element]) -> Goal:
    month, day, year = re.search(r"(\d+)/(\d+)/(\d+)", query).groups()  # type: ignore[union-attr]
    return Goal(fill={0: f"{year}-{month}-{day}"})


def _time(query: str, _: Sequence[Element]) -> Goal:
    hour, minute, half = re.search(r"(\d+):(\d+)\s*([AP])M", query).groups()  # type: ignore[union-attr]
    return Goal(fill={0: f"{int(hour) % 12 + (12 if half == 'P' else 0):02d}:{minute}"})


def _password(query: str, _: Sequence[Element]) -> Goal:
    return Goal(fill={0: _quoted(query)[0], 1: _quoted(query)[0]})


def _login(press: str) -> Callable[[str, Sequence[Element]], Goal]:
    return lambda query, _: Goal(fill={0: _quoted(query)[0], 1: _quoted(query)[1]}, press=press)


def _cells(elements: Sequence[Element]) -> dict[str, str]:
    names = [element["name"] for element in elements if element["role"] == "cell"]
    return dict(zip(names[::2], names[1::2], strict=True))


def _table(query: str, elements: Sequence[Element]) -> Goal:
    return Goal(fill={0: _cells(elements)[re.search(r"value of (.*) into", query)[1]]})  # type: ignore[index]


def _labels(_: str, elements: Sequence[Element]) -> Goal:
    labels = [element["name"].removesuffix(":") for element in elements if element["role"] == "label"]
    return Goal(fill={index: _cells(elements)[labels[index]] for index in (0, 1)})


def _word(query: str, elements: Sequence[Element]) -> Goal:
    index = int(re.search(r"the (\d+)", query)[1])  # type: ignore[index]
    words = next(element["name"] for element in elements if element["role"] == "text").split(" ")
    return Goal(fill={0: re.sub(r"[^a-zA-Z]", "", words[index - 1])})


def _problem(elements: Sequence[Element]) -> str:
    return next(element["name"] for element in elements if "=" in element["name"] and element["name"] != "x =")


def _arithmetic(_: str, elements: Sequence[Element]) -> Goal:
    left, sign, right = re.match(r"(\d+) (\S) (\d+) =", _problem(elements)).groups()  # type: ignore[union-attr]
    one, two = int(left), int(right)
    return Goal(fill={0: str({"+": one + two, "-": one - two, "x": one * two}[sign])})


def _algebra(_: str, elements: Sequence[Element]) -> Goal:
    left, sign, right, total = re.match(r"(\S+) (\S) (\S+) = (\d+)", _problem(elements)).groups()  # type: ignore
    value = int(total)
    if left == "x":
        return Goal(fill={0: str(value - int(right) if sign == "+" else value + int(right))})
    return Goal(fill={0: str(value - int(left) if sign == "+" else int(left) - value)})


def _sequence(query: str, _: Sequence[Element]) -> Goal:
    radio, box = (int(found) for found in re.findall(r"the (\d)\w\w", query))
    texts = {index: _quoted(query)[0] if index == box - 1 else "" for index in range(3)}
    return Goal(fill=texts, checked=frozenset({radio - 1}))


_KINDS: dict[str, Callable[[str, Sequence[Element]], Goal]] = {
    "choose-list": _option,
    "click-button": _press,
    "click-checkboxes": _checks,
    "click-checkboxes-large": _checks,
    "click-checkboxes-transfer": _checks,
    "click-collapsible-2": _press,
    "click-dialog-2": _press,
    "click-link": _press,
    "click-option": _checks,
    "click-tab": _tab,
    "click-tab-2": _press,
    "enter-date": _date,
    "enter-password": _password,
    "enter-text": _text,
    "enter-text-2": _text,
    "enter-text-dynamic": _text,
    "enter-time": _time,
    "find-word": _word,
    "form-sequence-2": _sequence,
    "login-user": _login("Login"),
    "login-user-popup": _login("OK"),
    "navigate-tree": _press,
    "read-table": _table,
    "read-table-2": _labels,
    "simple-algebra": _algebra,
    "simple-arithmetic": _arithmetic,
}
