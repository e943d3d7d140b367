"""What a property is held to, and how it says that it does not hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_jax.protocol import EnvironmentRef, Suite, Task, ToolCall

from . import agents


class Violation(AssertionError):
    """The property does not hold; the message is one line for the author."""


class Inapplicable(Exception):
    """There is nothing to hold the property to; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An environment and the tasks it is held to. Without `ref` it has no name, so no other process tries it."""

    suite: Suite
    tasks: tuple[Task, ...]
    ref: EnvironmentRef | None = None
    seed: int = 0
    splits: Mapping[str, tuple[Task, ...]] = field(default_factory=dict)


Property = Callable[[Case], str]  # what it measured, in a few words


def require(holds: bool, task: Task | None, reason: str) -> None:
    if not holds:
        raise Violation(f"{task.id}: {reason}" if task is not None else reason)


def reference(case: Case) -> Callable[[Task], Sequence[ToolCall | str]]:
    if case.suite.solve is None:
        raise Inapplicable("the suite has no reference solution")
    return case.suite.solve


def scripts(case: Case) -> list[tuple[str, Callable[[Task], Any]]]:
    """What to play: the reference solution first, where there is one, and random calls."""

    def at_random(task: Task) -> list[ToolCall]:
        return list(agents.random_script(case.suite, random.Random(f"{case.seed}/{task.id}")))

    solve = case.suite.solve
    return [*([("the reference solution", solve)] if solve is not None else []), ("a random agent", at_random)]


def forkable(case: Case) -> None:
    if case.suite.spec.fork == "none":
        raise Inapplicable("the environment says fork='none'")


def difference(one: Sequence[str], two: Sequence[str], observations: int) -> str | None:
    for index, (left, right) in enumerate(itertools.zip_longest(one, two)):
        if left != right:
            kind, turn = ("observation", index) if index < observations else ("state", index - observations)
            return f"the {kind} after {'reset' if turn == 0 else f'turn {turn}'}"
    return None
