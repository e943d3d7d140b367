"""Cases: a function's arguments and what it must return, as data; and the test files written from them."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .inbox import Opaque, decode, encode

Case = Mapping[str, Any]


def case(module: str, function: str, arguments: Sequence[Any], expected: Any, **extra: Any) -> dict[str, Any]:
    """`extra`: collect=True (a generator's items count), tolerance=x (absolute), loose=True (tuples count as lists)."""
    made = {"module": module, "function": function, "args": encode(list(arguments)), "expected": encode(expected)}
    return {**made, **extra}


def from_assert(text: str, module: str) -> dict[str, Any] | None:
    """`assert f(literals) == literal` as a case; None for a test of any other form."""
    try:
        (statement,) = ast.parse(text).body
        if not (isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare)):
            return None
        test = statement.test
        called, equal = test.left, len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        if not (equal and isinstance(called, ast.Call) and isinstance(called.func, ast.Name) and not called.keywords):
            return None
        arguments = [ast.literal_eval(argument) for argument in called.args]
        return case(module, called.func.id, arguments, ast.literal_eval(test.comparators[0]))
    except (ValueError, SyntaxError, TypeError):
        return None


def right(wanted: Case, answer: Any) -> bool:
    """True if what came back from a box is the expected value. Whatever cannot be read is wrong, never an exception."""
    if not isinstance(answer, dict) or "value" not in answer:
        return False
    try:
        found = decode(answer["value"])
        expected = decode(wanted["expected"])
        if wanted.get("loose"):
            found, expected = _lists(found), _lists(expected)
        if wanted.get("tolerance") is not None:
            return math.isclose(found, expected, rel_tol=0.0, abs_tol=wanted["tolerance"])
        return bool(found == expected)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        return False


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


def literal(encoded: Any) -> str:
    """An encoded value as Python writes it."""
    value = decode(encoded)
    assert not isinstance(value, Opaque)
    return repr(value)


def test_file(title: str, cases: Sequence[Case]) -> str:
    """A unittest file with one method per case, numbered by function."""
    lines = [f'"""Tests of {title}."""', "", "import unittest", ""]
    names = sorted({(case["module"], case["function"]) for case in cases})
    for module in sorted({module for module, _ in names}):
        lines.append(f"from {module} import {', '.join(function for other, function in names if other == module)}")
    for module, function in names:
        lines += ["", "", f"class Test{_camel(function)}(unittest.TestCase):"]
        mine = [case for case in cases if (case["module"], case["function"]) == (module, function)]
        for number, each in enumerate(mine, start=1):
            lines += ["" if number > 1 else None, f"    def test_{number}(self):", f"        {_assertion(each)}"]
    lines += ["", "", 'if __name__ == "__main__":', "    unittest.main()"]
    return "\n".join(line for line in lines if line is not None) + "\n"


def _assertion(case: Case) -> str:
    arguments = ", ".join(repr(value) for value in decode(case["args"]))
    called = f"{case['function']}({arguments})"
    if case.get("collect"):
        called = f"list({called})"
    if case.get("loose"):
        called = f"[list(item) for item in {called}]"
    if case.get("tolerance") is not None:
        return f"self.assertAlmostEqual({called}, {literal(case['expected'])}, delta={case['tolerance']})"
    return f"self.assertEqual({called}, {literal(case['expected'])})"


def _camel(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))
