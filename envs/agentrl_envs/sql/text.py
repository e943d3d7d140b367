"""Reads as much of a statement as is needed: its tokens with their depth, the parts of its outermost SELECT, and how
often its WITH clauses multiply out."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import NamedTuple

_TOKEN = re.compile(
    r"(?P<skip>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))"
    r"|(?P<quoted>'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\])"
    r"|(?P<word>[^\W\d][\w$]*)|(?P<number>\d[\w.]*)|(?P<sign>.)",
    re.DOTALL,
)
SETS = ("UNION", "INTERSECT", "EXCEPT")


class Token(NamedTuple):
    text: str  # as written
    kind: str  # word, quoted, number or sign
    start: int
    end: int
    depth: int  # of brackets around it

    @property
    def word(self) -> str:
        """In capitals where it is a bare word, else empty."""
        return self.text.upper() if self.kind == "word" else ""

    @property
    def name(self) -> str:
        """The identifier that it may be, in small letters."""
        return (self.text[1:-1] if self.kind == "quoted" else self.text).lower()


@dataclass(frozen=True, slots=True)
class Select:
    """The outermost SELECT. `keys`: what it orders by, None where it does not; `unlimited`: the text without LIMIT."""

    text: str
    unlimited: str
    limited: bool
    offset: int
    keys: tuple[str, ...] | None
    insert_at: int | None  # where further columns can be added (before FROM); None for DISTINCT and set operations


def tokens(sql: str) -> list[Token]:
    found, depth = [], 0
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup or ""
        if kind == "skip":
            continue
        text = match.group()
        depth -= text == ")"
        found.append(Token(text, kind, match.start(), match.end(), depth))
        depth += text == "("
    return found


def select(sql: str) -> Select:
    """The parts of `sql`, which is known to run: the outermost ORDER BY, LIMIT and FROM."""
    text = sql.strip().rstrip(";").rstrip()
    outer = [token for token in tokens(text) if token.depth == 0]
    words = [token.word for token in outer]
    limit = _last(words, "LIMIT")
    order = next((i for i in range(len(words) - 2, -1, -1) if words[i] == "ORDER" and words[i + 1] == "BY"), None)
    end = outer[limit].start if limit is not None else len(text)
    keys = None if order is None else _keys(text, outer[order + 1].end, end)
    offset = _offset([token.text for token in outer[limit + 1 :]]) if limit is not None else 0
    simple = words and words[0] == "SELECT" and words[1] != "DISTINCT" and not set(SETS) & set(words)
    grouped_from = words.index("FROM") if simple and "FROM" in words else None
    return Select(
        text=text,
        unlimited=text[:end].rstrip(),
        limited=limit is not None,
        offset=offset,
        keys=keys,
        insert_at=None if grouped_from is None else outer[grouped_from].start,
    )


def _last(words: list[str], wanted: str) -> int | None:
    return next((i for i in range(len(words) - 1, -1, -1) if words[i] == wanted), None)


def _offset(after: list[str]) -> int:
    """Of `LIMIT n OFFSET m` or `LIMIT m, n`."""
    if len(after) == 3 and after[1].upper() == "OFFSET" and after[2].isdigit():
        return int(after[2])
    return int(after[0]) if len(after) == 3 and after[1] == "," and after[0].isdigit() else 0


def _keys(text: str, start: int, end: int) -> tuple[str, ...]:
    """The expressions between commas, without their direction."""
    cuts = [token.start for token in tokens(text[start:end]) if token.depth == 0 and token.text == ","]
    edges = [-1, *cuts, end - start]
    pieces = [text[start + a + 1 : start + b].strip() for a, b in itertools.pairwise(edges)]
    return tuple(re.sub(r"\s+(ASC|DESC|NULLS\s+(FIRST|LAST))\b", "", piece, flags=re.IGNORECASE) for piece in pieces)


def expansions(sql: str) -> int:
    """An upper bound on how many subqueries the WITH clauses multiply out to.

    SQLite copies a common table expression at each use before anything of it runs, so a chain of n that each uses
    the one before twice costs 2**n while the statement is compiled, where no limit of its own would stop it.
    """
    found = tokens(sql)
    bodies: dict[str, list[str]] = {}
    for i, token in enumerate(found):
        if token.word != "AS" or i == 0:
            continue
        after = i + 1
        while after < len(found) and found[after].word in ("NOT", "MATERIALIZED"):
            after += 1
        if after < len(found) and found[after].text == "(":
            close = next((j for j in range(after + 1, len(found)) if found[j].text == ")" and
                          found[j].depth == found[after].depth), len(found))  # fmt: skip
            bodies.setdefault(_defined(found, i), []).extend(t.name for t in found[after:close])
    weights: dict[str, int] = {}

    def weight(name: str, inside: tuple[str, ...]) -> int:
        if name in inside:
            return 1
        if name not in weights:
            uses = (word for word in bodies[name] if word in bodies and word != name)
            weights[name] = min(1 + sum(weight(word, (*inside, name)) for word in uses), 10**9)
        return weights[name]

    return sum(weight(token.name, ()) for token in found if token.name in bodies)


def _defined(found: list[Token], at: int) -> str:
    """The name that the AS at this place defines: before it, or before its list of columns."""
    before = at - 1
    if found[before].text == ")":
        depth = found[before].depth
        before = next((j for j in range(before - 1, 0, -1) if found[j].text == "(" and found[j].depth == depth), 1) - 1
    return found[max(before, 0)].name
