"""The verifier: is the submitted draft preferred to a rival one? Asked twice, with the two texts in both orders.

    success = the actions explain the draft  and  it speaks to no judge  and  it is preferred in both orders

It measures a preference and claims no truth. A judge that changes its mind with the order has said nothing, and one
that fails has said nothing either: both leave the episode unscored, the latter with the evaluator as the cause.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentrl_jax.protocol import Action, Cause, Check, Json, Snapshot, Status, StopReason, Task, Verdict

from ..endings import unfinished
from . import gate, rules, tools

VERSION = "2"
Judge = Callable[[Mapping[str, Any], str, str], str]  # (brief, first, second) -> one of ANSWERS
ANSWERS = ("first", "second", "tie")
SWAPPED = {"first": "second", "second": "first", "tie": "tie"}
SCORES = {"first": 1.0, "tie": 0.5, "second": 0.0}


def load(target: str) -> Judge:
    """The judge named `package.module:function`. Raises ValueError that says what is wrong with the name."""
    module, _, name = target.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"writing: judge={target!r} cannot be loaded ({error}); expected 'package.module:function'"
        ) from error
    if not callable(found):
        raise ValueError(f"writing: judge={target!r} is no function of (brief, first, second)")
    return cast("Judge", found)


def verify(
    judge: Judge,
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """Measures one episode. Outcome: 1.0 preferred, 0.5 as good, 0.0 worse or not submitted, None unscored.
    Quality: 1 - (calls beyond the reference's) / (the reference's), at least 0."""
    start, end = json.loads(initial.data), json.loads(final.data)
    replayed, calls, invalid = _replay(start, actions)
    draft = "\n".join(end["lines"])
    explained = replayed == end
    odd, addressed = gate.odd_characters(draft), gate.addresses_the_judge(draft)
    met = rules.measure(task.data["brief"], draft)
    diagnostics: dict[str, Json] = {
        "calls": calls, "invalid_calls": invalid, "submitted": end["submitted"],
        "unfinished": unfinished(end["submitted"], stop),
        "requirements": len(met), "unmet": [name for name, fine in met.items() if not fine],
    }  # fmt: skip
    outcome: float | None = 0.0
    if end["submitted"] and explained and not odd and not addressed:
        outcome, said = prefer(judge, task.data["brief"], draft, task.data["rival"])
        diagnostics |= said
    reference = len(task.data["mends"]) + 1
    return Verdict(
        constraints=(
            Check(
                name="actions_explain_state",
                passed=explained,
                evidence="" if explained else "the actions do not lead to the final draft",
            ),
            Check(name="addresses_no_judge", passed=not addressed, evidence="; ".join(addressed)),
            Check(name="plain_characters", passed=not odd, evidence=", ".join(odd[:8])),
        ),
        outcome=outcome,
        quality=max(0.0, 1.0 - max(0, calls - reference) / reference),
        diagnostics=diagnostics,
    )


def prefer(judge: Judge, brief: Mapping[str, Any], draft: str, rival: str) -> tuple[float | None, dict[str, Json]]:
    """The draft's score against the rival, from both orders, and what to report; None when nothing was said."""
    answers = []
    for first, second in ((draft, rival), (rival, draft)):
        try:
            answer = judge(brief, first, second)
        except Exception as error:
            return None, _failed(f"{type(error).__name__}: {error}"[:200])
        if answer not in ANSWERS:
            return None, _failed(f"the judge answered {answer!r:.60}; expected one of {', '.join(ANSWERS)}")
        answers.append(answer)
    if answers[0] != SWAPPED[answers[1]]:
        said = f"{answers[0]} of (draft, rival), {answers[1]} of (rival, draft)"
        return None, {"judge": said, "unscored": "the judge goes by the order"}
    return SCORES[answers[0]], {"judge": {"first": "draft", "second": "rival", "tie": "tie"}[answers[0]]}


def _failed(reason: str) -> dict[str, Json]:
    return {"unscored": f"the judge failed: {reason}", "cause": Cause.EVALUATOR.value}


def _replay(start: dict[str, Any], actions: Sequence[Action]) -> tuple[dict[str, Any], int, int]:
    state, calls, invalid = json.loads(json.dumps(start)), 0, 0
    for action in actions:
        if state["submitted"]:
            break
        if action.error is not None or not action.calls:
            calls, invalid = calls + 1, invalid + 1
            continue
        for call in action.calls:
            if not state["submitted"]:
                reply = tools.execute(state, call)
                calls, invalid = calls + 1, invalid + (reply.status is Status.INVALID_ACTION)
    return state, calls, invalid
