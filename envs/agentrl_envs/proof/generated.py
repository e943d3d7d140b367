"""Seeded theorems of the calculus in `calculus.mm`, each made together with its proof.

`infer`: a formula follows from hypotheses by detachment, chains and weakening. `evaluate`: a closed term of numerals
equals its value. The split of a theorem follows from what it says, so the three splits share none.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from .metamath import Database, parse

KINDS = ("infer", "evaluate")
NAME = "calculus"
Formula = tuple[Any, ...] | str  # "p", ("->", f, g), ("~", f)
Term = tuple[Any, ...] | int  # a numeral, ("+", t, u), ("*", t, u)
Labels = tuple[str, ...]
VARIABLES = ("p", "q", "r", "t")


@cache
def database() -> Database:
    return parse(files("agentrl_envs.proof").joinpath("calculus.mm").read_text(encoding="ascii"))


def split_of(content: str) -> str:
    """Eight tenths train, one tenth each of the others, by a hash of what the theorem says."""
    tenth = int(hashlib.sha256(content.encode()).hexdigest(), 16) % 10
    return "train" if tenth < 8 else "validation" if tenth == 8 else "heldout"


def theorem(rng: random.Random, kind: str) -> Mapping[str, Any]:
    """`hypotheses` (label, expression), `goal` and `proof` of a random theorem."""
    return _infer(rng) if kind == "infer" else _evaluate(rng)


def _formula(rng: random.Random, depth: int) -> Formula:
    draw = rng.random()
    if depth == 0 or draw < 0.3:
        return rng.choice(VARIABLES)
    if draw < 0.45:
        return ("~", _formula(rng, depth - 1))
    return ("->", _formula(rng, depth - 1), _formula(rng, depth - 1))


def _say(formula: Formula) -> str:
    if isinstance(formula, str):
        return formula
    if formula[0] == "~":
        return f"~ {_say(formula[1])}"
    return f"( {_say(formula[1])} -> {_say(formula[2])} )"


def _build(formula: Formula) -> Labels:
    """The labels that put the formula, as a wff, on the stack."""
    if isinstance(formula, str):
        return (f"w{formula}",)
    if formula[0] == "~":
        return (*_build(formula[1]), "not")
    return (*_build(formula[1]), *_build(formula[2]), "imp")


class _Inference:
    """Builds a derivation from the goal backwards; what is not derived becomes a hypothesis."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.hypotheses: dict[str, str] = {}  # expression -> label

    def assume(self, formula: Formula) -> Labels:
        return (self.hypotheses.setdefault(f"|- {_say(formula)}", f"h{len(self.hypotheses) + 1}"),)

    def derive(self, goal: Formula, depth: int) -> Labels:
        rng = self._rng
        if depth == 0:
            return self.assume(goal)
        implication = isinstance(goal, tuple) and goal[0] == "->"
        rule = rng.choice(("detach", "keep", "chain", "chain") if implication else ("detach",))
        if rule == "keep":
            return (*_build(goal[2]), *_build(goal[1]), *self.derive(goal[2], depth - 1), "keep")
        middle = _formula(rng, 1)
        if rule == "chain":
            left, right = ("->", goal[1], middle), ("->", middle, goal[2])
            shown = (*self.derive(left, depth - 1), *self.derive(right, depth - 1))
            return (*_build(goal[1]), *_build(middle), *_build(goal[2]), *shown, "chain")
        shown = (*self.derive(middle, depth - 1), *self.derive(("->", middle, goal), depth - 1))
        return (*_build(middle), *_build(goal), *shown, "detach")


def _infer(rng: random.Random) -> Mapping[str, Any]:
    while True:
        goal, made = _formula(rng, 2), _Inference(rng)
        proof = made.derive(goal, rng.choice((1, 2, 3)))
        said = f"|- {_say(goal)}"
        if said not in made.hypotheses and len(proof) >= 5:
            hypotheses = [[label, expression] for expression, label in made.hypotheses.items()]
            return {"hypotheses": hypotheses, "goal": said, "proof": " ".join(proof)}


def _term(rng: random.Random, depth: int) -> Term:
    if depth == 0 or rng.random() < 0.3:
        return rng.randrange(6)
    return (rng.choice("+*"), _term(rng, depth - 1), _term(rng, depth - 1))


def _value(term: Term) -> int:
    if isinstance(term, int):
        return term
    left, right = _value(term[1]), _value(term[2])
    return left + right if term[0] == "+" else left * right


def _write(term: Term) -> str:
    if isinstance(term, int):
        return "s " * term + "0"
    return f"( {_write(term[1])} {term[0]} {_write(term[2])} )"


def _number(term: Term) -> Labels:
    """The labels that put the term, as a num, on the stack."""
    if isinstance(term, int):
        return ("zero", *("next",) * term)
    return (*_number(term[1]), *_number(term[2]), "plus" if term[0] == "+" else "times")


def _reduce(term: Term) -> Labels:
    """A proof that the term equals the numeral of its value."""
    if isinstance(term, int):
        return (*_number(term), "same")
    sign, left, right = term
    x, y = _value(left), _value(right)
    name = "plus" if sign == "+" else "times"
    inside = (*_number(left), *_number(x), *_number(right), *_number(y), *_reduce(left), *_reduce(right), f"in-{name}")
    plain = (sign, x, y)
    joined = (*_number(term), *_number(plain), *_number(_value(term)))
    return (*joined, *inside, *(_add(x, y) if sign == "+" else _multiply(x, y)), "join")


def _add(x: int, y: int) -> Labels:
    """A proof of ( x + y ) = the numeral x + y, by recursion on y."""
    if y == 0:
        return (*_number(x), "plus-zero")
    once = ("+", x, y - 1)
    ends = (*_number(("+", x, y)), *_number(once), "next", *_number(x + y))
    unfolded = (*_number(x), *_number(y - 1), "plus-next")
    return (*ends, *unfolded, *_number(once), *_number(x + y - 1), *_add(x, y - 1), "in-next", "join")


def _multiply(x: int, y: int) -> Labels:
    """A proof of ( x * y ) = the numeral x y, by recursion on y."""
    if y == 0:
        return (*_number(x), "times-zero")
    once, value = ("*", x, y - 1), x * (y - 1)
    unfolded = (*_number(x), *_number(y - 1), "times-next")
    inside = (
        *_number(once), *_number(value), *_number(x), *_number(x),
        *_multiply(x, y - 1), *_number(x), "same", "in-plus",
    )  # fmt: skip
    summed = (
        *_number(("+", once, x)), *_number(("+", value, x)), *_number(x * y), *inside, *_add(value, x), "join",
    )  # fmt: skip
    return (*_number(("*", x, y)), *_number(("+", once, x)), *_number(x * y), *unfolded, *summed, "join")


def _evaluate(rng: random.Random) -> Mapping[str, Any]:
    while True:
        term = _term(rng, 2)
        if isinstance(term, int) or _value(term) > 12:
            continue
        proof = _reduce(term)
        if len(proof) <= 600:
            goal = f"|- {_write(term)} = {_write(_value(term))}"
            return {"hypotheses": [], "goal": goal, "proof": " ".join(proof)}
