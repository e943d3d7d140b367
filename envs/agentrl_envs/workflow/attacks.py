"""Scripts that try to be scored without serving the customer: the conformance list plays them, none may succeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl_jax.protocol import Task, ToolCall

from . import schema, tools
from .options import Options
from .solve import draft, requested
from .tenant import build

Turn = ToolCall | str


def attacks(options: Options, task: Task) -> Mapping[str, Sequence[Turn]]:
    """Guess the result; claim a result without the write; write without looking whether it is forbidden and refuse
    after all; write twice; serve the request and change one more row; read everything and refuse."""
    data, handles = task.data, options.handles
    parts = draft(options, task)
    other = {"done": "refused", "refused": "done"}[data["finish"]]

    def finish(result: str) -> ToolCall:
        return tools.call(handles, "finish", result=result)

    asked = requested(options, task)
    found: dict[str, Sequence[Turn]] = {
        "the other result": [*parts.turns(options)[:-1], finish(other)],
        "the result in words": [*parts.lookups, f"finish {data['finish']}"],
        "every result in one": [ToolCall(name="finish", arguments={"result": "done refused"})],
    }
    if asked is not None:
        stranger = _another_order(options, task)
        aside = tools.call(handles, "cancel", order=stranger)
        found["done without the write"] = [*parts.lookups, finish("done")]
        found["one more order cancelled"] = [*parts.lookups, asked, aside, finish(data["finish"])]
        found["all that is asked for, then refused"] = [*parts.lookups, asked, finish("refused")]
        if data["goal"]:
            found["refused though it is allowed"] = [*parts.lookups, finish("refused")]
    return found


def _another_order(options: Options, task: Task) -> schema.Handle:
    """An order that the request does not speak of and that is not cancelled yet."""
    rows = build(task.data["tenant"], task.split, task.kind, task.data["reason"], options.handles).rows
    concerned = task.data["arguments"]["order"]
    return next(row[0] for row in rows["orders"] if row[0] != concerned and row[3] != "cancelled")
