"""Answers: read by a small grammar of our own, then compared exactly. Nothing that a policy writes is evaluated.

A form says how an answer must be written, so that repeating the question is no answer: "number" (one integer, decimal
or fraction), "expanded" (a sum of monomials), "factored" (a product of linear factors), "radical" (a rational times a
square root that cannot be taken further, or a sum of such). sympy decides whether two expressions are equal; their
size, degree and numbers are bounded, so it always can.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FORMS = ("number", "expanded", "factored", "radical")
MOST_CHARACTERS = 200
MOST_DIGITS = 40
MOST_DEGREE = 12
MOST_NODES = 80
MOST_BRACKETS = 20  # inside one another
MOST_NAMES = 2
VARIABLES = "abcnxyz"
_NUMBER = re.compile(r"([+-]?)\$?(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?(?:/(\d+))?", re.ASCII)


class Unreadable(ValueError):
    """The text is no answer of the form asked for; the message says what is expected."""


@dataclass(frozen=True, slots=True)
class Node:
    """An expression: `sign` is number, name, root, +, * or ^; a number's value is exact, an exponent a plain number."""

    sign: str
    parts: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""


def read(form: str, text: str) -> Fraction | Node:
    """The answer that the text gives. Raises Unreadable; two answers in one text are unreadable."""
    if form not in FORMS:
        raise ValueError(f"form={form!r} is not known; expected one of {', '.join(FORMS)}")
    plain = _plain(text)
    if form == "number":
        return number(plain)
    node = _Parser(plain).whole()
    if not {"expanded": _is_expanded, "factored": _is_factored, "radical": _is_radical}[form](node):
        raise Unreadable(f"expected {EXPECTED[form]}")
    return node


EXPECTED = {
    "number": "one number, such as 12, -3.5 or 7/4",
    "expanded": "a sum without brackets, such as 2*x^2 - 3*x + 1",
    "factored": "a product of linear factors, such as 2*(x - 1)*(x + 3)",
    "radical": "whole numbers and square roots taken as far as they go, such as 3*sqrt(2)",
}


def equal(left: Fraction | Node, right: Fraction | Node) -> bool:
    """Whether two answers that were read are the same. Exact: fractions by themselves, expressions through sympy."""
    if isinstance(left, Fraction) or isinstance(right, Fraction):
        return left == right
    import sympy

    return bool(sympy.expand(to_sympy(left) - to_sympy(right)) == 0)


def number(text: str) -> Fraction:
    """One number, exactly."""
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[3]) or (match[3] and match[4]):
        raise Unreadable(f"expected {EXPECTED['number']}")
    if len(text) > MOST_DIGITS:
        raise Unreadable(f"a number may have at most {MOST_DIGITS} digits")
    if match[4] is not None and int(match[4]) == 0:
        raise Unreadable("a fraction over zero is no number")
    value = Fraction((match[2] or "0").replace(",", "") + (match[3] or "")) / int(match[4] or 1)
    return -value if match[1] == "-" else value


def _plain(text: str) -> str:
    """The text without the dress that answers come in: spaces, \\boxed{}, $ signs of formulas, a full stop."""
    text = text.strip()
    if len(text) > MOST_CHARACTERS:
        raise Unreadable(f"an answer may have at most {MOST_CHARACTERS} characters")
    if not text.isascii():
        text = text.replace("\u2212", "-").replace("\u221a", "sqrt").replace("\u00b7", "*").replace("\u00d7", "*")
    boxed = re.fullmatch(r"\\boxed\{(.*)\}", text)
    text = boxed[1] if boxed else text
    text = text.removesuffix(".").strip()
    text = re.sub(r"\\d?frac\{([^{}]+)\}\{([^{}]+)\}", r"(\1)/(\2)", text)
    text = re.sub(r"\\sqrt\{([^{}]+)\}", r"sqrt(\1)", text).replace("\\cdot", "*").replace("\\times", "*")
    text = re.sub(r"^(-?)\((\d+)\)/\((\d+)\)$", r"\1\2/\3", text)
    return re.sub(r"\s*([-+*/^(),])\s*", r"\1", text) if not re.search(r",\s", text) else text


