"""A Metamath database as data: statements in order, each assertion with its frame. Reads text, proves nothing.

The language is that of the Metamath book, chapter 4, without file inclusion. Whatever is malformed is a
`MetamathError`; in particular a label or a symbol declared twice, and a statement about an untyped variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Symbols = tuple[str, ...]
Pairs = frozenset[tuple[str, str]]  # each pair sorted


class MetamathError(ValueError):
    """The text is not a Metamath database."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`floating` gives a variable its type: (typecode, variable)."""

    label: str
    symbols: Symbols
    floating: bool


@dataclass(frozen=True, slots=True)
class Assertion:
    """An axiom (`proof` None) or a theorem with its mandatory frame.

    `scope` holds every hypothesis in force, by label, and `scope_disjoint` every disjointness in force: what a proof
    may refer to beside earlier assertions. `index` is its place among the assertions.
    """

    label: str
    symbols: Symbols
    hypotheses: tuple[Hypothesis, ...]
    disjoint: Pairs
    proof: Symbols | None
    index: int
    scope: Mapping[str, Hypothesis] = field(repr=False)
    scope_disjoint: Pairs = field(repr=False)


@dataclass(frozen=True, slots=True)
class Database:
    """`floats`: the hypotheses in force at the end, outside of every block."""

    assertions: Mapping[str, Assertion]
    order: tuple[str, ...]
    variables: frozenset[str]
    floats: Mapping[str, Hypothesis]
    disjoint: Pairs


@dataclass(slots=True)
class _Block:
    """What is in force inside one `${ ... $}`; the inner block starts as a copy of the outer one."""

    variables: set[str] = field(default_factory=set)
    hypotheses: dict[str, Hypothesis] = field(default_factory=dict)
    typed: dict[str, Hypothesis] = field(default_factory=dict)
    disjoint: set[tuple[str, str]] = field(default_factory=set)

    def inner(self) -> _Block:
        return _Block(set(self.variables), dict(self.hypotheses), dict(self.typed), set(self.disjoint))


def parse(text: str) -> Database:
    """The database that the text declares."""
    return _Reader(text).read()


def _tokens(text: str) -> Iterator[str]:
    inside = False
    for match in re.finditer(r"\S+", text):
        token = match.group()
        if inside:
            if "$(" in token or ("$)" in token and token != "$)"):
                raise MetamathError(f"{token!r} inside of a comment")
            inside = token != "$)"
        elif token == "$(":
            inside = True
        elif token == "$[":
            raise MetamathError("file inclusion ($[) is not supported")
        else:
            yield token
    if inside:
        raise MetamathError("a comment does not end")


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._blocks = [_Block()]
        self._constants: set[str] = set()
        self._variables: set[str] = set()  # of any block: no constant may share a name
        self._labels: set[str] = set()
        self._assertions: dict[str, Assertion] = {}

    def read(self) -> Database:
        label: str | None = None
        for token in self._tokens:
            if label is None and token in ("${", "$}", "$c", "$v", "$d"):
                self._unlabelled(token)
            elif label is not None and token in ("$f", "$e", "$a", "$p"):
                self._labelled(label, token)
                label = None
            elif label is None and re.fullmatch(r"[A-Za-z0-9._-]+", token):
                label = token
            else:
                raise MetamathError(f"{token!r} is not expected after {label!r}")
        if label is not None or len(self._blocks) != 1:
            raise MetamathError("the text ends inside of a block or a statement")
        outer = self._blocks[0]
        return Database(
            assertions=MappingProxyType(self._assertions),
            order=tuple(self._assertions),
            variables=frozenset(self._variables),
            floats=MappingProxyType({k: h for k, h in outer.hypotheses.items() if h.floating}),
            disjoint=frozenset(outer.disjoint),
        )

    def _until(self, *ends: str) -> tuple[Symbols, str]:
        found = []
        for token in self._tokens:
            if token in ends:
                return tuple(found), token
            if "$" in token:
                raise MetamathError(f"{token!r} inside of a statement")
            found.append(token)
        raise MetamathError("a statement does not end")

    def _unlabelled(self, keyword: str) -> None:
        block = self._blocks[-1]
        if keyword == "${":
            self._blocks.append(block.inner())
            return
        if keyword == "$}":
            if len(self._blocks) == 1:
                raise MetamathError("$} without ${")
            self._blocks.pop()
            return
        symbols, _ = self._until("$.")
        if not symbols or len(set(symbols)) != len(symbols):
            raise MetamathError(f"{keyword} {' '.join(symbols)}: empty, or a symbol twice")
        taken = (
            (self._constants | self._variables | self._labels) if keyword == "$c" else self._constants | self._labels
        )
        if keyword == "$d":
            if set(symbols) - block.variables or len(symbols) < 2:
                raise MetamathError(f"$d {' '.join(symbols)}: expected two or more variables in force")
            ordered = sorted(symbols)
            block.disjoint |= {(x, y) for i, x in enumerate(ordered) for y in ordered[i + 1 :]}
            return
        if taken & set(symbols) or (keyword == "$v" and block.variables & set(symbols)):
            raise MetamathError(f"{keyword} {' '.join(symbols)}: a name is taken")
        if keyword == "$c":
            if len(self._blocks) != 1:
                raise MetamathError("a constant is declared inside of a block")
            self._constants |= set(symbols)
        else:
            block.variables |= set(symbols)
            self._variables |= set(symbols)

    def _labelled(self, label: str, keyword: str) -> None:
        block = self._blocks[-1]
        if label in self._labels | self._constants | self._variables:
            raise MetamathError(f"the label {label!r} is taken")
        self._labels.add(label)
        symbols, end = self._until("$=" if keyword == "$p" else "$.")
        if not symbols or symbols[0] not in self._constants:
            raise MetamathError(f"{label}: expected a constant as the typecode")
        if keyword == "$f":
            if len(symbols) != 2 or symbols[1] not in block.variables or symbols[1] in block.typed:
                raise MetamathError(f"{label}: expected a typecode and a variable not yet typed")
            block.hypotheses[label] = block.typed[symbols[1]] = Hypothesis(label, symbols, True)
            return
        for symbol in symbols[1:]:
            if symbol not in self._constants and symbol not in block.typed:
                raise MetamathError(f"{label}: {symbol!r} is no constant and no typed variable in force")
        if keyword == "$e":
            block.hypotheses[label] = Hypothesis(label, symbols, False)
            return
        proof = self._until("$.")[0] if end == "$=" else None
        self._assertions[label] = self._assertion(label, symbols, proof)

    def _assertion(self, label: str, symbols: Symbols, proof: Symbols | None) -> Assertion:
        block = self._blocks[-1]
        used = set(symbols)
        for hypothesis in block.hypotheses.values():
            if not hypothesis.floating:
                used |= set(hypothesis.symbols)
        mandatory = tuple(h for h in block.hypotheses.values() if not h.floating or h.symbols[1] in used)
        return Assertion(
            label=label,
            symbols=symbols,
            hypotheses=mandatory,
            disjoint=frozenset(pair for pair in block.disjoint if used.issuperset(pair)),
            proof=proof,
            index=len(self._assertions),
            scope=MappingProxyType(dict(block.hypotheses)),
            scope_disjoint=frozenset(block.disjoint),
        )
