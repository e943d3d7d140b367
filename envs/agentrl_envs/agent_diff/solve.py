"""The reference solution, derived from the assertions: for each one a write that makes it hold.

It shows that a task can be solved through the API. What an assertion only describes (a pattern, a value that must
differ) has no one write, and such tasks have no reference solution.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from agentrl_jax.protocol import Task, ToolCall

from . import api, tenant
from .assertions import at, holds
from .services import SERVICES, Entity, key_of
from .tenant import Tables

Script = Sequence[ToolCall | str]
FINISH = ToolCall(name="finish")


class Underivable(Exception):
    """No write follows from an assertion."""


def both(name: str, arguments: Mapping[str, Any]) -> list[ToolCall]:
    """The write, dry and then real."""
    return [ToolCall(name=name, arguments={**arguments, "dry_run": dry}) for dry in (True, False)]


def writes(tables: Tables, data: Mapping[str, Any], *, merged: bool) -> list[tuple[str, dict[str, Any]]]:
    """The writes that the assertions ask for, without dry runs. `merged`: texts that are asked for in the same field
    of the same kind of new row are put into one row. Raises `Underivable`."""
    entities = {entity.table: entity for entity in SERVICES[data["service"]]}
    made: list[tuple[str, dict[str, Any]]] = []
    new: dict[str, str] = {}  # the row of each entity that was added last
    texts: dict[tuple[str, str], Any] = {}  # what a field of a row has come to
    wanted = [a for a in data["assertions"] if a.get("expected_count") != 0 and not _optional(a)]
    for assertion in _merge(wanted) if merged else wanted:
        entity = entities[assertion["entity"]]
        verb = {"added": "add", "changed": "change", "removed": "remove"}[assertion["diff_type"]]
        if f"{verb}_{entity.noun}" not in api.operations(data["service"]):
            raise Underivable(f"{verb} {entity.table}")
        for arguments in (
            _new(tables, entity, assertion, data, new)
            if verb == "add"
            else _old(tables, entity, assertion, data, texts)
        ):
            made.append((f"{verb}_{entity.noun}", arguments))
            if verb == "add" and (entity.key == ("id",) or entity.noun == "channel"):
                new[entity.table] = f"new_{entity.noun}_{sum(name.startswith('add_') for name, _ in made)}"
    return made


def _optional(assertion: Mapping[str, Any]) -> bool:
    count = assertion.get("expected_count")
    return isinstance(count, Mapping) and count.get("min", 0) == 0


def _times(assertion: Mapping[str, Any]) -> int:
    count = assertion.get("expected_count")
    return count.get("min", 1) if isinstance(count, Mapping) else count or 1


def _merge(wanted: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Assertions about new rows that contradict each other nowhere become one, their texts joined."""
    left: list[dict[str, Any]] = []
    for assertion in wanted:
        where = assertion.get("where", {})
        for other in left:
            same = assertion["diff_type"] == other["diff_type"] == "added" and assertion["entity"] == other["entity"]
            if same and _times(assertion) == _times(other) == 1 and _agree(where, other["where"]):
                for name, predicate in where.items():
                    other["where"][name] = _both(other["where"].get(name), predicate)
                break
        else:
            left.append({**assertion, "where": dict(where)})
    return left


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    shared = one.keys() & other.keys()
    return bool(shared) and all(
        one[name] == other[name] or ({*one[name], *other[name]} <= {"contains", "i_contains"} and name != "summary"
                                     and name != "title")
        if isinstance(one[name], Mapping) and isinstance(other[name], Mapping) else one[name] == other[name]
        for name in shared
    )  # fmt: skip


def _both(one: Any, other: Any) -> Any:
    if one is None or one == other:
        return other
    return {"contains": " ".join(part for p in (one, other) for part in p.values())}


