"""QuixBugs as tasks: the program with its one-line defect, some of its cases visible, the others hidden.

Programs with cases as data are taken: 23 of 31; the others' tests build graphs and lists in code. The visible tests
show 20 of the defects. The set has no split of its own, so a program's name decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

from agentrl_jax.protocol import Task

from .. import data
from ..sets.quixbugs import QUIXBUGS
from .cases import case
from .packages import Package, check_split, split_of, task

PACKAGE = "classics"
COLLECT = ("flatten", "kheapsort")  # generators: the tests take their items as a list
LOOSE = ("hanoi",)  # the cases hold lists where the program yields pairs
FIRST_VISIBLE = {"find_first_in_sorted": 1}  # the cases from 0 on show no defect
SECONDS = 4.0  # of the processor, for all hidden cases together; the slowest repaired program needs 0.4
SHARES = (60, 80)  # per cent: train up to the first, validation up to the second


def tasks(symptom: str, split: str, count: int, seed: int) -> tuple[Task, ...]:
    check_split(split)
    names = [name for name in sorted(_programs()) if split_of(name, SHARES) == split]
    if count > len(names):
        raise ValueError(f"coding: {count} quixbugs tasks of {split!r} asked for, but there are {len(names)}")
    return tuple(_task(_programs()[name], split, symptom) for name in Random(f"{split}/{seed}").sample(names, count))


@cache
def _programs() -> dict[str, Mapping[str, Any]]:
    """Programs with a case for the visible tests and another for the hidden ones, by name."""
    rows = data.load(QUIXBUGS)["programs.jsonl.gz"]
    return {row["name"]: row for row in rows if len(row["cases"] or ()) > 1}


def _task(row: Mapping[str, Any], split: str, symptom: str) -> Task:
    name = row["name"]
    description, fixed, broken = sources(row)
    visible, hidden = halves(row)
    package = Package(
        name=PACKAGE,
        modules={name: description + fixed},
        broken=name,
        text=description + broken,
        function=name,
        visible=visible,
        hidden=hidden,
        readme=f"The package {PACKAGE}: classic algorithms.\n\nRun the tests with python -m unittest.",
        seconds=SECONDS,
    )
    return task(package, split, "quixbugs", symptom)


def sources(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """(the description as a docstring, the repaired program, the one with the defect). What follows the repaired
    program in the set, other repairs, is left out."""
    broken, _, description = row["buggy"].partition('"""')
    fixed = row["fixed"].partition('"""')[0]
    text = re.sub(r"\n{3,}", "\n\n", description.rpartition('"""')[0].strip())
    return f'"""{text}\n"""\n\n', fixed.strip() + "\n", broken.strip() + "\n"


def halves(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(visible, hidden): every third case is visible, the others are not; equal inputs never lie in both."""
    made: dict[str, dict[str, Any]] = {}
    for arguments, expected in row["cases"]:
        extra: dict[str, Any] = {"collect": True} if row["name"] in COLLECT else {}
        extra |= {"loose": True} if row["name"] in LOOSE else {}
        extra |= {"tolerance": arguments[-1]} if row["name"] == "sqrt" else {}
        given = arguments if isinstance(arguments, list) else [arguments]
        made.setdefault(repr(given), case(f"{PACKAGE}.{row['name']}", row["name"], given, expected, **extra))
    first = FIRST_VISIBLE.get(row["name"], 0)
    cases = list(made.values())
    return cases[first::3], [each for place, each in enumerate(cases) if place % 3 != first]
