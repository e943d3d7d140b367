"""Tasks: theorems of a database with their proofs hidden, or generated ones of the built-in calculus.

Every task holds the whole problem: what is to be proved, from which hypotheses, with how much of the database. The
split of a theorem follows from what it says up to the names of variables; of theorems that say the same, the first
counts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentrl_jax.protocol import Task

from .. import data
from ..sets.metamath import METAMATH
from . import generated
from .checker import Problem, StepError, problem_of, steps_of
from .facts import Move, as_json, from_json, moves_of
from .metamath import Assertion, Database, Hypothesis, Symbols, parse
from .syntax import PROVABLE

SPLITS = ("train", "validation", "heldout")
SOURCES = ("calculus", "hol", "ql")
FEWEST_STEPS = 2
MOST_MISSES = 3_000  # draws in a row that give no new task


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `suite`, validated."""

    source: str
    kinds: tuple[str, ...]
    most_steps: int
    facts: int

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"proof: source={self.source!r} is not known; expected one of {', '.join(SOURCES)}")
        if not self.kinds or set(self.kinds) - set(generated.KINDS):
            raise ValueError(f"proof: kinds={self.kinds!r}; expected some of {', '.join(generated.KINDS)}")
        if not FEWEST_STEPS <= self.most_steps <= self.facts:
            raise ValueError(f"proof: most_steps={self.most_steps} must be from {FEWEST_STEPS} to facts={self.facts}")


@cache
def database(source: str) -> Database:
    """The source's database; DataError if its data set is neither here nor can be fetched."""
    if source == generated.NAME:
        return generated.database()
    return parse(data.load(METAMATH)[f"{source}.mm"])


def tasks(options: Options, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks of the split in an order that depends on `seed`; ValueError if there are fewer."""
    if split not in SPLITS:
        raise ValueError(f"proof: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    if options.source == generated.NAME:
        return tuple(_generated(options, split, count, seed))
    found = [task for task in theorems(options.source, options.most_steps) if task.split == split]
    if count > len(found):
        raise ValueError(f"proof: {count} tasks of {split!r} asked for, but {options.source} has {len(found)}")
    return tuple(random.Random(f"{split}/{seed}").sample(found, count))


def problem_from(task_data: Mapping[str, Any]) -> Problem:
    """The problem that a task's data (or the part of it that the environment keeps) describes."""
    known = database(task_data["database"])
    named = known.assertions.get(task_data["label"])
    scope = named.scope if named else known.floats
    floats = {label: h for label, h in scope.items() if h.floating}
    essential = {label: Hypothesis(label, tuple(text.split()), False) for label, text in task_data["hypotheses"]}
    return Problem(
        database=known,
        goal=tuple(task_data["goal"].split()),
        hypotheses={**floats, **essential},
        disjoint=named.scope_disjoint if named else known.disjoint,
        limit=task_data["limit"],
    )


def proof_of(task: Task) -> tuple[Move, ...]:
    return from_json(task.data["proof"])


def _generated(options: Options, split: str, count: int, seed: int) -> Iterator[Task]:
    rng = random.Random(f"{split}/{seed}")
    shown = {"database": generated.NAME, "label": "", "limit": len(generated.database().order)}
    seen: set[str] = set()
    found = missed = 0
    while found < count:
        if missed > MOST_MISSES:
            raise ValueError(f"proof: {count} tasks of {split!r} asked for, but only {found} could be generated")
        missed += 1
        kind = rng.choice(options.kinds)
        made = generated.theorem(rng, kind)
        given = {**shown, "hypotheses": made["hypotheses"], "goal": made["goal"]}
        problem = problem_from(given)
        content = said(problem)
        if content in seen or generated.split_of(content) != split:
            continue
        seen.add(content)
        moves = moves_of(problem, made["proof"].split())
        if FEWEST_STEPS <= len(moves) <= options.most_steps:
            found, missed = found + 1, 0
            yield Task(id=f"{kind}-{_short(content)}", split=split, kind=kind, data={**given, "proof": as_json(moves)})


@cache
def theorems(source: str, most_steps: int) -> tuple[Task, ...]:
    """Every theorem of the database that can be a task, in the order of the database."""
    known = database(source)
    seen: set[str] = set()
    found = []
    for assertion in known.assertions.values():
        problem = problem_of(known, assertion)
        content = said(problem)
        if content in seen or assertion.symbols[0] != PROVABLE:
            continue
        seen.add(content)
        if assertion.proof is None:
            continue
        try:
            moves = moves_of(problem, steps_of(assertion))
        except StepError:  # too long an expression on the way
            continue
        if FEWEST_STEPS <= len(moves) <= most_steps:
            found.append(_theorem(source, assertion, moves, content))
    return tuple(found)


def _theorem(source: str, assertion: Assertion, moves: Sequence[Move], content: str) -> Task:
    essential = [[h.label, " ".join(h.symbols)] for h in assertion.hypotheses if not h.floating]
    shown = {"database": source, "label": assertion.label, "limit": assertion.index, "hypotheses": essential}
    shown |= {"goal": " ".join(assertion.symbols), "proof": as_json(moves)}
    return Task(id=f"{source}-{assertion.label}", split=generated.split_of(content), kind=source, data=shown)


def said(problem: Problem) -> str:
    """What a theorem says, variables by type and order: theorems that say the same up to names are the same text."""
    types = {h.symbols[1]: h.symbols[0] for h in problem.hypotheses.values() if h.floating}
    names: dict[str, str] = {}
    essential = sorted(h.symbols for h in problem.hypotheses.values() if not h.floating)

    def rename(symbols: Symbols) -> str:
        words = []
        for symbol in symbols:
            if symbol in types:
                symbol = names.setdefault(symbol, f"{types[symbol]}{len(names)}")
            words.append(symbol)
        return " ".join(words)

    goal = rename(problem.goal)
    return " & ".join([*map(rename, essential), goal])


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
