"""A task: a small package with one defect, visible tests, hidden cases, and the edit that restores it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_jax.protocol import Task

from .cases import Case, test_file
from .mutate import undo

SPLITS = ("train", "validation", "heldout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """`modules`: sound sources by name; `broken`: the module with the defect, and its text with it.

    `visible` and `hidden` are the cases of all modules; `readme` describes the package; `seconds` is what one run of
    all hidden cases may take of the processor.
    """

    name: str
    modules: Mapping[str, str]
    broken: str
    text: str
    function: str
    visible: Sequence[Case]
    hidden: Sequence[Case]
    readme: str
    seconds: float = 2.0


def task(made: Package, split: str, kind: str, symptom: str) -> Task:
    """The task as data. Its id comes from its content, so that equal tasks have equal ids."""
    files = {f"{made.name}/__init__.py": f'"""{made.readme.splitlines()[0]}"""\n', "README.md": made.readme + "\n"}
    for module, source in made.modules.items():
        files[f"{made.name}/{module}.py"] = made.text if module == made.broken else source
        mine = [case for case in made.visible if case["module"] == f"{made.name}.{module}"]
        if mine:
            files[f"tests/test_{module}.py"] = test_file(module, mine)
    old, new = undo(made.modules[made.broken], made.text)
    digest = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in sorted(files.items())).encode()).hexdigest()
    return Task(
        id=f"{split}-{kind}-{made.broken}-{digest[:16]}",
        split=split,
        kind=kind,
        data={
            "package": made.name,
            "files": files,
            "text": _request(made, symptom),
            "edit": {"path": f"{made.name}/{made.broken}.py", "old": old, "new": new},
            "visible": list(made.visible),
            "hidden": list(made.hidden),
            "seconds": made.seconds,
        },
    )


def _request(made: Package, symptom: str) -> str:
    if symptom == "function":
        return f"The function {made.function} of {made.name}/{made.broken}.py does not do what it should. Repair it."
    return f"A function of the package {made.name} does not do what it should. Find out which one, and repair it."


def split_of(text: str, shares: tuple[int, int] = (70, 85)) -> str:
    """The split that a text belongs to by its hash: 70 % train, 15 % validation, 15 % held out."""
    place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    return SPLITS[sum(place >= share for share in shares)]


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"coding: split={split!r} is not known; expected one of {', '.join(SPLITS)}")


def solution(task: Task) -> dict[str, Any]:
    """The arguments of the reference edit."""
    return dict(task.data["edit"])
