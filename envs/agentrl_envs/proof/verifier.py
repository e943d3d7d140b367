"""Judges an episode by checking the proof anew: nothing that the environment computed is taken over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, ToolCall, Verdict

from ..endings import never, unfinished
from .checker import StepError, proves
from .facts import Move, derive, from_json, labels_of
from .metamath import Symbols
from .syntax import Grammar
from .tasks import problem_from, proof_of

VERSION = "2"
MOST_LABELS = 5_000


def verify(
    task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot, stop: StopReason | None = None
) -> Verdict:
    """Measures one episode.

    Constraint `steps_explain_state`: every step of the final state was asked for by an action. Outcome: submitted, and
    the steps, derived from nothing with what stands before the theorem, give the goal. Written out as labels, where
    that is short enough, the proof must pass the checker once more. Quality: the reference's steps / the steps taken.
    """
    state: dict[str, Any] = json.loads(final.data)
    moves = from_json(state["moves"])
    asked = set(_asked(actions))
    strange = [move.label for move in moves if (move.label, move.values) not in asked]
    proved, reason = _proved(task, moves)
    reference = len(proof_of(task))
    return Verdict(
        constraints=(
            Check(name="steps_explain_state", passed=not strange, evidence=f"never asked for: {strange}"[:200]),
        ),
        outcome=proved and state["finished"],
        quality=min(1.0, reference / max(1, len(moves))) if proved else 0.0,
        diagnostics={
            "steps": len(moves),
            "submitted": state["finished"],
            "unfinished": unfinished(state["finished"], stop),
            "proved": proved,
            "reference": reference,
        },
        evidence=(reason,) if state["finished"] else (reason, never("submission", stop)),
    )


def _proved(task: Task, moves: Sequence[Move]) -> tuple[bool, str]:
    problem = problem_from(task.data)
    grammar = Grammar(problem)
    facts: list[Symbols] = []
    try:
        for move in moves:
            facts.append(derive(problem, grammar, facts, move))
    except StepError as error:
        return False, f"step {len(facts) + 1}: {error}"
    if problem.goal not in facts:
        return False, f"the goal is not among the {len(facts)} facts"
    place = facts.index(problem.goal)
    labels = labels_of(problem, grammar, moves[: place + 1], MOST_LABELS)
    if labels is not None and not proves(problem, labels):
        return False, "the proof, written out as labels, does not check"
    return True, f"fact {place + 1} is the goal"


def _asked(actions: Sequence[Action]) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    for call in (call for action in actions if action.error is None for call in action.calls):
        if call.name == "apply":
            yield str(call.arguments.get("step")), _sorted_values(call)


def _sorted_values(call: ToolCall) -> tuple[tuple[str, str], ...]:
    """As a move holds them; a call that is not well formed was refused, and explains no move."""
    values: Any = call.arguments.get("values", {})
    return tuple(sorted((name, str(value)) for name, value in values.items())) if isinstance(values, Mapping) else ()
