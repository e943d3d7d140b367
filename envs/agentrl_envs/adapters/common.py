"""What all adapters share: how foreign observations are shown, and how foreign rewards become a verdict."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from ..endings import unfinished
from ..transcripts import action_to_json

SPLITS = ("train", "validation", "heldout")
MOST_SEEDS = 1_000_000
JUDGE_VERSION = "2"


def seeded_tasks(name: str, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` tasks that differ in the foreign environment's seed; the splits share no seed."""
    check_split(name, split)
    if not 0 <= count <= MOST_SEEDS:
        raise ValueError(f"{name}: count={count}; expected 0 to {MOST_SEEDS}")
    drawn = random.Random(f"{split}/{seed}").sample(range(MOST_SEEDS), count)
    seeds = [len(SPLITS) * number + SPLITS.index(split) for number in drawn]
    return tuple(Task(id=f"{name}-{one}", split=split, kind=name, data={"seed": one}) for one in seeds)


def check_split(name: str, split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"{name}: split={split!r} is not known; expected one of {', '.join(SPLITS)}")


def split_of(content: str) -> str:
    """Eight tenths train, one tenth each of the others, by a hash of the content."""
    tenth = int(hashlib.sha256(content.encode()).hexdigest(), 16) % 10
    return "train" if tenth < 8 else "validation" if tenth == 8 else "heldout"


def say(value: Any) -> str:
    """An observation as text: strings as they are, arrays as lists, numbers to four places."""
    return value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else str(value)
    return str(value)


def reward_of(value: Any) -> float | None:
    """A foreign reward as a number, or None for whatever is none: None, NaN, a text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return float(value)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def verify(
    goal: float | None,
    most: float,
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """The verifier of an adapter whose rewards say all: `judge` over every reward of the episode."""
    del task, initial
    return judge(actions, final, goal, stop, most=most)


def judge(
    actions: Sequence[Action],
    final: Snapshot,
    goal: float | None,
    stop: StopReason | None,
    *,
    most: float = 1.0,
    last_only: bool = False,
) -> Verdict:
    """The verdict over the rewards in a replayed state.

    Outcome: whether the return (or, with `last_only`, the last reward) reaches `goal`; without a goal the return over
    `most` as a score from 0 to 1. One reward that is None leaves the episode unscored. An episode that the
    foreign environment did not end is False, whatever its rewards: to stop early, or to use up a budget, is the
    policy's doing; `unfinished` says which.
    """
    history = json.loads(final.data)
    measured = history["measured"]
    rewards: list[float | None] = measured["rewards"]
    played = [action_to_json(action) for action in actions]
    explained = json.loads(json.dumps(played, default=list)) == history["actions"]
    outcome: bool | float | None
    known = [reward for reward in rewards if reward is not None]
    total = (known[-1] if known else 0.0) if last_only else sum(known)
    unscored = (rewards[-1:] == [None]) if last_only else len(known) < len(rewards)
    if not measured["ended"]:
        outcome, unscored = False, False
    elif unscored:
        outcome = None
    elif goal is not None:
        outcome = total >= goal
    else:
        outcome = min(1.0, max(0.0, total / most))
    return Verdict(
        constraints=(Check(name="actions_explain_state", passed=explained, evidence=""),),
        outcome=outcome,
        diagnostics={
            "return": total,
            "rewards": len(rewards),
            "ended": measured["ended"],
            "unfinished": unfinished(measured["ended"], stop),
        },
        evidence=("a reward was None",) if unscored else (),
    )
