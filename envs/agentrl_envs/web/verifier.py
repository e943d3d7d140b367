"""The verifier: what the page says, and whether its end agrees.

A form of ours holds no reward: what it submitted is compared with the request. A MiniWoB++ page gives its own reward
(the raw one, which no clock touches), and its end is compared with what its text asked for; a page that pays for an
end that the text did not ask for breaks the constraint `end_state`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from ..endings import unfinished
from . import goals

VERSION = "2"


def verify(
    task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot, stop: StopReason | None = None
) -> Verdict:
    """Measures one episode.

    Constraints: `history_explained` - the state's history is the initial one and then the episode's calls;
    `end_state`. Outcome: True when the request was fulfilled, a score for a page's partial reward, False for none or
    a penalty; None when a state cannot be read. Quality: the share of turns that called a tool.
    """
    try:
        before, after = json.loads(initial.data), json.loads(final.data)
        start, end = before["measured"], after["measured"]
        outcome = _outcome(task, end)
        differs = _differs(task, start, end) if outcome else ""
        unexplained = _unexplained(before, after, actions)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return Verdict(outcome=None, diagnostics={"unreadable": f"{type(error).__name__}: {error}"[:200]})
    called = sum(bool(action.calls) for action in actions)
    return Verdict(
        constraints=(
            Check(name="history_explained", passed=not unexplained, evidence=unexplained),
            Check(name="end_state", passed=not differs, evidence=differs),
        ),
        outcome=outcome,
        quality=called / max(1, len(actions)),
        diagnostics={
            "calls": sum(len(action.calls) for action in actions),
            "page_ended": end["ended"],
            "unfinished": unfinished(end["ended"], stop),
            "page_reward": end["reward"],
        },
        evidence=(str(end["page"]),),
    )


def _outcome(task: Task, end: dict[str, Any]) -> bool | float:
    if task.data["source"] == "forms":
        return end["submitted"] == dict(task.data["goal"])
    reward = float(end["reward"] or 0.0)
    return reward if 0.0 < reward < 1.0 else reward >= 1.0


def _differs(task: Task, start: dict[str, Any], end: dict[str, Any]) -> str:
    """Where a rewarded end is not the end that was asked for; a partial reward is for a partial end."""
    if task.data["source"] == "forms":
        submitted = {str(value) for value in end["submitted"].values()}
        held = [field for field in goals.fields(end["elements"]) if field["value"] and field["value"] not in submitted]
        return f"the page holds what it did not submit: {', '.join(field['name'] for field in held)}" if held else ""
    if end["reward"] < 1.0:
        return ""
    return goals.wrong(goals.goal(task.kind, start["query"], start["elements"]), end["elements"], end["pressed"])


def _unexplained(before: dict[str, Any], after: dict[str, Any], actions: Sequence[Action]) -> str:
    recorded = [[[call["name"], call["arguments"]] for call in action["calls"]] for action in after["actions"]]
    known = len(before["actions"])
    if before["actions"] != after["actions"][:known] or before["observations"] != after["observations"][: known + 1]:
        return "the final state does not continue the initial one"
    claimed = [[[call.name, dict(call.arguments)] for call in action.calls] for action in actions]
    if recorded[known:] == claimed[: len(recorded) - known]:  # what came after the end changed nothing
        return ""
    return f"the state comes from {len(recorded) - known} actions, which are not the episode's {len(claimed)}"
