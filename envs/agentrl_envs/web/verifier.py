"""The verifier: what the page says, and whether its end agrees.

A form of ours holds no reward: what it submitted is compared with the request. A MiniWoB++ page gives its own reward
(the raw one, which no clock touches), and its end is compared with what its text asked for; a page that pays for an
end that the text did not ask for breaks the constraint `end_state`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl_jax.protocol import Action, Check, Snapshot, Task, Verdict

from . import goals

VERSION = "1"


def verify(task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot) -> Verdict:
    """Measures one episode.

    Constraints: `log_explained` - the state's log consists of the episode's calls in their order; `end_state`.
    Outcome: True when the request was fulfilled, a score for a page's partial reward, False for none or a
    penalty; None when a state cannot be read. Quality: 1 - wrong calls / calls.
    """
    try:
        before, after = json.loads(initial.data), json.loads(final.data)
        outcome = _outcome(task, after)
        differs = _differs(task, before, after) if outcome else ""
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return Verdict(outcome=None, diagnostics={"unreadable": f"{type(error).__name__}: {error}"[:200]})
    calls = [call for action in actions for call in action.calls]
    unexplained = _unexplained(before["log"], after["log"], calls)
    turns = max(1, len(actions))
    used = len(after["log"]) - len(before["log"])
    return Verdict(
        constraints=(
            Check(name="log_explained", passed=not unexplained, evidence=unexplained),
            Check(name="end_state", passed=not differs, evidence=differs),
        ),
        outcome=outcome,
        quality=max(0.0, 1.0 - max(0, len(calls) - used) / max(turns, len(calls))),
        diagnostics={
            "calls": len(calls),
            "on_the_page": used,
            "page_ended": after["ended"],
            "page_reward": after["reward"],
            "finished": after["finished"],
        },
        evidence=(str(after["page"]),),
    )


def _outcome(task: Task, after: dict[str, Any]) -> bool | float:
    if task.data["source"] == "forms":
        return after["submitted"] == dict(task.data["goal"])
    reward = float(after["reward"] or 0.0)
    return reward if 0.0 < reward < 1.0 else reward >= 1.0


def _differs(task: Task, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Where a rewarded end is not the end that was asked for; a partial reward is for a partial end."""
    if task.data["source"] == "forms":
        held = {element["name"]: element["value"] for element in goals.fields(after["elements"])}
        texts = {str(value) for value in after["submitted"].values()}
        lost = [name for name, value in held.items() if value and value not in texts]
        return f"the page holds what it did not submit: {', '.join(lost)}" if lost else ""
    if after["reward"] < 1.0:
        return ""
    goal = goals.goal(task.kind, before["query"], before["elements"])
    return goals.wrong(goal, after["elements"], after["pressed"])


def _unexplained(before: list, after: list, calls: Sequence[Any]) -> str:
    if after[: len(before)] != before:
        return "the final state does not continue the initial one"
    left = iter((call.name, dict(call.arguments)) for call in calls)
    for name, arguments, _ in after[len(before) :]:
        if (name, arguments) not in left:  # consumes: the order counts
            return f"{name} {arguments} is in the state's log and no call of the episode"
    return ""
