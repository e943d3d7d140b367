"""The tools as the policy sees them, and the check of a call."""

from __future__ import annotations

from typing import Any

from agentrl_jax.protocol import Tool, ToolCall

from .workspace import arguments_problem, shown

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def _tool(name: str, description: str, *, writes: bool = False, optional: tuple[str, ...] = (), **of: Any) -> Tool:
    schema = {
        "type": "object",
        "properties": of,
        "required": [key for key in of if key not in optional],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description, parameters=schema, writes=writes)


TOOLS: tuple[Tool, ...] = (
    _tool("list", "List the files of the workspace."),
    _tool("search", "Find the lines that hold a text.", text=TEXT),
    _tool("read", "Read a file, from line `start` on.", optional=("start",), path=TEXT, start=NUMBER),
    _tool("edit", "Replace the one occurrence of `old` in a file by `new`; an empty `old` makes a new file.",
          writes=True, path=TEXT, old=TEXT, new=TEXT),
    _tool("run_tests", "Run the tests of the workspace. Nothing that they write is kept."),
    _tool("submit", "Hand in the workspace as it is. This ends the task."),
)  # fmt: skip
BY_NAME = {tool.name: tool for tool in TOOLS}


def problem(call: ToolCall) -> str:
    """Why a call cannot be carried out, or ""."""
    tool = BY_NAME.get(call.name)
    if tool is None:
        return f"there is no tool {shown(call.name)}; the tools are {', '.join(BY_NAME)}"
    wrong = arguments_problem(tool.parameters, call.arguments)
    return f"{call.name}: {wrong}" if wrong else ""
