"""Compares the user's rows with those that the annotated actions lead to, cell by cell."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, ToolCall, Verdict

from ..endings import unfinished
from .service import Catalogue, Denied, Invalid, State, execute
from .tools import WRITES

VERSION = "3"
MAX_ANSWER, MAX_NUMBERS = 1_000, 24  # characters; numbers. The longest annotated answer has 7 parts
Cell = tuple[str, str, str, str]


def verify(
    catalogue: Catalogue,
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """Measures one episode.

    Constraints: `policy_kept` - the service had to deny no write that the annotation does not attempt as well;
    `no_undeclared_change` - every cell changed on the way is one that the annotation changes, to the same value, and
    the actions lead to the final state. Outcome: the same rows as after the annotated actions, finished, and each
    annotated output stands in the answer, which is no list of candidates (`MAX_ANSWER`, `MAX_NUMBERS`).
    Quality: 1 - (calls beyond the annotation's) / (the annotation's + 1).
    """
    start, end = json.loads(initial.data), json.loads(final.data)
    calls = [call for action in actions if action.error is None for call in action.calls]
    annotated = [ToolCall(name=a["name"], arguments=a["kwargs"]) for a in task.data["actions"]]
    expected, allowed, excused = _run(catalogue, initial, annotated)
    replayed, touched, denied = _run(catalogue, initial, calls)
    target, reached = set(_cells(expected)), set(_cells(end))
    undeclared = sorted((touched | (reached - set(_cells(start)))) - allowed - target)
    gone = sorted(set(_cells(start)) - reached - (set(_cells(start)) - target))
    explained = replayed == end
    evidence = "; ".join("/".join(cell) for cell in undeclared + gone)
    if not explained:
        evidence = (evidence + "; the actions do not lead to the final state").removeprefix("; ")
    breaches = [text for text in denied if text not in excused]
    missing = _missing(task.data["outputs"], end["answer"])
    extra = max(0, len(calls) + sum(not action.calls for action in actions) - len(annotated) - 1)
    return Verdict(
        constraints=(
            Check(name="policy_kept", passed=not breaches, evidence="; ".join(breaches)),
            Check(name="no_undeclared_change", passed=not undeclared and not gone and explained, evidence=evidence),
        ),
        outcome=target == reached and end["finished"] and not missing,
        quality=max(0.0, 1.0 - extra / (len(annotated) + 1)),
        diagnostics={
            "calls": len(calls),
            "writes": sum(call.name in WRITES for call in calls),
            "finished": end["finished"],
            "unfinished": unfinished(end["finished"], stop),
            "goal_reached": target == reached,
            "outputs_missing": len(missing),
        },
    )


def _missing(outputs: Sequence[str], answer: str) -> list[str]:
    """The outputs that the answer does not name as whole words; all of them where it lists whatever may be right."""
    said = answer.lower().replace(",", "")
    if len(said) > MAX_ANSWER or len(re.findall(r"\d+", said)) > MAX_NUMBERS:
        return list(outputs)
    wanted = {text: re.escape(text.lower().replace(",", "")) for text in outputs}
    return [text for text, plain in wanted.items() if not re.search(rf"(?<![\w.]){plain}(?![\w]|\.\d)", said)]


def _run(catalogue: Catalogue, initial: Snapshot, calls: Sequence[ToolCall]) -> tuple[State, set[Cell], list[str]]:
    """The state after the calls, every cell value that a write set on the way, and the writes that were denied."""
    state: State = json.loads(initial.data)
    touched: set[Cell] = set()
    denied: list[str] = []
    for call in calls:
        if state["finished"]:
            break
        before = set(_cells(state)) if call.name in WRITES else set()
        with contextlib.suppress(Invalid):
            try:
                execute(catalogue, state, call)
            except Denied as error:
                denied.append(f"{call.name} {call.arguments.get('order_id', '')}: {error}")
        if call.name in WRITES:
            touched |= set(_cells(state)) - before
    return json.loads(json.dumps(state)), touched, denied


def _cells(state: dict[str, Any]) -> Iterator[Cell]:
    """(table, key, column, value as JSON) of every field of every row."""
    for table in ("users", "orders"):
        for key, row in state[table].items():
            for column, value in row.items():
                yield table, key, column, json.dumps(value, sort_keys=True)
