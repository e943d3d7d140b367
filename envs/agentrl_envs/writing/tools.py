"""The tools: edits by line or by span, on a draft that is a list of lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agentrl_jax.protocol import Status, Tool, ToolCall

from .gate import odd_characters

State = dict[str, Any]
MAX_TEXT, MAX_DRAFT, MAX_LINES = 1500, 6000, 120

TEXT = {"type": "string", "maxLength": MAX_TEXT}
LINE = {"type": "integer", "minimum": 1}


def _tool(name: str, description: str, *, writes: bool = True, **properties: Mapping[str, Any]) -> Tool:
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return Tool(name=name, description=description, parameters=schema, writes=writes)


TOOLS: tuple[Tool, ...] = (
    _tool("read", "Show the draft with line numbers.", writes=False),
    _tool("replace", "Replace a passage that occurs exactly once, within one line.", old=TEXT, new=TEXT),
    _tool("replace_line", "Replace a whole line.", line=LINE, text=TEXT),
    _tool("delete_line", "Delete a line.", line=LINE),
    _tool("insert", "Put text before a line; a line break in it makes a new line.", line=LINE, text=TEXT),
    _tool("append", "Put text after the last line.", text=TEXT),
    _tool("submit", "Hand the draft in and end the task.", writes=False),
)
BY_NAME = {tool.name: tool for tool in TOOLS}


class Invalid(Exception):
    """What is wrong with a call, in words that help to do better."""


class Reply(NamedTuple):
    text: str
    status: Status = Status.OK


def execute(state: State, call: ToolCall) -> Reply:
    """Carries out one call and changes the state; a call that is wrong changes nothing."""
    try:
        given = _arguments(call)
        if call.name == "read":
            return Reply(numbered(state["lines"]))
        if call.name == "submit":
            state["submitted"] = True
            return Reply("submitted")
        lines = _edited(list(state["lines"]), call.name, given)
        if len(lines) > MAX_LINES or sum(map(len, lines)) > MAX_DRAFT:
            raise Invalid(f"the draft may have {MAX_LINES} lines and {MAX_DRAFT} characters")
        state["lines"] = lines
        return Reply(f"done; the draft has {len(lines)} lines")
    except Invalid as error:
        return Reply(f"error: {error}", Status.INVALID_ACTION)


def numbered(lines: list[str]) -> str:
    return "\n".join(f"{number}: {line}" for number, line in enumerate(lines, 1)) or "(the draft is empty)"


def _arguments(call: ToolCall) -> Mapping[str, Any]:
    tool = BY_NAME.get(call.name)
    if tool is None:
        raise Invalid(f"unknown tool {str(call.name)[:40]!r}; the tools are {', '.join(BY_NAME)}")
    wanted = tool.parameters["properties"]
    if set(call.arguments) != set(wanted):
        raise Invalid(f"{call.name} takes {'exactly: ' + ', '.join(wanted) if wanted else 'no arguments'}")
    for key, value in call.arguments.items():
        if wanted[key] is LINE:
            if isinstance(value, bool) or not isinstance(value, int):
                raise Invalid(f"{key} must be a line's number")
        elif not isinstance(value, str):
            raise Invalid(f"{key} must be a text")
        elif len(value) > MAX_TEXT:
            raise Invalid(f"{key} is longer than {MAX_TEXT} characters")
        elif odd_characters(value):
            raise Invalid(f"{key} may hold Latin letters, digits, punctuation, spaces and line breaks only")
    return call.arguments


def _edited(lines: list[str], name: str, given: Mapping[str, Any]) -> list[str]:
    if name == "append":
        return [*lines, *given["text"].split("\n")]
    if name == "replace":
        found = sum(line.count(given["old"]) for line in lines) if given["old"] else 0
        if found != 1:
            raise Invalid(f"the passage occurs {found} times; it must occur once, within one line")
        text = "\n".join(lines).replace(given["old"], given["new"])
        return text.split("\n")
    line, last = given["line"], len(lines) + (name == "insert")
    if not 1 <= line <= last:
        raise Invalid(f"there is no line {str(line)[:12]}; the draft has {len(lines)} lines")
    if name == "delete_line":
        return [*lines[: line - 1], *lines[line:]]
    kept = line - 1 if name == "insert" else line
    return [*lines[: line - 1], *given["text"].split("\n"), *lines[kept:]]
