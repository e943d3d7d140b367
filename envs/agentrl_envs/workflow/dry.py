"""Dry runs, where the suite asks for them: a write is run dry first, and then, with the same arguments, carried out.

With the option off (the default) nothing here changes a tool, a text or a state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from agentrl_jax.protocol import Status, Tool, ToolCall

from . import schema, tools
from .options import Options

ARGUMENT = "dry_run"
FIRST = "error dry_run true first"
KIND = "error dry_run : true or false"


class Prepared(NamedTuple):
    """A resolved call. `dry`: it changes nothing; `ticket`: the name under which its dry run is kept, "" if none is."""

    resolved: tuple[tools.Row, tools.Arguments] | str
    dry: bool = False
    ticket: str = ""


def prepare(connection: schema.Connection, options: Options, asked: ToolCall) -> Prepared:
    """Resolves a call and, where dry runs are asked for, sees whether it is one or had one."""
    if not options.dry_run:
        return Prepared(tools.resolve(connection, options.handles, asked))
    given = dict(asked.arguments)
    dry = given.pop(ARGUMENT, None)
    resolved = tools.resolve(connection, options.handles, replace(asked, arguments=given))
    if isinstance(resolved, str):
        missing = " dry_run" if resolved.startswith("error arguments") and _writes(options, asked.name) else ""
        return Prepared(resolved + missing)
    row, arguments = resolved
    if not row.writes:
        return Prepared(resolved if dry is None else tools.resolve(connection, options.handles, asked))
    if not isinstance(dry, bool):
        return Prepared(KIND)
    ticket = " ".join((ARGUMENT, row.name, *map(str, arguments.values())))
    kept = connection.execute("SELECT 1 FROM episode WHERE id = ?", (ticket,)).fetchone()
    return Prepared(resolved, dry, ticket) if dry or kept else Prepared(FIRST)


def execute(connection: schema.Connection, prepared: Prepared) -> tools.Reply:
    """Carries a prepared call out; a dry run only says what it would do, and is remembered."""
    resolved, dry, ticket = prepared
    if resolved == FIRST:
        return tools.Reply(FIRST, Status.DENIED)
    if isinstance(resolved, str) or not dry:
        reply = tools.execute(connection, resolved)
        if ticket:
            connection.execute("DELETE FROM episode WHERE id = ?", (ticket,))
        return reply
    row, arguments = resolved
    connection.execute("INSERT OR IGNORE INTO episode VALUES (?, 1)", (ticket,))
    return tools.Reply(f"would {row.run(connection, arguments).text}")


def turns(options: Options, write: ToolCall) -> list[ToolCall]:
    """A write as it must be made: dry and then carried out, or at once where the option is off."""
    if not options.dry_run:
        return [write]
    return [replace(write, arguments={**write.arguments, ARGUMENT: dry}) for dry in (True, False)]


def described(options: Options, shown: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools, with the argument where dry runs are asked for."""
    if not options.dry_run:
        return shown
    return tuple(_with_argument(tool) if tool.writes else tool for tool in shown)


def _with_argument(tool: Tool) -> Tool:
    parameters = dict(tool.parameters)
    parameters["properties"] = {**parameters["properties"], ARGUMENT: {"type": "boolean"}}
    parameters["required"] = [*parameters["required"], ARGUMENT]
    return replace(
        tool, description=f"{tool.description} First with dry_run true, then with false.", parameters=parameters
    )


def _writes(options: Options, name: str) -> bool:
    return any(row.writes and name in (row.name, row.real) for row in tools.TABLE.values())
