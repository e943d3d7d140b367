"""The reference solution: look up what decides, then carry the request out or refuse it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl_jax.protocol import Task, ToolCall

from . import dry, tools
from .options import Options

Turn = ToolCall | str


@dataclass(slots=True)
class Draft:
    """A solution in parts: lookups, one write (carried out or not), and the result that it is finished with."""

    lookups: list[ToolCall]
    write: ToolCall | None
    result: str

    def turns(self, options: Options) -> list[Turn]:
        write = [] if self.write is None else dry.turns(options, self.write)
        return [*self.lookups, *write, tools.call(options.handles, "finish", result=self.result)]


def draft(options: Options, task: Task) -> Draft:
    """The reference solution in parts."""
    data, handles = task.data, options.handles
    lookups = [tools.call(handles, record, **{record: handle}) for record, handle in data["lookups"]]
    return Draft(lookups, requested(options, task) if data["goal"] else None, data["finish"])


def requested(options: Options, task: Task) -> ToolCall | None:
    """The write that the customer asks for, allowed or not; None for a plain lookup."""
    data = task.data
    return tools.call(options.handles, data["tool"], **data["arguments"]) if data["tool"] else None


def solve(options: Options, task: Task) -> tuple[Turn, ...]:
    """One call a turn, at most four."""
    return tuple(draft(options, task).turns(options))