class _Parser:
    """sum := product (+- product)*; product := power ((*|nothing|/) power)*; power := unit (^ number)?."""

    def __init__(self, text: str) -> None:
        self._tokens = re.findall(r"\d+(?:\.\d+)?|sqrt|\*\*|[A-Za-z]|[-+*/^()]|\S", text)
        self._nodes = 0
        self._depth = 0
        if len({token for token in self._tokens if token in VARIABLES}) > MOST_NAMES:
            raise Unreadable(f"an expression may have at most {MOST_NAMES} variables")

    def whole(self) -> Node:
        node = self._sum()
        if self._tokens:
            raise Unreadable(f"{self._tokens[0]!r} is not understood; give one expression in + - * / ^ ( ) sqrt")
        if degree(node) > MOST_DEGREE:
            raise Unreadable(f"the degree may be at most {MOST_DEGREE}")
        return node

    def _sum(self) -> Node:
        parts = [self._signed()]
        while self._tokens and self._tokens[0] in "+-":
            parts.append(self._signed())
        return self._node("+", *parts) if len(parts) > 1 else parts[0]

    def _signed(self) -> Node:
        negative = False
        while self._tokens and self._tokens[0] in "+-":
            negative ^= self._tokens.pop(0) == "-"
        product = self._product()
        return self._node("*", Node("number", value=Fraction(-1)), product) if negative else product

    def _product(self) -> Node:
        parts = [self._power()]
        while self._tokens and self._tokens[0] not in ("+", "-", ")"):
            token = self._tokens[0]
            if token in "*/":
                self._tokens.pop(0)
            elif token[0].isdigit():
                raise Unreadable("one answer is expected; a product with a number is written with *")
            power = self._power()
            if token == "/":
                if power.sign != "number" or not power.value:
                    raise Unreadable("only numbers other than zero may be divided by")
                power = Node("number", value=1 / power.value)
            parts.append(power)
        return self._node("*", *parts) if len(parts) > 1 else parts[0]

    def _power(self) -> Node:
        unit = self._unit()
        if self._tokens and self._tokens[0] in ("^", "**"):
            self._tokens.pop(0)
            exponent = self._unit()
            if exponent.sign != "number" or exponent.value.denominator != 1 or exponent.value > MOST_DEGREE:
                raise Unreadable(f"an exponent is a whole number of at most {MOST_DEGREE}")
            return self._node("^", unit, exponent)
        return unit

    def _unit(self) -> Node:
        token = self._tokens.pop(0) if self._tokens else "the end"
        if token[0].isdigit():
            if len(token) > MOST_DIGITS or not token.isascii():
                raise Unreadable(f"a number may have at most {MOST_DIGITS} digits")
            return self._node("number", value=Fraction(token))
        if token in ("(", "sqrt"):
            if token == "sqrt" and (not self._tokens or self._tokens.pop(0) != "("):
                raise Unreadable("sqrt needs brackets")
            self._depth += 1
            if self._depth > MOST_BRACKETS:
                raise Unreadable(f"at most {MOST_BRACKETS} brackets may stand inside one another")
            inner = self._sum()
            self._depth -= 1
            if not self._tokens or self._tokens.pop(0) != ")":
                raise Unreadable("a bracket is not closed")
            if token == "(":
                return inner
            if inner.sign != "number" or inner.value.denominator != 1:
                raise Unreadable("only a whole number may stand under a root")
            return self._node("root", value=inner.value)
        if len(token) == 1 and token in VARIABLES:
            return self._node("name", name=token)
        raise Unreadable(f"{token!r} is not understood; give one expression in + - * / ^ ( ) sqrt")

    def _node(self, sign: str, *parts: Node, value: Fraction = Fraction(0), name: str = "") -> Node:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise Unreadable(f"an expression may have at most {MOST_NODES} parts")
        return Node(sign, parts, value, name)


