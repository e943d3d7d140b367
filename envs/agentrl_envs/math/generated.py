"""Seeded problems, each made from its solution: word problems, equations, polynomials, roots.

A problem is its text, the form of its answer, the answer, and the calculations that lead there. The split follows
from the text, so the three splits share no problem.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana", "Ivo", "Jun")
THINGS = ("pens", "rulers", "apples", "stickers", "candles", "buttons", "postcards", "marbles")


class Problem(NamedTuple):
    text: str
    form: str
    answer: str
    steps: tuple[str, ...]


def split_of(text: str) -> str:
    """Eight tenths train, one tenth each of the others, by a hash of the text."""
    tenth = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 10
    return "train" if tenth < 8 else "validation" if tenth == 8 else "heldout"


def problem(rng: random.Random, kind: str) -> Problem:
    return KINDS[kind](rng)


def _shopping(rng: random.Random) -> Problem:
    name, (one, two) = rng.choice(NAMES), rng.sample(THINGS, 2)
    a, b, p, q = rng.randint(2, 12), rng.randint(2, 12), rng.randint(5, 60), rng.randint(5, 60)
    spent = a * p + b * q
    paid = spent + rng.randint(11, 300)
    text = rng.choice(
        (
            f"{name} buys {a} {one} at {p} cents each and {b} {two} at {q} cents each, and pays with {paid} cents. "
            "How many cents does the shop give back?",
            f"At {name}'s shop, {one} cost {p} cents and {two} cost {q} cents each. Somebody with {paid} cents takes "
            f"{a} {one} and {b} {two}. How many cents are left?",
        )
    )
    return Problem(text, "number", str(paid - spent), (f"{a}*{p}", f"{b}*{q}", f"{paid} - {a * p} - {b * q}"))


def _pumps(rng: random.Random) -> Problem:
    r, s, t, u = rng.randint(3, 30), rng.randint(3, 30), rng.randint(2, 25), rng.randint(2, 25)
    text = rng.choice(
        (
            f"A pump moves {r} litres a minute. After {t} minutes a second pump, which moves {s} litres a minute, is "
            f"switched on as well, and both run for {u} more minutes. How many litres are moved in all?",
            f"One tap gives {r} litres a minute and another {s}. The first runs alone for {t} minutes, then both run "
            f"for {u} minutes. How many litres is that altogether?",
        )
    )
    return Problem(
        text, "number", str(r * t + (r + s) * u), (f"{r}*{t}", f"({r} + {s})*{u}", f"{r * t} + {(r + s) * u}")
    )


def _sharing(rng: random.Random) -> Problem:
    name, other, thing = *rng.sample(NAMES, 2), rng.choice(THINGS)
    k, m, rest = rng.randint(2, 6), rng.randint(2, 5), rng.randint(5, 30)
    after = rest * m
    start = after * k // (k - 1) if after * k % (k - 1) == 0 else 0
    if not start:
        return _sharing(rng)
    left = after - after // m
    text = (
        f"{name} has {start} {thing}, gives one {_part(k)} of them to {other}, and then one {_part(m)} of what remains "
        f"to a friend. How many {thing} does {name} keep?"
    )
    return Problem(text, "number", str(left), (f"{start} - {start}/{k}", f"{after} - {after}/{m}"))


def _part(count: int) -> str:
    return {2: "half", 3: "third", 4: "quarter", 5: "fifth", 6: "sixth"}[count]


def _travel(rng: random.Random) -> Problem:
    v, w, hours = rng.randint(20, 90), rng.randint(20, 90), rng.randint(2, 9)
    apart = (v + w) * hours + rng.randint(10, 99)
    text = (
        f"Two trains leave towns {apart} km apart at the same time and run towards each other, one at {v} km and one "
        f"at {w} km an hour. How many km apart are they after {hours} hours?"
    )
    return Problem(
        text, "number", str(apart - (v + w) * hours), (f"({v} + {w})*{hours}", f"{apart} - {(v + w) * hours}")
    )


def _linear(rng: random.Random) -> Problem:
    a, c = rng.sample(range(2, 20), 2)
    b, d = rng.randint(-60, 60), rng.randint(-60, 60)
    x = Fraction(d - b, a - c)
    if abs(x) < 2:
        return _linear(rng)
    letter = rng.choice("xyn")
    equation = f"{a}*{letter} {_signed(b)} = {c}*{letter} {_signed(d)}"
    text = f"Solve {equation} for {letter}. Give a fraction where it is no whole number."
    return Problem(text, "number", str(x), (f"({d} - ({b}))/({a} - {c})",))


def _remainder(rng: random.Random) -> Problem:
    base, exponent, modulus = rng.randint(3, 40), rng.randint(4, 12), rng.randint(101, 997)
    value = base**exponent % modulus
    if value < 2:
        return _remainder(rng)
    text = f"What is the remainder when {base}^{exponent} is divided by {modulus}?"
    return Problem(text, "number", str(value), (f"{base}**{exponent} % {modulus}",))


def _expand(rng: random.Random) -> Problem:
    letter = rng.choice("xyn")
    a, b, c, d = (rng.choice([n for n in range(-9, 10) if n]) for _ in range(4))
    squared, middle, last = a * c, a * d + b * c, b * d
    text = f"Expand ({a}*{letter} {_signed(b)})*({c}*{letter} {_signed(d)})."
    steps = (f"({a})*({c})", f"({a})*({d}) + ({b})*({c})", f"({b})*({d})")
    return Problem(text, "expanded", _polynomial(letter, (squared, middle, last)), steps)


def _factor(rng: random.Random) -> Problem:
    letter = rng.choice("xyn")
    k = rng.randint(1, 6)
    r, s = (rng.choice([n for n in range(-12, 13) if n]) for _ in range(2))
    shown = _polynomial(letter, (k, -k * (r + s), k * r * s))
    text = f"Write {shown} as a product of linear factors."
    factors = f"({letter} {_signed(-r)})*({letter} {_signed(-s)})"
    steps = (f"({k * r * s})/{k}", f"({-k * (r + s)})/{k}")
    return Problem(text, "factored", f"{k}*{factors}" if k > 1 else factors, steps)


def _root(rng: random.Random) -> Problem:
    inner = rng.choice([n for n in range(2, 60) if all(n % (p * p) for p in (2, 3, 5, 7))])
    a, b = rng.randint(2, 15), rng.randint(2, 15)
    text = (
        f"Write sqrt({a * a * inner}) + sqrt({b * b * inner}) as a number times one square root, as simple as it gets."
    )
    steps = (f"{a * a * inner}/{inner}", f"isqrt({a * a})", f"isqrt({b * b})", f"{a} + {b}")
    return Problem(text, "radical", f"{a + b}*sqrt({inner})", steps)


def _digits(rng: random.Random) -> Problem:
    a, b = rng.randint(200, 9999), rng.randint(200, 9999)
    divisor = math.gcd(a, b)
    c = rng.randint(2, 40)
    text = f"Compute {a}*{c} - {b}, and divide the result by {divisor * c}."
    return Problem(
        text, "number", str(Fraction(a * c - b, divisor * c)), (f"{a}*{c} - {b}", f"({a * c - b})/{divisor * c}")
    )


def _signed(value: int) -> str:
    return f"- {-value}" if value < 0 else f"+ {value}"


def _polynomial(letter: str, coefficients: tuple[int, int, int]) -> str:
    words = []
    for power, value in zip((2, 1, 0), coefficients, strict=True):
        if value:
            shown = {2: f"*{letter}^2", 1: f"*{letter}", 0: ""}[power]
            words.append(
                f"{abs(value)}{shown}"
                if not words and value > 0
                else f"{'-' if value < 0 else '+'} {abs(value)}{shown}"
            )
    return " ".join(words).removeprefix("+ ").replace("- ", "-", 1) if coefficients[0] < 0 else " ".join(words)


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "shopping": _shopping, "pumps": _pumps, "sharing": _sharing, "travel": _travel, "linear": _linear,
    "remainder": _remainder, "expand": _expand, "factor": _factor, "root": _root, "digits": _digits,
}  # fmt: skip