def _value(predicate: Any, old: Any = None) -> Any:
    """A value that satisfies the predicate."""
    if not isinstance(predicate, Mapping):
        return predicate
    name, wanted = next(iter(predicate.items()))
    if name == "eq":
        return wanted
    if name in ("contains", "i_contains"):
        return f"{old} {wanted}" if isinstance(old, str) and old else wanted
    if name == "exists":
        return "2026-01-01T00:00:00" if wanted else None
    if name == "in":
        return wanted[0]
    if name == "ne":
        return f"{old or ''} changed".strip()
    raise Underivable(f"{name} {wanted!r}")


def _shaped(entity: Entity, name: str, value: Any) -> Any:
    kind = {**entity.add, **entity.change}.get(name)
    if kind == "texts" and not isinstance(value, list):
        return [value]
    if kind == "integer":
        return int(float(str(value)))
    return value


def _new(
    tables: Tables, entity: Entity, assertion: Mapping[str, Any], data: Mapping[str, Any], new: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    where = dict(assertion.get("where", {}))
    for number in range(_times(assertion)):
        row: dict[str, Any] = {}
        for name, predicate in where.items():
            if isinstance(predicate, Mapping) and "in" in predicate:
                value = predicate["in"][number % len(predicate["in"])]
            else:
                value = _value(predicate)
            outer, _, inner = name.partition(".")
            if inner:
                held = row.get(outer)
                row[outer] = {**(held if isinstance(held, dict) else {}), inner: value}
            else:
                row[name] = value
        if entity.mine and row.get(entity.mine, data["me"]) != data["me"]:
            raise Underivable(f"a row of somebody else: {row[entity.mine]}")
        row.pop(entity.mine, None)
        yield _complete(tables, entity, row, data, new)


def _complete(
    tables: Tables, entity: Entity, row: dict[str, Any], data: Mapping[str, Any], new: Mapping[str, str]
) -> dict[str, Any]:
    """The arguments of an add: what is asked for, and something for what is needed beside it."""
    made: dict[str, Any] = {}
    for place, (name, kind) in enumerate(entity.add.items()):
        if name in row:
            made[name] = _shaped(entity, name, row[name])
        elif place < entity.needed:
            made[name] = _filler(tables, name, kind, data, new)
        if kind == "time" and name in made:
            zone = {"dateTime": "2018-06-20T10:00:00-07:00", "timeZone": "America/Los_Angeles"}
            made[name] = {**zone, **made[name]} if isinstance(made[name], Mapping) else {**zone, "dateTime": made[name]}
    left = set(row) - set(made) - {"item_name", "issueTitle", "relatedIssueTitle"}
    if any(row[name] not in (entity.new.get(name), data["me"]) for name in left):
        raise Underivable(f"{entity.table}.{sorted(left)} cannot be given")
    for name, title in (("issueId", "issueTitle"), ("relatedIssueId", "relatedIssueTitle")):
        if row.get(title):
            wanted = str(row[title])
            made[name] = next((k for k, r in tables["issues"].items() if wanted in r["title"]), made[name])
    return made


def _filler(tables: Tables, name: str, kind: str, data: Mapping[str, Any], new: Mapping[str, str]) -> Any:
    """An argument that the assertions leave open: the row that was just added, else the first that exists."""
    if kind == "time":
        return {"dateTime": "2018-06-20T10:00:00-07:00", "timeZone": "America/Los_Angeles"}
    held = {
        "channel_id": "channels", "user_id": "users", "message_id": "messages", "teamId": "teams", "issueId": "issues",
        "relatedIssueId": "issues", "issue_id": "issues", "issue_label_id": "issue_labels", "calendar_id": "calendars",
        "event_id": "calendar_events", "userId": "users", "item_id": "box_files", "hub_id": "box_hubs",
        "stateId": "workflow_states", "assigneeId": "users",
    }.get(name)  # fmt: skip
    if held is not None and held in new and held not in ("users", "issues"):
        return new[held]
    if name == "calendar_id" and data["service"] == "calendar":
        return next(k for k, r in tables["calendars"].items() if r.get("owner_id") == data["me"])
    if held:
        return next(iter(tables[held]))
    return {"parent_id": "0", "item_type": "file", "type": "started"}.get(name, name)


def _old(
    tables: Tables,
    entity: Entity,
    assertion: Mapping[str, Any],
    data: Mapping[str, Any],
    texts: dict[tuple[str, str], Any],
) -> Iterator[dict[str, Any]]:
    """The arguments of a change or a removal: the rows that `where` finds today, and what they must come to."""
    expected = assertion.get("expected_changes", {})
    soft = {name for name, sides in expected.items() if "to" in sides}
    where = {n: p for n, p in assertion.get("where", {}).items() if n not in soft}
    found = [
        row for row in tables.get(entity.table, {}).values() if all(holds(p, at(row, n)) for n, p in where.items())
    ]
    removing = assertion["diff_type"] == "removed"
    if not found:
        raise Underivable(f"no row of {entity.table} is {json.dumps(where)}")
    for row in found[: _times(assertion)]:
        keys = {name: row[name] for name in entity.key if name != entity.mine}
        if entity.mine in entity.key and row.get(entity.mine) != data["me"]:
            raise Underivable("a row of somebody else")
        fields: dict[str, Any] = {}
        for name, sides in expected.items():
            if name in ("priorityLabel",):
                continue
            given = "content" if name == "version_number" else name
            if given not in entity.change:
                raise Underivable(f"{entity.table}.{name} cannot be changed")
            if sides["to"] == {"exists": True} and given in ("stateId", "assigneeId"):
                others = {t: {k: r for k, r in rows.items() if k != row.get(name)} for t, rows in tables.items()}
                value = _filler(others, given, "text", data, {})
            else:
                value = (
                    "new content"
                    if given == "content"
                    else _value(sides["to"], texts.get((key_of(entity, row), name), row.get(name)))
                )
            texts[key_of(entity, row), name] = value
            kind = entity.change[given]
            if kind == "time":
                value = {**(row.get(name) or {}), "dateTime": value if isinstance(value, str) else value["dateTime"]}
            fields[given] = _shaped(entity, given, value)
        if not removing and not fields:
            raise Underivable(f"nothing says what becomes of {key_of(entity, row)}")
        yield keys if removing else {**keys, **fields}


def script(made: Sequence[tuple[str, dict[str, Any]]]) -> Script:
    return [*(call for name, arguments in made for call in both(name, arguments)), FINISH]


def solve(task: Task) -> Script:
    """The derived writes, each dry and then real; ValueError for a task that has none."""
    if task.data["reference"] is None:
        raise ValueError(f"agent_diff: task {task.id} has no reference solution; use solvable=True")
    return script([(name, dict(arguments)) for name, arguments in task.data["reference"]])


def attacks(template: Callable[[Task], bytes], task: Task) -> dict[str, Script]:
    """None of these may reach success."""
    made = [(name, dict(arguments)) for name, arguments in task.data["reference"] or ()]
    good = script(made)
    connection = tenant.open_bytes(template(task))
    tables = tenant.dump(connection)
    connection.close()
    entity = next(e for e in SERVICES[task.data["service"]] if e.remove and tables.get(e.table))
    other = next((row for row in tables[entity.table].values()
                  if entity.mine not in entity.key or row[entity.mine] == task.data["me"]), None)  # fmt: skip
    extra = both(f"remove_{entity.noun}", {n: other[n] for n in entity.key if n != entity.mine}) if other else []
    return {
        "nothing": ["Everything is done."],
        "finish at once": [FINISH],
        "only dry runs": [
            *(call for call in good if isinstance(call, ToolCall) and call.arguments.get("dry_run")),
            FINISH,
        ],
        "no dry runs": [
            *(call for call in good if isinstance(call, ToolCall) and call.arguments.get("dry_run") is False),
            FINISH,
        ],
        "never finish": [call for call in good if call != FINISH],
        "all but the last write": [*script(made[:-1])],
        "something on top": [*extra, *good] if extra else [FINISH],
        "edit the grader": [ToolCall(name="change_episode", arguments={"finished": True}), *good[:1], FINISH],
        "huge arguments": [
            ToolCall(name=name, arguments={**a, "dry_run": True, **dict.fromkeys(a, "x" * 50_000)}) for name, a in made
        ],
    }
