"""One list of properties that every environment joins. `check(case(ref))` is `agentrl env check`.

A property is a plain function over a `Case` (a suite and some tasks); it returns what it measured, or raises
`Violation` or `Inapplicable` with one line. `PROPERTIES` is the list; its docstrings are the contract in words.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl_jax.protocol import EnvironmentRef, Suite, Task

from .cases import Case, Inapplicable, Property, Violation
from .manners import (
    bad_calls_are_answered,
    calls_are_answered_in_order,
    close_is_safe,
    nothing_is_left_behind,
    records_travel,
)
from .scoring import (
    attackers_fail,
    limits_are_no_way_out,
    null_agent_fails,
    random_agent_fails,
    reference_scores_full,
    verdicts_are_measurements,
)
from .secrecy import hidden_data_stays_hidden, splits_are_disjoint
from .states import (
    ends_are_honest,
    hash_tells_states_apart,
    no_jax_is_imported,
    nothing_happens_after_the_end,
    other_process_same_transcript,
    restore_is_exact,
    same_seed_same_transcript,
    siblings_are_isolated,
)

__all__ = ["PROPERTIES", "Case", "Finding", "Inapplicable", "Property", "Violation", "case", "check", "hold"]
SPLITS = ("train", "validation", "heldout")
PROPERTIES: tuple[Property, ...] = (
    reference_scores_full,
    null_agent_fails,
    random_agent_fails,
    attackers_fail,
    verdicts_are_measurements,
    limits_are_no_way_out,
    same_seed_same_transcript,
    other_process_same_transcript,
    restore_is_exact,
    siblings_are_isolated,
    hash_tells_states_apart,
    nothing_happens_after_the_end,
    ends_are_honest,
    bad_calls_are_answered,
    calls_are_answered_in_order,
    close_is_safe,
    nothing_is_left_behind,
    records_travel,
    no_jax_is_imported,
    splits_are_disjoint,
    hidden_data_stays_hidden,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One property of one environment: `holds`, is `broken`, or there was nothing to hold it to (`skipped`)."""

    name: str
    result: Literal["holds", "broken", "skipped"]
    reason: str


def case(target: EnvironmentRef | Suite, count: int = 3, seed: int = 0, spread: int = 8) -> Case:
    """`count` tasks of `train` to play, and `spread` of each split to compare; fewer where a split has fewer."""
    suite = target.load() if isinstance(target, EnvironmentRef) else target
    splits = {split: _some(suite, split, spread, seed) for split in SPLITS}
    ref = target if isinstance(target, EnvironmentRef) else None
    return Case(suite=suite, tasks=_some(suite, "train", count, seed), ref=ref, seed=seed, splits=splits)


def hold(case: Case, name: Property) -> Finding:
    """Whether one property holds. What the environment raises is a broken property, named with its last line."""
    try:
        return Finding(name=name.__name__, result="holds", reason=name(case))
    except Inapplicable as error:
        return Finding(name=name.__name__, result="skipped", reason=_one_line(error))
    except Violation as error:
        return Finding(name=name.__name__, result="broken", reason=_one_line(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        return Finding(
            name=name.__name__, result="broken", reason=f"{type(error).__name__} at {where}: {_one_line(error)}"
        )


def check(case: Case, properties: Sequence[Property] = PROPERTIES) -> Iterator[Finding]:
    """Every property in turn, each found before the next is tried."""
    for one in properties:
        yield hold(case, one)


def _some(suite: Suite, split: str, count: int, seed: int) -> tuple[Task, ...]:
    while True:
        try:
            return tuple(suite.tasks(split, count, seed))
        except ValueError:
            if count <= 1:
                raise
            count //= 2


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
