"""The typed API over a tenant: list, add, change, remove, each a tool with typed arguments; writes dry-run first.

Every write takes `dry_run`. With true nothing changes and the answer says what would; with false it is carried out,
and refused unless the same call was run dry before.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from agentrl_jax.protocol import Status, Tool, ToolCall

from . import tenant
from .services import KINDS, SERVICES, Entity, fits, key_of
from .tenant import Row

SHOWN = 8  # rows of one list
ROW = 360  # characters of one row
LONGEST = 2000  # characters of one text argument
PRIORITIES = ("No priority", "Urgent", "High", "Medium", "Low")
_QUIET = {"created_at", "updated_at", "etag", "createdAt", "updatedAt", "modified_at", "sequence_id", "bodyData"}


class Refused(Exception):
    """The call was not carried out and nothing changed."""

    def __init__(self, message: str, status: Status = Status.INVALID_ACTION) -> None:
        super().__init__(message)
        self.status = status


class Operation(NamedTuple):
    """What a tool does: `verb` (list, add, change or remove) an entity, or finish (no entity)."""

    verb: str
    entity: Entity | None


def operations(service: str) -> dict[str, Operation]:
    table: dict[str, Operation] = {}
    for entity in SERVICES[service]:
        table[f"list_{entity.noun}s"] = Operation("list", entity)
        for verb, there in (("add", entity.add), ("change", entity.change), ("remove", entity.remove)):
            if there:
                table[f"{verb}_{entity.noun}"] = Operation(verb, entity)
    return {**table, "finish": Operation("finish", None)}


def arguments(operation: Operation) -> tuple[dict[str, str], list[str]]:
    """The kinds of a tool's arguments by name, and those that must be given."""
    verb, entity = operation
    if entity is None:
        return {}, []
    if verb == "list":
        return {"contains": "text", "offset": "integer"}, []
    if verb == "add":
        return {**entity.add, "dry_run": "boolean"}, [*list(entity.add)[: entity.needed], "dry_run"]
    keys = {name: "text" for name in entity.key if name != entity.mine}
    if verb == "remove":
        return {**keys, "dry_run": "boolean"}, [*keys, "dry_run"]
    return {**keys, **entity.change, "dry_run": "boolean"}, [*keys, "dry_run"]


def describe(service: str) -> tuple[Tool, ...]:
    tools = []
    for name, operation in operations(service).items():
        kinds, needed = arguments(operation)
        verb, entity = operation
        keys = entity.key if entity else ()
        what = entity.table.replace("_", " ") if entity else ""
        told = {
            "list": f"The {what} whose text contains something, {SHOWN} at a time from an offset.",
            "add": f"Add to the {what}.",
            "change": f"Change one of the {what}: the fields that are given.",
            "remove": f"Remove one of the {what}.",
            "finish": "Say that everything is done.",
        }
        parameters = {
            "type": "object",
            "properties": {name: _kind(kind, verb == "change" and name not in keys) for name, kind in kinds.items()},
            "required": needed,
            "additionalProperties": False,
        }
        writes = verb in ("add", "change", "remove")
        first = " Run it with dry_run true first, then with false." if writes else ""
        tools.append(Tool(name=name, description=told[verb] + first, parameters=parameters, writes=writes))
    return tuple(tools)


def _kind(kind: str, clearable: bool) -> dict[str, Any]:
    """The JSON Schema of an argument; a text that can be changed can be cleared with null."""
    return {"type": ["string", "null"]} if clearable and kind == "text" else dict(KINDS[kind])


def execute(connection: sqlite3.Connection, service: str, call: ToolCall) -> str:
    """Carries the call out and says what came of it. Raises `Refused`."""
    operation = operations(service).get(call.name)
    if operation is None:
        raise Refused(f"unknown tool {call.name[:40]!a}")
    given = _checked(operation, call)
    _find_targets(connection, service, given)
    verb, entity = operation
    if entity is None:
        tenant.put(connection, "episode", "finished", {})
        return "finished"
    if verb == "list":
        return _list(connection, entity, given)
    dry = given.pop("dry_run")
    ticket = json.dumps([call.name, given], sort_keys=True)
    if not dry and tenant.get(connection, "episode", ticket) is None:
        raise Refused("run the same call with dry_run true first", Status.DENIED)
    key, row, counter = _WRITES[verb](connection, entity, given)
    before = tenant.get(connection, entity.table, key)
    told = _told(entity, before, row)
    if dry:
        tenant.put(connection, "episode", ticket, {})
        return f"would {told}"
    tenant.put(connection, entity.table, key, row)
    tenant.put(connection, "episode", ticket, None)
    tenant.put(connection, "episode", "counter", {"value": counter})
    return told


def _checked(operation: Operation, call: ToolCall) -> dict[str, Any]:
    kinds, needed = arguments(operation)
    given = dict(call.arguments)
    if set(given) - set(kinds) or set(needed) - set(given):
        optional = [name if name in needed else f"{name} (optional)" for name in kinds]
        raise Refused(f"{call.name} takes {', '.join(optional) or 'no arguments'}")
    for name, value in given.items():
        entity = operation.entity
        clears = (
            value is None and operation.verb == "change" and entity and name in set(entity.change) - set(entity.key)
        )
        if not fits(kinds[name], value) and not (clears and kinds[name] == "text"):
            raise Refused(f"{name} must be {json.dumps(KINDS[kinds[name]])}")
        written = json.dumps(value, ensure_ascii=False)
        if len(written) > LONGEST or any("\ud800" <= character <= "\udfff" for character in written):
            raise Refused(f"{name} is longer than {LONGEST} characters, or holds half a character")
    return json.loads(json.dumps(given))


