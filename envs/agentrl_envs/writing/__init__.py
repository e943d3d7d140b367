"""A brief and a rough draft: edit it, submit it, and be preferred to a rival draft.

What is measured is a judge's preference, asked in both orders; nothing is claimed about truth. `suite(...)` is the
whole interface.
"""

from __future__ import annotations

import random
from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task

from . import briefs, scripts, tools, verifier
from .env import WritingEnvironment

__all__ = ["suite"]
VERSION = "1"
SPLITS = tuple(briefs.SUBJECTS)


def suite(
    judge: str = "agentrl_envs.writing.rules:judge",
    system: bool = True,
    max_calls: int = 16,
    sloppiness: float = 0.6,
) -> Suite:
    """The writing suite.

    `judge`: `package.module:function`, a function of (brief, first, second) that answers "first", "second" or "tie";
    the default counts what the brief measurably asks for. `brief["text"]` is what the policy was asked, the other
    fields say the same as data. `sloppiness`: how often a demonstration has a slip. Unknown values raise ValueError.
    """
    if max_calls < 6:
        raise ValueError(f"writing: max_calls={max_calls!r}; the longest reference solution with a reserve needs 6")
    if not 0.0 <= sloppiness <= 1.0:
        raise ValueError(f"writing: sloppiness={sloppiness!r}; expected a number from 0 to 1")
    asked = verifier.load(judge)
    budget = Budget(steps=max_calls, tool_calls=max_calls, write_actions=max_calls, retries=5, finishing=("submit",))
    spec = EnvironmentSpec(name="writing", version=VERSION, tools=tools.TOOLS, budget=budget, fork="native")
    return Suite(
        spec=spec,
        make=lambda: WritingEnvironment(spec, system),
        tasks=_tasks,
        verify=partial(verifier.verify, asked),
        verifier_version=f"{verifier.VERSION}+{judge}",
        solve=scripts.solve,
        demonstrate=partial(scripts.demonstrate, sloppiness),
        attacks=scripts.attacks,
        hidden=("rival", "mends", "faults"),
    )


def _tasks(split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks; subjects of one split appear in no other."""
    if split not in SPLITS:
        raise ValueError(f"writing: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    made: dict[str, Task] = {}
    rng = random.Random(f"writing/{split}/{seed}")
    while len(made) < count:
        data = briefs.task_data(rng, split)
        name = f"{split}-{seed}-{len(made)}"
        made.setdefault(data["brief"]["text"], Task(id=name, split=split, kind=data["faults"][-1], data=data))
    return tuple(made.values())
