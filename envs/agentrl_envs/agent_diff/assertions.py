"""State-diff assertions: which rows were added, removed and changed, and whether that is what a task asks for.

An assertion names a kind of difference, an entity, predicates that a row must satisfy (`where`), how many such rows
there must be, and for changed rows the fields that may change and what they must come to. The world is closed: a
difference that no assertion names is undeclared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .services import Entity
from .tenant import Row, Tables

Assertion = Mapping[str, Any]
DERIVED = {"priorityLabel": "priority", "extension": "name", "size": "content", "sha_1": "content"}  # follow the other


@dataclass(frozen=True, slots=True)
class Difference:
    """One row: `before` is None where it was added, `after` where it was removed."""

    entity: str
    key: str
    before: Row | None
    after: Row | None

    @property
    def kind(self) -> str:
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    def fields(self, ignored: Collection[str]) -> set[str]:
        """What changed in a row that is there before and after."""
        one, other = self.before or {}, self.after or {}
        return {name for name in one.keys() | other.keys() if name not in ignored and one.get(name) != other.get(name)}


def differences(before: Tables, after: Tables) -> list[Difference]:
    found = []
    for entity in sorted(before.keys() | after.keys()):
        old, new = before.get(entity, {}), after.get(entity, {})
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key):
                found.append(Difference(entity, key, old.get(key), new.get(key)))
    return found


def judge(
    entities: Sequence[Entity], assertions: Sequence[Assertion], ignored: Sequence[str], found: Sequence[Difference]
) -> tuple[list[str], list[str]]:
    """(what is asked for and not there, what is there and not asked for)."""
    missing, declared = [], set()
    may: dict[tuple[str, str], set[str]] = {}  # what some assertion lets change in a row
    for assertion, d in ((a, d) for a in assertions for d in found if _named(a, d)):
        names = {name.split(".")[0] for name in assertion.get("expected_changes", {})} | set(
            assertion.get("ignore", ())
        )
        may.setdefault((d.entity, d.key), set()).update(names)
    for number, assertion in enumerate(assertions):
        good = [d for d in found if _named(assertion, d) and not _wrong(assertion, d, ignored, may[d.entity, d.key])]
        declared |= {(d.entity, d.key) for d in good if _most(assertion) > 0}
        if not _count(assertion, len(good)):
            missing.append(f"assertion {number}: {assertion['diff_type']} {assertion['entity']}: {len(good)} rows")
    parts = {entity.table: entity.child_of for entity in entities if entity.child_of}
    new = {(d.entity, d.key) for d in found if d.kind == "added" and (d.entity, d.key) in declared}
    undeclared = []
    for d in found:
        field, parent = parts.get(d.entity, ("", ""))
        part = d.kind == "added" and d.after is not None and (parent, str(d.after.get(field))) in new
        silent = d.kind == "changed" and not d.fields(ignored)
        if (d.entity, d.key) not in declared and not part and not silent:
            undeclared.append(f"{d.kind} {d.entity} {d.key}")
    return missing, undeclared


def _named(assertion: Assertion, d: Difference) -> bool:
    if assertion["diff_type"] != d.kind or assertion["entity"] != d.entity:
        return False
    where = assertion.get("where", {})
    return any(
        row is not None and all(holds(p, at(row, name)) for name, p in where.items()) for row in (d.after, d.before)
    )


def _wrong(assertion: Assertion, d: Difference, ignored: Sequence[str], allowed: Collection[str]) -> bool:
    """Whether a changed row changes what no assertion about it allows, or not to what this one wants."""
    if d.kind != "changed":
        return False
    expected = assertion.get("expected_changes", {})
    changed = d.fields(ignored)
    if {name for name in changed if DERIVED.get(name, name) not in allowed and name not in allowed}:
        return True
    one, other = d.before or {}, d.after or {}
    for name, sides in expected.items():
        if "to" in sides and not holds(sides["to"], at(other, name)):
            return True
        if "from" in sides and not holds(sides["from"], at(one, name)):
            return True
    return not changed


def _most(assertion: Assertion) -> float:
    wanted = assertion.get("expected_count")
    if isinstance(wanted, Mapping):
        return wanted.get("max", float("inf"))
    return float("inf") if wanted is None else wanted


def _count(assertion: Assertion, count: int) -> bool:
    wanted = assertion.get("expected_count")
    if wanted is None:
        return count >= 1
    if isinstance(wanted, Mapping):
        return wanted.get("min", 0) <= count <= wanted.get("max", float("inf"))
    return count == wanted


def at(row: Mapping[str, Any], name: str) -> Any:
    """The value of a field, with dots for fields of fields."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def holds(predicate: Any, value: Any) -> bool:
    """Whether a value satisfies every operator of a predicate; a bare value means equality."""
    if not isinstance(predicate, Mapping):
        return value == predicate
    return all(_OPERATORS[name](value, wanted) for name, wanted in predicate.items())


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_OPERATORS = {
    "eq": lambda value, wanted: value == wanted,
    "ne": lambda value, wanted: value != wanted,
    "in": lambda value, wanted: value in wanted,
    "not_in": lambda value, wanted: value not in wanted,
    "contains": lambda value, wanted: _text(wanted) in _text(value),
    "i_contains": lambda value, wanted: _text(wanted).casefold() in _text(value).casefold(),
    "regex": lambda value, wanted: re.search(wanted, _text(value)) is not None,
    "exists": lambda value, wanted: (value is not None) == wanted,
}
OPERATORS = tuple(_OPERATORS)
