"""The page as text: one numbered line per visible control and per piece of text, bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LINES, NAME, OPTIONS = 60, 160, 12
READ_LINES, READ_NAME, READ_OPTIONS = 60, 1_000, 200
MOST_CHARS = 12_000

Element = Mapping[str, Any]  # number, role, name; value, options, checked, icon, disabled, secret where it has them


def text(elements: Sequence[Element], start: int = 1, full: bool = False) -> str:
    """Lines `start`, `start + 1`, ... of the page; `full` cuts names and options much later (the tool `read`)."""
    most, name, options = (READ_LINES, READ_NAME, READ_OPTIONS) if full else (LINES, NAME, OPTIONS)
    shown = elements[start - 1 : start - 1 + most]
    lines = [line(element, name, options) for element in shown]
    left = len(elements) - (start - 1) - len(shown)
    if left > 0:
        lines.append(f"({left} more lines: read them from line {start + len(shown)})")
    if not shown:
        lines.append("(no lines)" if not elements else f"(the page has {len(elements)} lines)")
    return "\n".join(lines)[:MOST_CHARS]


def line(element: Element, name: int, options: int) -> str:
    words = [f"[{element['number']}] {element['role']}"]
    if element["name"]:
        words.append(_quoted(element["name"], name))
    if "icon" in element:
        words.append(element["icon"])
    if "value" in element:
        value = "*" * len(element["value"]) if element.get("secret") else element["value"]
        words.append(f"= {_quoted(value, name)}")
    if "checked" in element:
        words.append("checked" if element["checked"] else "unchecked")
    if "options" in element:
        words.append("options " + ", ".join(_quoted(option, 60) for option in element["options"][:options]))
        if len(element["options"]) > options:
            words.append(f"and {len(element['options']) - options} more")
    if element.get("disabled"):
        words.append("disabled")
    return " ".join(words)


def _quoted(value: str, most: int) -> str:
    return f'"{value[:most]}..."' if len(value) > most else f'"{value}"'
