"""Generated tasks: three modules of the library, a few constants drawn, one defect in one of them.

Which split a task belongs to follows from its defect (module, function, place, what became of it): a defect of one
split is in no task of another. Everything follows from (split, seed); no file, box or clock is needed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from agentrl_jax.protocol import Task

from .cases import Case, case, right
from .inbox import try_out
from .library.inputs import DRAWS, VARIED
from .mutate import Mutation, mutations
from .packages import Package, check_split, split_of, task

MODULES = tuple(VARIED)
PACKAGES = ("almond", "basalt", "cobalt", "dune", "ember", "fjord", "granite", "harbor", "indigo", "juniper")
VISIBLE, HIDDEN = 3, 9  # cases of the function with the defect
OTHERS = 1, 2  # and of each other function
STEPS = 20_000  # lines that one call may execute


def tasks(symptom: str, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks; every defect of the split has its turn before one comes again with other constants."""
    check_split(split)
    defects = [entry for entry in _defects() if split_of(f"{entry[0]} {entry[1]}") == split]
    rng = Random(f"{split}/{seed}")
    made: dict[str, Task] = {}
    for turn in range(20 * (count // len(defects) + 1)):
        for number, (module, mutation) in enumerate(rng.sample(defects, len(defects))):
            if len(made) == count:
                return tuple(made.values())
            package = _package(Random(f"{split}/{seed}/{turn}/{number}"), module, mutation)
            if package is not None:
                new = task(package, split, "generated", symptom)
                made.setdefault(new.id, new)
    raise ValueError(f"coding: {count} generated tasks of {split!r} asked for, but only {len(made)} were found")


@cache
def _source(module: str) -> str:
    return (Path(__file__).parent / "library" / f"{module}.py").read_text(encoding="utf-8")


@cache
def _defects() -> tuple[tuple[str, Mutation], ...]:
    """Every defect of every module. Constants of a module change the text above the functions, not the places."""
    return tuple((module, mutation) for module in MODULES for mutation in mutations(_source(module)))


def _package(rng: Random, module: str, mutation: Mutation) -> Package | None:
    """The package, or None if the drawn cases do not tell the defect from the sound function."""
    name = rng.choice(PACKAGES)
    chosen = sorted([module, *rng.sample([other for other in MODULES if other != module], 2)])
    sources = {other: vary(rng, other) for other in chosen}
    visible, hidden = [], []
    for other in chosen:
        for function in _functions(other):
            drawn = _cases(rng, name, other, function, sources[other], (other, function) == (module, mutation.function))
            visible += drawn[0]
            hidden += drawn[1]
    shift = len(sources[module]) - len(_source(module))  # the constants stand above all functions
    text = mutation._replace(start=mutation.start + shift).apply(sources[module])
    if not (_fails(text, module, visible) and _fails(text, module, hidden)):
        return None
    readme = f"The package {name}: {', '.join(chosen)}.\n\nRun the tests with python -m unittest."
    return Package(
        name=name, modules=sources, broken=module, text=text, function=mutation.function, visible=visible,
        hidden=hidden, readme=readme,
    )  # fmt: skip


def vary(rng: Random, module: str) -> str:
    """The module's text with its constants drawn."""
    text = _source(module)
    for constant, values in VARIED[module].items():
        text, found = re.subn(rf"^{constant} = \d+$", f"{constant} = {rng.choice(values)}", text, flags=re.M)
        assert found == 1
    return text


def _functions(module: str) -> list[str]:
    return [name.partition(".")[2] for name in DRAWS if name.startswith(f"{module}.")]


def _cases(
    rng: Random, package: str, module: str, function: str, source: str, broken: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Visible and hidden cases with different arguments; the sound source says what is expected."""
    few, more = (VISIBLE, HIDDEN) if broken else OTHERS
    drawn: dict[str, list[Any]] = {}
    for _ in range(20 * (few + more)):
        arguments = DRAWS[f"{module}.{function}"](rng)
        drawn.setdefault(repr(arguments), arguments)
        if len(drawn) == few + more:
            break
    asked = [case(f"{package}.{module}", function, arguments, None) for arguments in drawn.values()]
    answers = try_out(source, asked, STEPS)
    made = [{**each, "expected": answer["value"]} for each, answer in zip(asked, answers, strict=True)]
    return made[:few], made[few:]


def _fails(text: str, module: str, cases: Sequence[Case]) -> bool:
    """True if the text with the defect answers one of the module's cases wrongly. It is ours, and runs here."""
    mine = [each for each in cases if each["module"].endswith(f".{module}")]
    return not all(right(each, answer) for each, answer in zip(mine, try_out(text, mine, STEPS), strict=True))
