"""Tasks: generated problems, or those of GSM8K."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from agentrl_jax.protocol import Task, ToolCall

from .. import data
from ..sets.gsm8k import GSM8K
from . import generated
from .answers import FORMS, Unreadable, number
from .calculator import Refused, evaluate

SPLITS = ("train", "validation", "heldout")
SOURCES = ("generated", "gsm8k")
TOOLS = ("calculator", "python")
MOST_MISSES = 3_000  # draws in a row that give no new problem
TOO_LIKELY = ("0", "1", "42")  # what an agent that guesses says first


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `suite`, validated."""

    source: str
    kinds: tuple[str, ...]
    tool: str
    backend: str
    calls: int

    def __post_init__(self) -> None:
        for name, value, known in (("source", self.source, SOURCES), ("tool", self.tool, TOOLS)):
            if value not in known:
                raise ValueError(f"math: {name}={value!r} is not known; expected one of {', '.join(known)}")
        if not self.kinds or set(self.kinds) - set(generated.KINDS):
            raise ValueError(f"math: kinds={self.kinds!r}; expected some of {', '.join(generated.KINDS)}")
        if self.calls < 2:
            raise ValueError(f"math: calls={self.calls}; expected 2 or more")


def tasks(options: Options, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks of the split in an order that depends on `seed`; ValueError if there are fewer."""
    if split not in SPLITS:
        raise ValueError(f"math: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    if options.source == "generated":
        return tuple(_generated(options, split, count, seed))
    found = gsm8k(split, options.calls)
    if count > len(found):
        raise ValueError(f"math: {count} tasks of {split!r} asked for, but gsm8k has {len(found)}")
    drawn = random.Random(f"{split}/{seed}").sample(found, count)
    return tuple(_task(split, "gsm8k", text, "number", final(said), tuple(worked(said))) for text, said in drawn)


def _generated(options: Options, split: str, count: int, seed: int) -> Iterator[Task]:
    rng = random.Random(f"{split}/{seed}")
    seen: set[str] = set()
    missed = 0
    while len(seen) < count:
        if missed > MOST_MISSES:
            raise ValueError(f"math: {count} tasks of {split!r} asked for, but only {len(seen)} could be generated")
        missed += 1
        kind = rng.choice(options.kinds)
        made = generated.problem(rng, kind)
        if made.text in seen or generated.split_of(made.text) != split or made.answer in TOO_LIKELY:
            continue
        seen.add(made.text)
        missed = 0
        yield _task(split, kind, made.text, made.form, made.answer, made.steps)


def _task(split: str, kind: str, text: str, form: str, answer: str, steps: Sequence[str]) -> Task:
    assert form in FORMS
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return Task(
        id=name, split=split, kind=kind, data={"text": text, "form": form, "answer": answer, "steps": list(steps)}
    )


@cache
def gsm8k(split: str, calls: int) -> tuple[tuple[str, str], ...]:
    """(question, worked answer) of a split, those left out that have more than calls - 1 calculations. `heldout` is the
    set's own test part; `validation` is a tenth of its train part, by a hash of the question."""
    files = data.load(GSM8K)
    found: dict[str, tuple[str, str]] = {}
    for part in ("test", "train"):  # a question of the test part is nowhere else
        for row in files[f"{part}.jsonl.gz"]:
            text = " ".join(row["question"].split())
            tenth = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10
            where = "heldout" if part == "test" else "validation" if tenth == 9 else "train"
            found.setdefault(text, (where, row["answer"]))
    return tuple((text, said) for text, (where, said) in found.items() if where == split and said.count("<<") < calls)


def final(answer: str) -> str:
    """What stands after `####`, without thousands separators."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def worked(answer: str) -> Iterator[str]:
    """The left sides of the annotated calculations `<<48/2=24>>` that the calculator can do."""
    for written in re.findall(r"<<([^<>=]*)=", answer):
        try:
            evaluate(written)
        except Refused:
            continue
        yield written


def values(steps: Sequence[str]) -> list[str]:
    """What the reference's calculations give, exactly: seeing one of these for the first time is evidence gained."""
    return sorted({str(evaluate(step)) for step in steps})


def truth(task_data: Mapping[str, Any]) -> str:
    return str(task_data["answer"])


def solve(options: Options, task: Task) -> Sequence[ToolCall]:
    """The reference's calculations, then its answer."""
    name, argument = ("calculate", "expression") if options.tool == "calculator" else ("run_code", "code")
    written = [step if options.tool == "calculator" else program(step) for step in task.data["steps"]]
    calls = [ToolCall(name=name, arguments={argument: text}) for text in written]
    return (*calls, ToolCall(name="answer", arguments={"value": truth(task.data)}))


def program(step: str) -> str:
    """The calculation as a program that prints its exact value."""
    numbers = re.sub(r"(\d+\.?\d*|\.\d+)", r"F('\1')", step)
    return f"import math\nfrom fractions import Fraction as F\nisqrt = lambda n: math.isqrt(int(n))\nprint({numbers})"


def is_close(text: str, wanted: Sequence[str]) -> str | None:
    """Which of the wanted values a text of one number is, or None."""
    try:
        value = str(number(text.strip()))
    except Unreadable:
        return None
    return value if value in wanted else None
