"""The verifier: assertions on the end state, or equivalence with what a gold command does.

For a gold command, the whole episode is played again on a second tree, one that the policy never saw: what was looked
up and written down by hand fits the first tree only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from .. import sandbox
from ..endings import unfinished
from . import episode
from .assertions import failure, paths, unpacked
from .env import plain, problem
from .episode import Episode
from .machine import Machine
from .tree import Entry, Tree, changes
from .variants import variant

VERSION = "2"


class Ending(NamedTuple):
    """What a line of commands leads to: the tree, what the last one printed, and how often a limit was met."""

    tree: Tree
    printed: bytes
    stopped: int


def verify(
    backend: str,
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """Measures one episode.

    Constraint: `no_undeclared_change` - no path, and no service, differs from the start that the task (or its gold
    command) does not change. Outcome: finished, and every assertion holds; with a gold command, the same tree as after
    it (and the same output, where it only reads), on the first tree and on the second. None if a box broke. Quality:
    1 - (calls beyond the reference's) / 8, at least 0.
    """
    start, end = episode.load(initial), episode.load(final)
    judged = _against_gold if "gold" in task.data else _against_goal
    commands = [call.arguments["command"] for call in _calls(actions) if call.name == "run" and not problem(call)]
    broken = ""
    try:
        failures, undeclared = judged(backend, task.data, start, end, [str(command) for command in commands])
    except sandbox.SandboxError as error:
        failures, undeclared, broken = [], [], str(error)[:300]
    extra = max(0, len(_calls(actions)) - len(task.data["commands"]) - 1)
    return Verdict(
        constraints=(
            Check(name="no_undeclared_change", passed=not undeclared, evidence=plain("; ".join(undeclared)[:400])),
        ),
        outcome=None if broken else not failures and end.finished,
        quality=max(0.0, 1.0 - extra / 8),
        diagnostics={
            "commands": len(commands),
            "finished": end.finished,
            "unfinished": unfinished(end.finished, stop),
            "failures": len(failures),
            "first_failure": plain(failures[0]) if failures else "",
            "verifier_error": broken,
        },
        evidence=tuple(map(plain, changes(start.tree, end.tree)[:50])),
    )


def _calls(actions: Sequence[Action]) -> list[Any]:
    return [call for action in actions if action.error is None for call in action.calls]


def _against_goal(
    backend: str, data: Mapping[str, Any], start: Episode, end: Episode, commands: Sequence[str]
) -> tuple[list[str], list[str]]:
    """No box is needed: the end state was read out of one."""
    goal = data["goal"]
    failures = [text for text in (failure(assertion, start, end) for assertion in goal) if text]
    named = {assertion["service"] for assertion in goal if "service" in assertion}
    undeclared = [path for path in changes(start.tree, end.tree) if path not in paths(goal)]
    undeclared += sorted(set(start.services) - set(end.services) - named)
    return failures, undeclared


def _against_gold(
    backend: str, data: Mapping[str, Any], start: Episode, end: Episode, commands: Sequence[str]
) -> tuple[list[str], list[str]]:
    if not commands or not end.finished:
        return ["no command was run to its end"], []
    ours = Ending(end.tree, end.printed, 0)
    gold = gold_ending(backend, data["gold"], _key(start.tree))
    failures = _differences(data["gold"], start.tree, gold, ours)
    declared = set(changes(start.tree, gold.tree))
    undeclared = [path for path in changes(start.tree, end.tree) if path not in declared]
    if not failures:
        other = variant(start.tree)
        wanted = gold_ending(backend, data["gold"], _key(other))
        again = _differences(data["gold"], other, wanted, play(backend, other, commands))
        failures = [f"on the second tree: {text}" for text in again]
    return failures, undeclared


def _key(tree: Tree) -> tuple[tuple[str, Entry], ...]:
    return tuple(sorted(tree.items()))


@lru_cache(maxsize=256)  # the members of a group are compared with the same ending
def gold_ending(backend: str, gold: str, tree: tuple[tuple[str, Entry], ...]) -> Ending:
    """What the gold command leads to. SandboxError if it met a limit: then nothing can be compared."""
    ending = play(backend, dict(tree), [gold])
    if ending.stopped:
        raise sandbox.SandboxError(f"the gold command was stopped: {gold[:80]}")
    return ending


def play(backend: str, tree: Tree, commands: Sequence[str]) -> Ending:
    """What the commands lead to, one after the other, in a fresh box. Nothing is run after a time limit."""
    machine = Machine(backend, tree, ())
    printed, stopped = b"", 0
    try:
        for command in commands:
            ran = machine.run(command)
            tree, printed, stopped = ran.tree, ran.stdout, stopped + bool(ran.stopped)
            if ran.stopped == "time":
                break
    finally:
        machine.close()
    return Ending(tree, printed, stopped)


def _differences(gold: str, start: Tree, wanted: Ending, found: Ending) -> list[str]:
    """How an ending differs from the gold's: in the tree, and in the output where the gold changes nothing."""
    differing = [path for path in changes(wanted.tree, found.tree) if not _same(wanted.tree, found.tree, path)]
    if differing:
        return [f"{path} differs from what the gold command leaves" for path in differing]
    reads_only = not changes(start, wanted.tree)
    if reads_only and _lines(gold, wanted.printed) != _lines(gold, found.printed):
        return ["the output differs from the gold command's"]
    return []


def _same(one: Tree, other: Tree, path: str) -> bool:
    """Packed files hold times: their members are compared."""
    left, right = one.get(path), other.get(path)
    if left is None or right is None or not path.endswith((".tar", ".tgz", ".gz")):
        return left == right
    return (left.kind, left.mode) == (right.kind, right.mode) and _members(left) == _members(right)


def _members(entry: Entry) -> Any:
    try:
        return unpacked(entry.content)
    except ValueError:
        return entry.content


ORDERS = re.compile(r"\b(sort|head|tail|tac|nl|od|rev|cut -b|uniq)\b")
WALKS = re.compile(r"\b(find|grep -\w*r|ls -\w*R|tree)\b")


def _lines(gold: str, printed: bytes) -> list[bytes]:
    """The output's lines without blanks at their ends. A walk over a folder lists in any order: then it is sorted."""
    lines = [line.rstrip() for line in printed.strip().splitlines()]
    return sorted(lines) if WALKS.search(gold) and not ORDERS.search(gold) else lines
