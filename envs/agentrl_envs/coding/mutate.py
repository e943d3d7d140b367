"""Small defects: an operator, a constant, a bound or a branch of a Python source changed, the rest left as it is.

Read off the syntax tree, made in the text: comments, blanks and everything else of the file stay.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARE = {
    ast.Lt: ("<=", ">"), ast.LtE: ("<", ">="), ast.Gt: (">=", "<"), ast.GtE: (">", "<="),
    ast.Eq: ("!=",), ast.NotEq: ("==",), ast.In: ("not in",), ast.Is: ("is not",),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("-",), ast.Sub: ("+",), ast.Mult: ("+",), ast.FloorDiv: ("%",), ast.Mod: ("//",), ast.Div: ("//",),
    ast.BitAnd: ("|",), ast.BitOr: ("&",), ast.BitXor: ("|",), ast.LShift: (">>",), ast.RShift: ("<<",),
}  # fmt: skip
WRITTEN = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.Is: "is",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Div: "/", ast.BitAnd: "&",
    ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>", ast.And: "and", ast.Or: "or",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutation(NamedTuple):
    """`old` at character `start` of the source becomes `new`. `function`: the top-level function that holds it."""

    start: int
    old: str
    new: str
    function: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.start + len(self.old) :]


def mutations(source: str) -> list[Mutation]:
    """Every small defect inside the source's top-level functions, in the order of the text, each of them compiling."""
    finder = _Finder(source)
    found: set[Mutation] = set()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef):
            found |= {Mutation(*made, statement.name) for part in statement.body for made in finder.defects(part)}
    return [made for made in sorted(found) if _compiles(made.apply(source))]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    """Turns a tree's positions (line, byte of the line) into characters of the text."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def _at(self, line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _span(self, node: ast.expr) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def defects(self, node: ast.AST) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.JoinedStr):  # positions inside f-strings are not exact before Python 3.12
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            return
        yield from self._of(node)
        for child in ast.iter_child_nodes(node):
            yield from self.defects(child)

    def _of(self, node: ast.AST) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                yield from self._between(left, right, operator, COMPARE)
        elif isinstance(node, ast.BinOp):
            yield from self._between(node.left, node.right, node.op, ARITHMETIC)
        elif isinstance(node, ast.BoolOp):
            other = "or" if isinstance(node.op, ast.And) else "and"
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, node.op, {type(node.op): (other,)})
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
            yield from self._between(node.target, node.value, node.op, ARITHMETIC)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._at(node.lineno, node.col_offset), "not ", ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield self._span(node.func)[0], node.func.id, NAMES[node.func.id]
        elif isinstance(node, ast.Break | ast.Continue):
            old, new = ("break", "continue") if isinstance(node, ast.Break) else ("continue", "break")
            yield self._at(node.lineno, node.col_offset), old, new

    def _between(
        self, left: ast.expr, right: ast.expr, operator: ast.AST, table: dict
    ) -> Iterator[tuple[int, str, str]]:
        """The operator's text lies between its sides; with a comment or a bracket of its kind there, none is found."""
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._source[start:end]
        old = WRITTEN.get(type(operator), "")
        if not old or between.strip("() \t") not in (old, f"{old}="):
            return
        for new in table.get(type(operator), ()):
            yield start + between.index(old), old, new

    def _constant(self, node: ast.Constant) -> Iterator[tuple[int, str, str]]:
        start, end = self._span(node)
        text = self._source[start:end]
        if isinstance(node.value, bool):
            yield start, text, str(not node.value)
        elif isinstance(node.value, int) and text.isdecimal():
            yield start, text, str(node.value + 1)
            if node.value > 0:
                yield start, text, str(node.value - 1)


def undo(fixed: str, broken: str) -> tuple[str, str]:
    """(old, new): the smallest run of whole lines of `broken` that occurs once, and what stands there in `fixed`.

    Replacing old by new in `broken` gives `fixed`; both are non-empty, and `old` is unique.
    """
    good, bad = fixed.splitlines(keepends=True), broken.splitlines(keepends=True)
    first = next((i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    same_end = 0
    while same_end < min(len(good), len(bad)) - first and good[-1 - same_end] == bad[-1 - same_end]:
        same_end += 1
    last = len(bad) - same_end  # lines first..last of `broken` differ
    while first == last or not once(broken, "".join(bad[first:last])):
        if first > 0:
            first -= 1
        elif same_end:
            last, same_end = last + 1, same_end - 1
        else:
            break
    old, new = "".join(bad[first:last]), "".join(good[first : len(good) - same_end])
    assert once(broken, old) and broken.replace(old, new) == fixed
    return old, new


def once(text: str, part: str) -> bool:
    """True if the part occurs in one place only; places that overlap are two."""
    return 0 <= text.find(part) == text.rfind(part)
