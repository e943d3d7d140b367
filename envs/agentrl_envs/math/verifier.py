"""Compares the one answer with the reference's, exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from ..endings import never, unfinished
from .answers import Unreadable, equal, read

VERSION = "2"


def verify(
    task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot, stop: StopReason | None = None
) -> Verdict:
    """Measures one episode.

    Constraint `answer_was_given`: the state's answer is the value of an `answer` call. Outcome: it is written in the
    form asked for and equals the reference's; unscored where expressions must be compared and sympy is not installed.
    Quality: 1 for as few calculations as the reference's, less for more.
    """
    state = json.loads(final.data)
    given = state["answer"]
    said = [
        call.arguments.get("value")
        for action in actions
        if action.error is None
        for call in action.calls
        if call.name == "answer"
    ]
    outcome, reason = _judged(task, given, stop)
    extra = max(0, state["calls"] - len(task.data["steps"]))
    return Verdict(
        constraints=(
            Check(
                name="answer_was_given",
                passed=given is None or given in said,
                evidence="" if given is None or given in said else f"no call gave {given[:60]!r}",
            ),
        ),
        outcome=outcome,
        quality=1 / (1 + extra),
        diagnostics={
            "calls": state["calls"],
            "answered": given is not None,
            "unfinished": unfinished(given is not None, stop),
            "form": task.data["form"],
        },
        evidence=(reason,),
    )


def _judged(task: Task, given: str | None, stop: StopReason | None) -> tuple[bool | None, str]:
    if given is None:
        return False, never("answer", stop)
    form = task.data["form"]
    try:
        answer = read(form, given)
    except Unreadable as error:
        return False, f"unreadable: {error}"
    try:
        right = equal(answer, read(form, str(task.data["answer"])))
    except ImportError:
        return None, "sympy is not installed: pip install 'agentrl-jax[math]'"
    return right, f"{given[:60]!r} is {'' if right else 'not '}the reference's answer"
