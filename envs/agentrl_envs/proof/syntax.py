"""Why an expression has its type: the labels that build it, found from the database's own syntax axioms.

Nothing here is trusted: what is found is run through the checker like any other labels.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import accumulate

from .checker import Problem, StepError
from .metamath import Assertion, Symbols

MOST_WORK = 30_000
MOST_SYMBOLS = 300
MOST_KEPT = 5_000
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"))
PROVABLE = "|-"
Labels = tuple[str, ...]


class Grammar:
    """The syntax in force for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.types: dict[str, str] = {}
        self._floats: dict[tuple[str, str], str] = {}
        for label, hypothesis in problem.hypotheses.items():
            if hypothesis.floating:
                typecode, variable = hypothesis.symbols
                self.types[variable] = typecode
                self._floats[typecode, variable] = label
        codes = set(self.types.values())
        self._rules: dict[str, list[Assertion]] = {code: [] for code in codes}
        self._proved: dict[tuple[str, Symbols], Labels | None] = {}
        for assertion in problem.database.assertions.values():
            if assertion.index >= problem.limit:
                break
            if assertion.symbols[0] in codes and all(h.floating for h in assertion.hypotheses):
                self._rules[assertion.symbols[0]].append(assertion)
        patterns = [rule.symbols for rules in self._rules.values() for rule in rules]
        self._brackets = {
            symbol: value
            for pair in BRACKETS
            if all(_balanced(pattern, *pair) for pattern in patterns)
            for symbol, value in zip(pair, (1, -1), strict=True)
        }

    def prove(self, typecode: str, symbols: Symbols) -> Labels | None:
        """The labels that put (typecode, *symbols) on the stack, or None; StepError if it is too long to tell."""
        if len(symbols) > MOST_SYMBOLS:
            raise StepError(f"an expression may have at most {MOST_SYMBOLS} symbols")
        key = (typecode, symbols)
        if key not in self._proved:
            if len(self._proved) >= MOST_KEPT:
                self._proved.clear()
            parse = _Parse(self._rules, self._floats, self._brackets, symbols)
            with _room_to_recurse():
                self._proved[key] = parse.span(typecode, 0, len(symbols))
        return self._proved[key]


@contextlib.contextmanager
def _room_to_recurse() -> Iterator[None]:
    """A parse goes some frames deep a symbol: whether it may, must not depend on who calls."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(usual + 20 * MOST_SYMBOLS)
    try:
        yield
    finally:
        sys.setrecursionlimit(usual)


def _balanced(pattern: Symbols, left: str, right: str) -> bool:
    depth = 0
    for symbol in pattern:
        depth += (symbol == left) - (symbol == right)
        if depth < 0:
            return False
    return depth == 0


class _Parse:
    """One expression: every (type, span) is looked at once, over rules that take the span apart."""

    def __init__(
        self,
        rules: dict[str, list[Assertion]],
        floats: dict[tuple[str, str], str],
        brackets: dict[str, int],
        symbols: Symbols,
    ) -> None:
        self._rules, self._floats, self._symbols = rules, floats, symbols
        # Where every rule closes what it opens, so does every expression: the depth rules most spans out.
        self._depths = [0, *accumulate(brackets.get(symbol, 0) for symbol in symbols)]
        self._found: dict[tuple[str, int, int], Labels | None] = {}
        self._work = 0

    def span(self, typecode: str, start: int, end: int) -> Labels | None:
        key = (typecode, start, end)
        if key in self._found:
            return self._found[key]
        self._found[key] = None  # a rule that needs itself over the same span is of no use
        if end - start == 1 and (typecode, self._symbols[start]) in self._floats:
            self._found[key] = (self._floats[typecode, self._symbols[start]],)
            return self._found[key]
        for rule in self._rules.get(typecode, ()):
            types = {h.symbols[1]: h.symbols[0] for h in rule.hypotheses}
            if not self._ends_fit(rule.symbols, types, start, end):
                continue
            for parts in self._apart(rule.symbols[1:], types, 0, start, end):
                order = [parts[h.symbols[1]] for h in rule.hypotheses]
                self._found[key] = (*(label for labels in order for label in labels), rule.label)
                return self._found[key]
        return None

    def _ends_fit(self, pattern: Symbols, types: dict[str, str], start: int, end: int) -> bool:
        if len(pattern) == 1:
            return start == end
        first, last = pattern[1], pattern[-1]
        if first not in types and self._symbols[start : start + 1] != (first,):
            return False
        return last in types or (end > start and self._symbols[end - 1] == last)

    def _apart(
        self, pattern: Symbols, types: dict[str, str], at: int, start: int, end: int
    ) -> Iterator[dict[str, Labels]]:
        """Every way to read symbols start..end as pattern[at:], each variable with the labels that build it."""
        self._work += 1
        if self._work > MOST_WORK:
            raise StepError("the expression is too complex to be read")
        if at == len(pattern):
            if start == end:
                yield {}
            return
        head = pattern[at]
        if head not in types:
            if start < end and self._symbols[start] == head:
                yield from self._apart(pattern, types, at + 1, start + 1, end)
            return
        needed = sum(symbol not in types for symbol in pattern[at + 1 :])
        last = at + 1 == len(pattern)
        for stop in (end,) if last else range(start, end - needed + 1):
            if self._depths[stop] != self._depths[start]:
                if self._depths[stop] < self._depths[start]:
                    return
                continue
            if not last and pattern[at + 1] not in types and self._symbols[stop : stop + 1] != (pattern[at + 1],):
                continue
            labels = self.span(types[head], start, stop)
            if labels is not None:
                for parts in self._apart(pattern, types, at + 1, stop, end):
                    if parts.get(head, labels) == labels:
                        yield {head: labels, **parts}
