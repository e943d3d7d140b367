"""MBPP as tasks: a reference program with one small defect, in a package with two sound ones.

The sentence of the problem is the function's description; the first test is visible, the others are hidden. A defect
is taken only if it fails a hidden test, and the visible one where some defect does: programs are tried in a box, the
same defects on every machine, since what a program may execute is counted in lines. The set's own splits are kept
(train 601-974, validation 511-600, heldout 11-510); of equal programs, the first split in that order keeps its own.
946 of 974 programs are taken; with seed 0, a defect shows in 279, 65 and 413 of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from agentrl_jax.protocol import Task

from .. import data
from ..sets.mbpp import MBPP
from .cases import from_assert, right
from .mutate import mutations
from .packages import Package, check_split, task

PACKAGES = ("anvil", "birch", "cedar", "delta", "falcon", "garnet", "heron", "iris")
SPANS = {"train": (601, 974), "validation": (511, 600), "heldout": (11, 510)}
TRIED = 12  # defects of one program, at most
STEPS = 50_000  # lines that a program may execute in one case
SECONDS = 4.0
SLOW = (123, 583, 901)  # sound programs that execute more
Trial = Callable[[Sequence[str], Sequence[Mapping[str, Any]], int], list[list[Any]]]
"""(programs, cases, steps) -> what each program answers to each case; runs in a box."""


def tasks(trial: Trial, symptom: str, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks; ValueError if the split has fewer programs in which a defect can be shown."""
    check_split(split)
    programs = _programs()[split]
    made: list[Task] = []
    for program in Random(f"{split}/{seed}").sample(programs, len(programs)):
        if len(made) == count:
            return tuple(made)
        broken = _defect(trial, program, seed)
        if broken is not None:
            made.append(_task(program, broken, programs, split, seed, symptom))
    if len(made) < count:
        raise ValueError(f"coding: {count} mbpp tasks of {split!r} asked for, but there are {len(made)}")
    return tuple(made)


@cache
def _programs() -> dict[str, list[dict[str, Any]]]:
    """Programs by split: {name, source, text, cases}, with at least two tests that are data, none of them twice."""
    found: dict[str, list[dict[str, Any]]] = {split: [] for split in SPANS}
    seen: set[str] = set()
    rows = sorted(data.load(MBPP)["mbpp.jsonl"], key=lambda row: row["task_id"])
    for split, (first, last) in SPANS.items():
        for row in rows:
            program = _program(row) if first <= row["task_id"] <= last else None
            if program is not None and program["key"] not in seen:
                seen.add(program["key"])
                found[split].append(program)
    return found


def _program(row: Mapping[str, Any]) -> dict[str, Any] | None:
    source = re.sub(r"[ \t]+$", "", row["code"].replace("\r\n", "\n").expandtabs(4), flags=re.M).strip() + "\n"
    tests = [from_assert(text, "program") for text in [*row["test_list"], *row["challenge_test_list"]]]
    cases = list({repr(case["args"]): case for case in tests if case is not None}.values())
    names = {case["function"] for case in cases}
    if row["task_id"] in SLOW or row["test_setup_code"] or len(cases) < 2 or len(names) != 1 or not source.isascii():
        return None
    text = " ".join(row["text"].split())
    return {
        "name": names.pop().lower(), "text": text, "source": source, "cases": cases, "number": row["task_id"],
        "key": hashlib.sha256("".join(source.split()).encode()).hexdigest(),
    }  # fmt: skip


def _defect(trial: Trial, program: Mapping[str, Any], seed: int) -> str | None:
    """The program with a defect that its hidden tests show, or None. The sound program must pass them all."""
    source, cases = program["source"], program["cases"]
    possible = mutations(source)
    rng = Random(f"{program['number']}/{seed}")
    tried = [made.apply(source) for made in rng.sample(possible, min(TRIED, len(possible)))]
    answers = trial([source, *tried], cases, STEPS)
    marks = [[right(case, answer) for case, answer in zip(cases, each, strict=False)] for each in answers]
    if not marks or marks[0] != [True] * len(cases):
        return None
    shown = [
        (mark[0], text)
        for mark, text in zip(marks[1:], tried, strict=False)
        if len(mark) == len(cases) and not all(mark[1:])
    ]
    return min(shown, key=lambda entry: entry[0])[1] if shown else None


def _task(
    program: Mapping[str, Any], broken: str, others: Sequence[Mapping[str, Any]], split: str, seed: int, symptom: str
) -> Task:
    rng = Random(f"{split}/{seed}/{program['number']}")
    name = rng.choice(PACKAGES)
    beside = [each for each in rng.sample(list(others), min(6, len(others))) if each["name"] != program["name"]]
    chosen = {each["name"]: each for each in (program, *beside[:2])}
    described = {module: f'"""{_plain(each["text"])}"""\n\n' for module, each in chosen.items()}
    cases = {
        module: [{**case, "module": f"{name}.{module}"} for case in each["cases"]] for module, each in chosen.items()
    }
    package = Package(
        name=name,
        modules={module: described[module] + each["source"] for module, each in sorted(chosen.items())},
        broken=program["name"],
        text=described[program["name"]] + broken,
        function=program["cases"][0]["function"],
        visible=[each[0] for _, each in sorted(cases.items())],
        hidden=[case for _, each in sorted(cases.items()) for case in each[1:]],
        readme=f"The package {name}: {', '.join(sorted(chosen))}.\n\nRun the tests with python -m unittest.",
        seconds=SECONDS,
    )
    return task(package, split, "mbpp", symptom)


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', "'''").removesuffix('"')
