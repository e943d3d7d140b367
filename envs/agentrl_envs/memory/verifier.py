"""The verifier: replays the operations and looks at the store whenever the policy reads on.

    success = no_stale_fact and no_private_fact and storage_kept and actions_explain  and  every question answered right

A right answer names the current value and a note that holds it: what was read long ago counts only if it was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from ..endings import unfinished
from . import machine
from .env import unpack
from .machine import Limits, State, holds
from .stream import UNKNOWN

VERSION = "2"


@dataclass(slots=True)
class _Seen:
    stale: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)
    calls: int = 0
    refused: int = 0


def verify(
    limits: Limits,
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """Measures one episode.

    Constraints: `no_stale_fact` - no note holds a value that was corrected in a chunk the policy has read past;
    `no_private_fact` - a secret is never in a note, a fact to be forgotten in none after the chunk that says so;
    `storage_kept`; `actions_explain` - the operations lead to the final state. Outcome: the lesser of the shares of
    right answers among what is known and among what is unknown, so that neither always guessing nor never answering
    scores. Quality: the reference's storage over the greatest that was used, at most 1.
    """
    data, end = task.data, unpack(final)
    state, seen = unpack(initial), _Seen()
    for action in actions:
        for call in action.calls:
            new, _ = machine.apply(data, limits, state, call)
            seen.calls += 1
            seen.refused += new is state
            _inspect(data, limits, state, new, seen)
            state = new
    size = sum(map(len, end.notes.values()))
    kept = size <= limits.characters and len(end.notes) <= limits.notes
    right = [_right(question, end, i) for i, question in enumerate(data["questions"])]
    known = [ok for ok, q in zip(right, data["questions"], strict=True) if q["answer"] != UNKNOWN]
    unknown = [ok for ok, q in zip(right, data["questions"], strict=True) if q["answer"] == UNKNOWN]
    return Verdict(
        constraints=(
            Check(name="no_stale_fact", passed=not seen.stale, evidence="; ".join(seen.stale)[:400]),
            Check(name="no_private_fact", passed=not seen.private, evidence="; ".join(seen.private)[:400]),
            Check(name="storage_kept", passed=kept, evidence=f"{len(end.notes)} notes, {size} characters"),
            Check(name="actions_explain", passed=state == end, evidence="" if state == end else "another final state"),
        ),
        outcome=min(sum(known) / len(known), sum(unknown) / len(unknown)),
        quality=min(1.0, reference_size(data) / end.peak) if end.peak else 1.0,
        diagnostics={
            "calls": seen.calls, "refused": seen.refused, "notes": len(end.notes), "characters": size,
            "peak": end.peak, "answered": len(end.answers),
            "unfinished": unfinished(len(end.answers) >= len(data["questions"]), stop),
            "right_known": sum(known), "known": len(known), "right_unknown": sum(unknown), "unknown": len(unknown),
        },
        evidence=tuple(f"{q['text']} {a!r}" for q, a in zip(data["questions"], end.answers, strict=False)),
    )  # fmt: skip


def note(person: str, attribute: str, value: str) -> str:
    """How the reference writes a fact down."""
    return f"{person} {attribute} {value}"


def reference_size(data: Mapping[str, Any]) -> int:
    """The most characters that the reference stores at once."""
    held: dict[tuple[str, str], int] = {}
    peak = 0
    for event in data["events"]:
        key = (event["person"], event["attribute"])
        if event["kind"] in ("tell", "change"):
            held[key] = len(note(*key, event["value"]))
        elif event["kind"] == "forget":
            held.pop(key, None)
        peak = max(peak, sum(held.values()))
    return peak


def _inspect(data: Mapping[str, Any], limits: Limits, before: State, after: State, seen: _Seen) -> None:
    """Secrets at every change; superseded and forgotten values whenever a chunk is left behind."""
    if after.notes != before.notes:
        for event in data["events"]:
            if event["kind"] == "secret":
                _find(after, event["value"], f"{event['person']}'s secret", seen.private)
    if after.read > before.read:
        last: dict[tuple[str, str], str] = {}
        for event in data["events"]:
            if event["turn"] >= after.read * limits.chunk:
                break
            key = (event["person"], event["attribute"])
            if event["kind"] in ("change", "forget"):
                into = seen.stale if event["kind"] == "change" else seen.private
                _find(after, last[key], f"{key[0]}'s {key[1]}", into)
            last[key] = event["value"]


def _find(state: State, value: str, what: str, into: list[str]) -> None:
    for number, text in state.notes.items():
        words = f"{what} {value} in note {number}"
        if holds(text, value) and words not in into:
            into.append(words)


def _right(question: Mapping[str, Any], state: State, place: int) -> bool:
    if place >= len(state.answers):
        return False
    text, number = state.answers[place]
    if text.strip().strip(".").casefold() != question["answer"].casefold():
        return False
    if question["answer"] == UNKNOWN:
        return True
    held = state.notes.get(number, "")
    return holds(held, question["answer"]) and holds(held, question["person"])