def degree(node: Node) -> int:
    if node.sign == "name":
        return 1
    if node.sign == "^":
        return max(degree(node.parts[0]), 1) * int(node.parts[1].value)
    inner = [degree(part) for part in node.parts]
    return (sum(inner) if node.sign == "*" else max(inner)) if inner else 0


def to_sympy(node: Node) -> Any:
    """The node as a sympy expression, built part by part: sympy's parser, which evaluates, is never used."""
    import sympy

    if node.sign == "number":
        return sympy.Rational(node.value.numerator, node.value.denominator)
    if node.sign == "name":
        return sympy.Symbol(node.name)
    if node.sign == "root":
        return sympy.sqrt(sympy.Integer(node.value.numerator))
    parts = [to_sympy(part) for part in node.parts]
    if node.sign == "^":
        return parts[0] ** parts[1]
    return sympy.Add(*parts) if node.sign == "+" else sympy.Mul(*parts)


def _is_monomial(node: Node) -> bool:
    """A coefficient that has been worked out, and powers of variables."""
    parts = _flat(node)
    powers = [part for part in parts if part.sign != "number"]
    return _is_worked_out(parts) and all(
        part.sign == "name" or (part.sign == "^" and part.parts[0].sign == "name") for part in powers
    )


def _is_worked_out(parts: list[Node]) -> bool:
    """One number other than zero at most, beside signs and one that is divided by."""
    values = [abs(part.value) for part in parts if part.sign == "number" and abs(part.value) != 1]
    return 0 not in values and sum(v.numerator != 1 for v in values) <= 1 and sum(v.numerator == 1 for v in values) <= 1


def _powers(node: Node) -> tuple[tuple[str, int], ...]:
    """The variables of a monomial and how often each occurs."""
    found: dict[str, int] = {}

    def collect(part: Node, times: int) -> None:
        if part.sign == "name":
            found[part.name] = found.get(part.name, 0) + times
        elif part.sign == "^":
            collect(part.parts[0], times * int(part.parts[1].value))
        else:
            for inner in part.parts:
                collect(inner, times)

    collect(node, 1)
    return tuple(sorted((name, times) for name, times in found.items() if times))


def _is_expanded(node: Node) -> bool:
    """A sum of monomials, no two alike."""
    terms = node.parts if node.sign == "+" else (node,)
    return all(map(_is_monomial, terms)) and len({_powers(term) for term in terms}) == len(terms)


def _is_factored(node: Node) -> bool:
    """A product of numbers, variables and linear expanded factors, or powers of these."""
    if node.sign == "*":
        return all(_is_factored(part) for part in node.parts)
    if node.sign == "^":
        return _is_factored(node.parts[0])
    return node.sign in ("number", "name") or (node.sign == "+" and degree(node) == 1 and _is_expanded(node))


def _is_radical(node: Node) -> bool:
    """A sum of rationals times at most one square root of a number without square factors; no two alike."""
    terms = node.parts if node.sign == "+" else (node,)
    roots = []
    for term in terms:
        parts = _flat(term)
        under = [int(part.value) for part in parts if part.sign == "root"]
        if len(under) > 1 or any(part.sign not in ("number", "root") for part in parts):
            return False
        if not _is_worked_out(parts):
            return False
        roots.append(under[0] if under else 1)
    return len(set(roots)) == len(roots) and all(root == 1 or _is_square_free(root) for root in roots)


def _flat(node: Node) -> list[Node]:
    return [inner for part in node.parts for inner in _flat(part)] if node.sign == "*" else [node]


def _is_square_free(value: int) -> bool:
    if not 1 < value <= 1_000_000:
        return False
    return all(value % (root * root) for root in range(2, int(value**0.5) + 1))
