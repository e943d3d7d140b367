"""Forward steps over numbered facts: `apply` a statement to earlier facts, its variables found by matching.

The policy writes no syntax proofs; they are found here and run through the checker. A fact exists only because
`checker.conclude` gave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .checker import Problem, StepError, conclude, run, step
from .metamath import Assertion, Hypothesis, Symbols
from .syntax import MOST_SYMBOLS, PROVABLE, Grammar

MOST_MATCHES = 2_000


class Move(NamedTuple):
    """One step: a label, the facts it uses (by place, from 0), and the values of variables these do not fix."""

    label: str
    uses: tuple[int, ...] = ()
    values: tuple[tuple[str, str], ...] = ()


def derive(problem: Problem, grammar: Grammar, facts: Sequence[Symbols], move: Move) -> Symbols:
    """The fact that the move gives; StepError if it gives none."""
    found = problem.find(move.label)
    if isinstance(found, Hypothesis):
        if found.floating or move.uses or move.values:
            raise StepError(
                f"{move.label} is a hypothesis" + (" of a type" if found.floating else ": it takes nothing")
            )
        return found.symbols
    if found.symbols[0] != PROVABLE:
        raise StepError(f"{move.label} builds expressions; write the expression where it is needed")
    essential = [h for h in found.hypotheses if not h.floating]
    if len(move.uses) != len(essential):
        raise StepError(f"{move.label} uses {len(essential)} facts, {len(move.uses)} are named")
    if any(not 0 <= use < len(facts) for use in move.uses):
        raise StepError(f"there are facts 1 to {len(facts)}" if facts else "there are no facts yet")
    used = [facts[use] for use in move.uses]
    values = _values(grammar, found, used, dict(move.values))
    proved = iter(used)
    given = [_typed(problem, grammar, h, values) if h.floating else next(proved) for h in found.hypotheses]
    return conclude(problem, found, given)


def _typed(problem: Problem, grammar: Grammar, hypothesis: Hypothesis, values: Mapping[str, Symbols]) -> Symbols:
    typecode, variable = hypothesis.symbols
    labels = grammar.prove(typecode, values[variable])
    if labels is None:
        raise StepError(f"{variable} = `{' '.join(values[variable])[:200]}` is not a {typecode}")
    wanted = (typecode, *values[variable])
    if run(problem, labels) != (wanted,):
        raise StepError(f"`{' '.join(wanted)[:200]}` cannot be built")
    return wanted


def _values(grammar: Grammar, rule: Assertion, used: list[Symbols], given: dict[str, str]) -> dict[str, Symbols]:
    """What every variable of the rule stands for: as given, else so that the rule's hypotheses are the facts used."""
    types = {h.symbols[1]: h.symbols[0] for h in rule.hypotheses if h.floating}
    unknown = sorted(set(given) - set(types))
    if unknown:
        raise StepError(f"{rule.label} has no variable {unknown[0][:40]!r}, but {', '.join(types) or 'none'}")
    values = {variable: tuple(text.split()) for variable, text in given.items()}
    patterns = [h.symbols for h in rule.hypotheses if not h.floating]
    found = next(_Matching(grammar, types).match(list(zip(patterns, used, strict=True)), values), None)
    if found is None:
        pairs = zip(patterns, used, strict=True)
        shown = "; ".join(f"`{' '.join(pattern)}` with `{' '.join(fact)[:200]}`" for pattern, fact in pairs)
        raise StepError(f"{rule.label} does not fit: {shown}")
    missing = [variable for variable in types if variable not in found]
    if missing:
        raise StepError(f"{rule.label}: say what {', '.join(missing)} stands for, in values")
    return found


