"""A calculator: one arithmetic expression, evaluated exactly and within bounds. Not Python: no names, no attributes."""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MOST_CHARACTERS = 300
MOST_BITS = 1_000
MOST_EXPONENT = 64
FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {  # how many numbers each takes (0: any) and what it does
    "abs": (1, abs), "floor": (1, math.floor), "ceil": (1, math.ceil), "round": (1, round), "min": (0, min),
    "max": (0, max), "gcd": (0, math.gcd), "lcm": (0, math.lcm), "isqrt": (1, math.isqrt),
}  # fmt: skip
_WHOLE = ("gcd", "lcm", "isqrt")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


class Refused(ValueError):
    """The expression cannot be evaluated; the message says what can."""


def evaluate(text: str) -> Fraction:
    """The exact value of the expression."""
    text = text.strip().replace("^", "**").replace("\u00d7", "*").replace("\u2212", "-")
    if len(text) > MOST_CHARACTERS:
        raise Refused(f"an expression may have at most {MOST_CHARACTERS} characters")
    if not re.fullmatch(r"[0-9a-z+\-*/%().,\s]+", text) or re.search(r"\d[a-z(]|\)[0-9a-z(]", text):
        raise Refused(f"write one expression of numbers, + - * / // % ** ( ) and {', '.join(FUNCTIONS)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text, mode="eval")
        return _value(tree.body, text)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise Refused("the expression cannot be read") from error
    except ZeroDivisionError as error:
        raise Refused("division by zero") from error


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(ast.get_source_segment(text, node) or str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _bounded(Fraction(_OPERATORS[type(node.op)](left, right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _function(node.func.id, [_value(argument, text) for argument in node.args])
    raise Refused(f"only numbers, + - * / // % ** ( ) and {', '.join(FUNCTIONS)} are known")


def _function(name: str, values: list[Fraction]) -> Fraction:
    if name not in FUNCTIONS:
        raise Refused(f"no function is called {name[:20]!r}; known are {', '.join(FUNCTIONS)}")
    count, function = FUNCTIONS[name]
    if not values or (count and len(values) != count):
        raise Refused(f"{name} takes {count or 'one or more'} numbers")
    if name in _WHOLE and any(value.denominator != 1 or value < 0 for value in values):
        raise Refused(f"{name} takes whole numbers from 0")
    return _bounded(Fraction(function(*(int(value) for value in values) if name in _WHOLE else values)))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MOST_EXPONENT:
        raise Refused(f"an exponent is a whole number from -{MOST_EXPONENT} to {MOST_EXPONENT}")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > 4 * MOST_BITS:
        raise Refused("the number is too large")
    return _bounded(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise Refused("the number is too large")
    return value


def write(value: Fraction) -> str:
    """A whole number or a finite decimal as it is, any other fraction with its value to six places."""
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1 and value.denominator.bit_length() < 40:
        places = next(n for n in range(1, 60) if 10**n % value.denominator == 0)
        digits = str(abs(value.numerator) * (10**places // value.denominator)).rjust(places + 1, "0")
        return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    near = round(value * 1_000_000)
    return f"{value} (about {'-' if near < 0 else ''}{abs(near) // 1_000_000}.{abs(near) % 1_000_000:06d})"
