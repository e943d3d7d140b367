"""The verifier: compares the tenant before and after, and replays what was done on the state it was done to.

    success = policy_kept  and  no_undeclared_change  and  goal rows reached  and  finished as expected  and  evidence

It trusts neither the environment's log nor the final state alone: the actions are replayed on the initial snapshot,
each write is judged in the state in which it happens, and the final state must be the one that the replay leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from ..endings import unfinished
from . import dry, policy, schema, tools
from .options import Options
from .schema import Change

VERSION = "2"


@dataclass(slots=True)
class Replay:
    """What the actions did, as seen again."""

    calls: int = 0
    invalid: int = 0
    writes: int = 0
    forbidden: list[str] = field(default_factory=list)
    undeclared: list[Change] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    finished: str | None = None
    dump: dict = field(default_factory=dict)


def verify(
    options: Options,
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """Measures one episode.

    Constraints: `policy_kept` - each write that was carried out was allowed when it happened;
    `no_undeclared_change` - every change, also one undone later, is a row of the goal, and the actions explain the
    final state. Outcome: all goal rows reached, finished with the expected result, and for a refusal (or a plain
    lookup) one of the records that show why had been read before: a refusal by guess is no success.
    Quality: 1 - (calls beyond the reference's) / (the reference's), at least 0.
    """
    data = task.data
    goal = {Change(*change) for change in data["goal"]}
    before, after = _dump(initial), _dump(final)
    replay = _replay(options, task, goal, initial, actions)
    changed = schema.difference(before, after)
    undeclared = sorted(changed - goal, key=repr) + replay.undeclared
    unexplained = replay.dump != after
    evidence_read = not data["evidence"] or not replay.read.isdisjoint(data["evidence"])
    reached = goal <= changed
    outcome = reached and replay.finished == data["finish"] and evidence_read
    seen = "; ".join(f"{c.table} {c.key} {c.column} -> {c.value}" for c in undeclared)
    if unexplained:
        seen = (seen + "; the actions do not lead to the final state").removeprefix("; ")
    least = data["calls"] + (options.dry_run and bool(data["goal"]))
    extra = max(0, replay.calls - least)
    return Verdict(
        constraints=(
            Check(name="policy_kept", passed=not replay.forbidden, evidence="; ".join(replay.forbidden)),
            Check(name="no_undeclared_change", passed=not undeclared and not unexplained, evidence=seen),
        ),
        outcome=outcome,
        quality=max(0.0, 1.0 - extra / least),
        diagnostics={
            "calls": replay.calls,
            "invalid_calls": replay.invalid,
            "writes": replay.writes,
            "refusal_expected": data["finish"] == "refused",
            "reason": data["reason"],
            "finished": replay.finished or "",
            "unfinished": unfinished(replay.finished is not None, stop),
            "goal_reached": reached,
            "evidence_read": evidence_read,
        },
        evidence=tuple(sorted(replay.read)),
    )


def _dump(snapshot: Snapshot) -> dict:
    connection = schema.open_bytes(snapshot.data)
    try:
        return schema.dump(connection, schema.SERVICE_TABLES)
    finally:
        connection.close()


def _replay(options: Options, task: Task, goal: set[Change], initial: Snapshot, actions: Sequence[Action]) -> Replay:
    replay = Replay()
    connection = schema.open_bytes(initial.data)
    try:
        for action in actions:
            if replay.finished is not None:
                break
            if action.error is not None or not action.calls:
                replay.calls += 1
                replay.invalid += 1
                continue
            for asked in action.calls:
                if replay.finished is None:
                    _again(connection, options, task, goal, asked, replay)
        replay.dump = schema.dump(connection, schema.SERVICE_TABLES)
    finally:
        connection.close()
    return replay


def _again(
    connection: schema.Connection,
    options: Options,
    task: Task,
    goal: set[Change],
    asked: tools.ToolCall,
    replay: Replay,
) -> None:
    """One call again: judged by the policy first, then carried out; its cell changes are compared one by one."""
    replay.calls += 1
    prepared = dry.prepare(connection, options, asked)
    resolved = prepared.resolved
    if isinstance(resolved, str):
        replay.invalid += 1
        return
    row, arguments = resolved
    writes = row.writes and not prepared.dry
    if writes:
        replay.writes += 1
        rule = policy.forbids(connection, row.name, arguments, task.data["customer"], options.policies)
        if rule is not None:
            replay.forbidden.append(f"{row.name} {' '.join(map(str, arguments.values()))}: {rule}")
    before = schema.dump(connection, schema.SERVICE_TABLES) if writes else {}
    reply = dry.execute(connection, prepared)
    if writes:
        moved = schema.difference(before, schema.dump(connection, schema.SERVICE_TABLES))
        replay.undeclared += sorted(moved - goal, key=repr)
    if reply.read is not None:
        replay.read.add(reply.read)
    if reply.finished is not None:
        replay.finished = reply.finished