class _Matching:
    def __init__(self, grammar: Grammar, types: Mapping[str, str]) -> None:
        self._grammar, self._types = grammar, types
        self._tried = 0

    def match(self, pairs: list[tuple[Symbols, Symbols]], values: dict[str, Symbols]) -> Iterator[dict[str, Symbols]]:
        """Every way to fill in variables so that each pattern reads as its expression."""
        if not pairs:
            yield values
            return
        (pattern, symbols), rest = pairs[0], pairs[1:]
        for found in self._fit(pattern, symbols, values):
            yield from self.match(rest, found)

    def _fit(self, pattern: Symbols, symbols: Symbols, values: dict[str, Symbols]) -> Iterator[dict[str, Symbols]]:
        self._tried += 1
        if self._tried > MOST_MATCHES:
            raise StepError("too many ways to fit: say what the variables stand for, in values")
        if not pattern:
            if not symbols:
                yield values
            return
        head, tail = pattern[0], pattern[1:]
        if head not in self._types:
            if symbols[:1] == (head,):
                yield from self._fit(tail, symbols[1:], values)
        elif head in values:
            length = len(values[head])
            if symbols[:length] == values[head]:
                yield from self._fit(tail, symbols[length:], values)
        else:
            for length in (len(symbols),) if not tail else range(len(symbols) - _constants(tail, self._types) + 1):
                if tail and tail[0] not in self._types and symbols[length : length + 1] != tail[:1]:
                    continue
                if self._grammar.prove(self._types[head], symbols[:length]) is not None:
                    yield from self._fit(tail, symbols[length:], {**values, head: symbols[:length]})


def _constants(pattern: Symbols, types: Mapping[str, str]) -> int:
    return sum(symbol not in types for symbol in pattern)


def moves_of(problem: Problem, steps: Iterable[str | int | None]) -> tuple[Move, ...]:
    """A proof by labels (as `checker.steps_of` gives it) as moves; facts that recur are used again. StepError if an
    expression on the way is longer than a move may name."""
    moves: list[Move] = []
    places: dict[Symbols, int] = {}
    stack: list[Symbols] = []
    saved: list[Symbols] = []
    for item in steps:
        if item is None:
            saved.append(stack[-1])
            continue
        if isinstance(item, int):
            stack.append(saved[item])
            continue
        found = problem.find(item)
        count = 0 if isinstance(found, Hypothesis) else len(found.hypotheses)
        given = stack[len(stack) - count :]
        (symbols,) = step(problem, tuple(given), item)
        stack[len(stack) - count :] = [symbols]
        if len(symbols) > MOST_SYMBOLS:
            raise StepError(f"{item}: an expression of {len(symbols)} symbols")
        if symbols[0] == PROVABLE and symbols not in places:
            places[symbols] = len(moves)
            moves.append(_move(found, given, places))
    return _needed(moves, places[stack[-1]])


def _needed(moves: Sequence[Move], last: int) -> tuple[Move, ...]:
    """The moves that the last one rests on, and it; their uses renumbered."""
    kept = {last}
    for place in range(last, -1, -1):
        if place in kept:
            kept.update(moves[place].uses)
    new = {place: number for number, place in enumerate(sorted(kept))}
    return tuple(moves[place]._replace(uses=tuple(new[use] for use in moves[place].uses)) for place in sorted(kept))


def _move(found: Hypothesis | Assertion, given: list[Symbols], places: Mapping[Symbols, int]) -> Move:
    if isinstance(found, Hypothesis):
        return Move(found.label)
    fixed = {symbol for h in found.hypotheses if not h.floating for symbol in h.symbols}
    pairs = list(zip(found.hypotheses, given, strict=True))
    return Move(
        found.label,
        tuple(places[symbols] for h, symbols in pairs if not h.floating),
        tuple((h.symbols[1], " ".join(s[1:])) for h, s in pairs if h.floating and h.symbols[1] not in fixed),
    )


def labels_of(problem: Problem, grammar: Grammar, moves: Sequence[Move], most: int) -> tuple[str, ...] | None:
    """The labels of the last move's whole proof, as a database would hold them; None if there are more than `most`."""
    facts: list[Symbols] = []
    proofs: list[tuple[str, ...]] = []
    for move in moves:
        found = problem.find(move.label)
        facts.append(derive(problem, grammar, facts, move))
        parts: list[str] = []
        if isinstance(found, Assertion):
            used = [facts[use] for use in move.uses]
            values = _values(grammar, found, used, dict(move.values))
            uses = iter(move.uses)
            for h in found.hypotheses:
                built = grammar.prove(h.symbols[0], values[h.symbols[1]]) if h.floating else proofs[next(uses)]
                parts.extend(built or ())
        if len(parts) >= most:
            return None
        proofs.append((*parts, move.label))
    return proofs[-1] if proofs else None


def as_json(moves: Iterable[Move]) -> list[list[Any]]:
    return [[move.label, list(move.uses), dict(move.values)] for move in moves]


def from_json(rows: Iterable[Sequence[Any]]) -> tuple[Move, ...]:
    return tuple(Move(label, tuple(uses), tuple(values.items())) for label, uses, values in rows)