def _list(connection: sqlite3.Connection, entity: Entity, given: Mapping[str, Any]) -> str:
    wanted, offset = given.get("contains", "").casefold(), max(0, given.get("offset", 0))
    rows = [row for row in tenant.rows(connection, entity.table) if wanted in _say(row).casefold()]
    lines = [_say(row)[:ROW] for row in rows[offset : offset + SHOWN]]
    last = offset + len(lines)
    lines.append(
        f"({offset + 1 if lines else 0} to {last} of {len(rows)})" if last < len(rows) or offset else f"({len(rows)})"
    )
    return "\n".join(lines)


def _say(row: Row) -> str:
    return json.dumps(
        {k: v for k, v in row.items() if v not in (None, "", [], {}) and k not in _QUIET}, ensure_ascii=False
    )


def _told(entity: Entity, before: Row | None, after: Row | None) -> str:
    if after is None:
        return f"remove from {entity.table}: {_say(before or {})[:ROW]}"
    if before is None:
        return f"add to {entity.table}: {_say(after)[:ROW]}"
    moved = {name: value for name, value in after.items() if before.get(name) != value}
    return f"change {entity.table} {key_of(entity, before)}: {json.dumps(moved, ensure_ascii=False)[:ROW]}"


def _find(connection: sqlite3.Connection, entity: Entity, given: dict[str, Any]) -> tuple[str, Row]:
    if entity.mine in entity.key:
        given = {**given, entity.mine: me(connection)}
    key = key_of(entity, given)
    row = tenant.get(connection, entity.table, key)
    if row is None:
        raise Refused(f"there is no {entity.noun.replace('_', ' ')} {key[:60]}")
    return key, row


def me(connection: sqlite3.Connection) -> str:
    return (tenant.get(connection, "episode", "me") or {"value": ""})["value"]


def _counter(connection: sqlite3.Connection) -> int:
    return (tenant.get(connection, "episode", "counter") or {"value": 0})["value"]


def _add(connection: sqlite3.Connection, entity: Entity, given: dict[str, Any]) -> tuple[str, Row | None, int]:
    counter = _counter(connection) + 1
    row: Row = {**entity.new, **given}
    if entity.mine:
        row[entity.mine] = me(connection)
    if entity.noun == "message":
        row["message_id"] = row["ts"] = f"2000000000.{counter:06d}"
    if entity.noun == "acl_rule":
        row["id"] = f"user:{given['scope_value']}"
    for name in entity.key:
        row.setdefault(name, f"new_{entity.noun}_{counter}")
    _derive(connection, entity, row, set(row))
    key = key_of(entity, row)
    if tenant.get(connection, entity.table, key) is not None:
        raise Refused(f"there is one already: {key[:60]}")
    return key, row, counter


def _change(connection: sqlite3.Connection, entity: Entity, given: dict[str, Any]) -> tuple[str, Row | None, int]:
    key, row = _find(connection, entity, given)
    fields = {name: value for name, value in given.items() if name not in entity.key}
    if not fields:
        raise Refused(f"nothing to change; fields are {', '.join(entity.change)}")
    row = {**row, **fields}
    _derive(connection, entity, row, set(fields))
    return key, row, _counter(connection)


def _remove(connection: sqlite3.Connection, entity: Entity, given: dict[str, Any]) -> tuple[str, Row | None, int]:
    key, _ = _find(connection, entity, given)
    return key, None, _counter(connection)


_WRITES = {"add": _add, "change": _change, "remove": _remove}
_TARGETS = {  # field -> entity that must hold it
    "slack": {"channel_id": "channels", "user_id": "users", "message_id": "messages", "parent_id": "messages"},
    "linear": {
        "teamId": "teams", "issueId": "issues", "relatedIssueId": "issues", "issue_id": "issues", "stateId":
        "workflow_states", "assigneeId": "users", "userId": "users", "issue_label_id": "issue_labels",
    },
    "calendar": {"calendar_id": "calendars", "event_id": "calendar_events"},
    "box": {"hub_id": "box_hubs"},
}  # fmt: skip


def _find_targets(connection: sqlite3.Connection, service: str, given: Mapping[str, Any]) -> None:
    """What a call refers to must be there."""
    for name, entity in _TARGETS[service].items():
        value = given.get(name)
        if isinstance(value, str) and tenant.get(connection, entity, value) is None:
            raise Refused(f"there is no {name} {value[:60]!a}")


def _derive(connection: sqlite3.Connection, entity: Entity, row: Row, given: set[str]) -> None:
    """Fields that follow from those that are given."""
    if entity.noun == "issue":
        priority = row.setdefault("priority", 0)
        if "priority" in given or "priorityLabel" not in row:
            row["priorityLabel"] = PRIORITIES[priority] if 0 <= priority < len(PRIORITIES) else "No priority"
        if "identifier" not in row:
            team = tenant.get(connection, "teams", row["teamId"]) or {}
            number = 1 + sum(other.get("teamId") == row["teamId"] for other in tenant.rows(connection, "issues"))
            row["identifier"] = f"{team.get('key', '')}-{number}"
    if entity.noun == "issue_relation":
        for name, title in (("issueId", "issueTitle"), ("relatedIssueId", "relatedIssueTitle")):
            row[title] = (tenant.get(connection, "issues", row[name]) or {}).get("title")
    if entity.noun == "hub_item":
        held = [tenant.get(connection, name, row["item_id"]) for name in ("box_files", "box_folders")]
        row["item_name"] = next((item["name"] for item in held if item), None)
    if entity.noun == "file":
        if "name" in given:
            row["extension"] = row["name"].rsplit(".", 1)[-1] if "." in row["name"] else ""
        if "content" in given and "version_number" in row and "id" in row:
            row["version_number"] = str(int(row.get("version_number") or 1) + 1)
