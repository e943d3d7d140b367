"""What the policy sees: the problem, the facts, the statements that may be applied. Never a proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .checker import Problem
from .metamath import Assertion, Symbols
from .syntax import PROVABLE

MOST_FOUND = 12
FEW = 40  # statements that are listed at once
HOW = (
    "Derive facts with apply until one of them is the goal, then submit. apply(step, uses, values): step is a label of "
    "a hypothesis or statement, uses the numbers of the facts that its hypotheses are (by default the latest), values "
    "what its variables stand for where uses does not tell."
)


def opening(problem: Problem) -> str:
    """The request. A small database is listed in full, a large one is left to find."""
    available = list(_available(problem))
    types: dict[str, list[str]] = {}
    for hypothesis in problem.hypotheses.values():
        if hypothesis.floating:
            types.setdefault(hypothesis.symbols[0], []).append(hypothesis.symbols[1])
    lines = [f"Prove {' '.join(problem.goal)}", HOW]
    lines += _hypotheses(problem)
    lines.append("Variables: " + "; ".join(f"{code} {' '.join(names)}" for code, names in types.items()))
    if problem.disjoint:
        lines.append("Disjoint here: " + ", ".join(" ".join(pair) for pair in sorted(problem.disjoint)))
    if len(available) <= FEW:
        lines += ["Statements:", *map(statement, available)]
    else:
        lines.append(f"There are {len(available)} statements: find lists those that hold a text.")
    return "\n".join(lines)


def statement(assertion: Assertion) -> str:
    """One line: its label, hypotheses, conclusion, and which variables must be disjoint."""
    essential = [" ".join(h.symbols) for h in assertion.hypotheses if not h.floating]
    apart = ", ".join(" ".join(pair) for pair in sorted(assertion.disjoint))
    given = " & ".join(essential) + " => " if essential else ""
    return f"{assertion.label}: {given}{' '.join(assertion.symbols)}" + (f" [disjoint {apart}]" if apart else "")


def state(problem: Problem, facts: Sequence[Symbols]) -> str:
    lines = [f"Goal: {' '.join(problem.goal)}", *_hypotheses(problem)]
    lines += [f"{number}: {' '.join(fact)}" for number, fact in enumerate(facts, 1)] or ["no facts yet"]
    return "\n".join(lines)


def find(problem: Problem, text: str) -> str:
    """The latest statements whose line holds the text (spaces as one), the newest first."""
    wanted = " ".join(text.split())
    lines = [line for line in map(statement, _available(problem)) if wanted in line]
    if not lines:
        return "no statement holds this text"
    shown = lines[: -MOST_FOUND - 1 : -1]
    return "\n".join([f"{len(lines)} found, the latest {len(shown)}:", *shown])


def facts_needed(problem: Problem, label: str) -> int:
    """How many facts a statement uses; 0 for whatever cannot be applied."""
    found = problem.database.assertions.get(label)
    if found is None or found.index >= problem.limit or label in problem.hypotheses:
        return 0
    return sum(not h.floating for h in found.hypotheses)


def _hypotheses(problem: Problem) -> list[str]:
    return [f"Hypothesis {h.label}: {' '.join(h.symbols)}" for h in problem.hypotheses.values() if not h.floating]


def _available(problem: Problem) -> Iterator[Assertion]:
    for assertion in problem.database.assertions.values():
        if assertion.index >= problem.limit:
            return
        if assertion.symbols[0] == PROVABLE:
            yield assertion
