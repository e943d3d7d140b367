"""The tools, and what is wrong with a call of one. Elements go by the numbers of the listing; there is no address bar
and no script: a policy can do what a person with a mouse and a keyboard can do on this page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_jax.protocol import Tool, ToolCall

MOST_TEXT = 500
ELEMENT = {"type": "integer", "minimum": 1}
PROPERTIES: dict[str, dict[str, dict[str, Any]]] = {
    "click": {"element": ELEMENT},
    "type": {"element": ELEMENT, "text": {"type": "string", "maxLength": MOST_TEXT}},
    "select": {"element": ELEMENT, "option": {"type": "string", "maxLength": MOST_TEXT}},
    "read": {"line": {"type": "integer", "minimum": 1}},
    "finish": {},
}
DESCRIPTIONS = {
    "click": "Click the element with this number.",
    "type": "Put a text into the textbox with this number, in place of what it holds.",
    "select": "Choose an option of the list with this number, by its text.",
    "read": "Read the page from this line on, with long texts and lists in full.",
    "finish": "End the task with the page as it is.",
}
ACTING = ("click", "type", "select")


def describe() -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=name,
            description=DESCRIPTIONS[name],
            parameters={
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        )
        for name, properties in PROPERTIES.items()
    )


def wrong(call: ToolCall) -> str | None:
    """What is wrong with a call, in words that a policy can act on, or None."""
    properties = PROPERTIES.get(call.name)
    if properties is None:
        return f"error: unknown tool; there are {', '.join(PROPERTIES)}"
    if set(call.arguments) != set(properties):
        return f"error: {call.name} takes {' and '.join(properties) or 'no arguments'}"
    for name, schema in properties.items():
        if error := _wrong_value(name, call.arguments[name], schema):
            return error
    return None


def _wrong_value(name: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    if schema["type"] == "integer":
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            return f"error: {name} must be a number of the page, from 1"
        return None
    if not isinstance(value, str):
        return f"error: {name} must be a text"
    if len(value) > MOST_TEXT:
        return f"error: {name} may have {MOST_TEXT} characters, not {len(value)}"
    if any((ord(letter) < 32 and letter != "\n") or 0xD800 <= ord(letter) < 0xE000 for letter in value):
        return f"error: {name} has characters that no keyboard types"
    return None
