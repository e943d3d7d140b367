"""The checker: a proof is a list of labels, run over a stack of expressions.

A hypothesis pushes itself. An assertion pops one expression per mandatory hypothesis, which fixes a substitution;
typecodes, essential hypotheses and disjoint variable conditions must hold; then its statement is pushed. A proof is
complete when exactly the goal is left. There is no other way to put an expression on the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .metamath import Assertion, Database, Hypothesis, Pairs, Symbols

Stack = tuple[Symbols, ...]
MOST_SYMBOLS = 20_000  # of one expression: nested substitution doubles, so a bound is needed


class StepError(Exception):
    """A step of a proof is wrong; the message says why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be proved and from what: the first `limit` assertions of `database`, the hypotheses by label (of
    types and essential ones), and the variables that may be taken to be disjoint."""

    database: Database = field(repr=False)
    goal: Symbols
    hypotheses: Mapping[str, Hypothesis]
    disjoint: Pairs
    limit: int

    def find(self, label: str) -> Hypothesis | Assertion:
        """What the label names here. Labels of later assertions are as unknown as labels that nothing has."""
        found = self.hypotheses.get(label) or self.database.assertions.get(label)
        if found is None or (isinstance(found, Assertion) and found.index >= self.limit):
            raise StepError(f"nothing is called {label[:40]!r} here")
        return found


def problem_of(database: Database, assertion: Assertion) -> Problem:
    """The problem of proving a theorem of the database from what stands before it."""
    return Problem(database, assertion.symbols, assertion.scope, assertion.scope_disjoint, assertion.index)


def step(problem: Problem, stack: Stack, label: str) -> Stack:
    """The stack after one more label; StepError if the label does not apply."""
    found = problem.find(label)
    if isinstance(found, Hypothesis):
        return (*stack, found.symbols)
    count = len(found.hypotheses)
    if len(stack) < count:
        raise StepError(f"{label} needs {count} expressions on the stack, which has {len(stack)}")
    return (*stack[: len(stack) - count], conclude(problem, found, stack[len(stack) - count :]))


def conclude(problem: Problem, assertion: Assertion, given: Sequence[Symbols]) -> Symbols:
    """What the assertion says of the expressions given for its hypotheses, in their order."""
    values: dict[str, Symbols] = {}
    for hypothesis, expression in zip(assertion.hypotheses, given, strict=True):
        if hypothesis.floating:
            if expression[0] != hypothesis.symbols[0]:
                raise StepError(_mismatch(assertion, hypothesis, " ".join(hypothesis.symbols), expression))
            values[hypothesis.symbols[1]] = expression[1:]
    for hypothesis, expression in zip(assertion.hypotheses, given, strict=True):
        if not hypothesis.floating:
            wanted = substitute(hypothesis.symbols, values)
            if wanted != expression:
                raise StepError(_mismatch(assertion, hypothesis, " ".join(wanted), expression))
    _check_disjoint(problem, assertion, values)
    return substitute(assertion.symbols, values)


def _mismatch(assertion: Assertion, hypothesis: Hypothesis, wanted: str, found: Symbols) -> str:
    return f"{assertion.label}: {hypothesis.label} must be `{wanted[:200]}`, the stack has `{' '.join(found)[:200]}`"


def substitute(symbols: Symbols, values: Mapping[str, Symbols]) -> Symbols:
    """The symbols with every variable of `values` replaced, all at once."""
    if sum(len(values.get(symbol, "_")) for symbol in symbols) > MOST_SYMBOLS:
        raise StepError(f"the expression would have more than {MOST_SYMBOLS} symbols")
    result: list[str] = []
    for symbol in symbols:
        replaced = values.get(symbol)
        if replaced is None:
            result.append(symbol)
        else:
            result.extend(replaced)
    return tuple(result)


def _check_disjoint(problem: Problem, assertion: Assertion, values: Mapping[str, Symbols]) -> None:
    variables = problem.database.variables
    for x, y in assertion.disjoint:
        for one in variables.intersection(values[x]):
            for other in variables.intersection(values[y]):
                if one == other:
                    raise StepError(f"{assertion.label}: {x} and {y} must not share a variable, both have {one}")
                if (min(one, other), max(one, other)) not in problem.disjoint:
                    raise StepError(f"{assertion.label}: {one} and {other} must be disjoint, and need not be here")


def run(problem: Problem, labels: Iterable[str], stack: Stack = ()) -> Stack:
    """The stack after all labels."""
    for label in labels:
        stack = step(problem, stack, label)
    return stack


def proves(problem: Problem, labels: Iterable[str]) -> bool:
    """Whether the labels are a complete proof of the goal: checked from nothing."""
    try:
        return run(problem, labels) == (problem.goal,)
    except StepError:
        return False


def check(database: Database, assertion: Assertion) -> None:
    """Checks the theorem's own proof, StepError if it is none. Saved steps of a compressed proof are reused."""
    problem = problem_of(database, assertion)
    stack: Stack = ()
    saved: list[Symbols] = []
    for item in steps_of(assertion):
        if item is None:
            if not stack:
                raise StepError(f"{assertion.label}: nothing to save")
            saved.append(stack[-1])
        elif isinstance(item, int):
            if item >= len(saved):
                raise StepError(f"{assertion.label}: saved step {item} does not exist")
            stack = (*stack, saved[item])
        else:
            stack = step(problem, stack, item)
    if stack != (assertion.symbols,):
        raise StepError(f"{assertion.label}: the proof leaves {len(stack)} expressions, not the statement alone")


def steps_of(assertion: Assertion) -> list[str | int | None]:
    """The proof as labels; `None` saves the top of the stack, a number brings a saved expression back."""
    proof = assertion.proof
    if not proof or "?" in "".join(proof[proof.index(")") :] if proof[0] == "(" and ")" in proof else proof):
        raise StepError(f"{assertion.label}: the proof is incomplete")
    if proof[0] != "(":
        return list(proof)
    if ")" not in proof:
        raise StepError(f"{assertion.label}: the compressed proof has no list of labels")
    end = proof.index(")")
    labels = [*(hypothesis.label for hypothesis in assertion.hypotheses), *proof[1:end]]
    steps: list[str | int | None] = []
    number = 0
    for letter in "".join(proof[end + 1 :]):
        if "A" <= letter <= "T":
            place = 20 * number + ord(letter) - ord("A")
            steps.append(labels[place] if place < len(labels) else place - len(labels))
            number = 0
        elif "U" <= letter <= "Y":
            number = 5 * number + ord(letter) - ord("U") + 1
        elif letter == "Z" and number == 0 and steps and steps[-1] is not None:
            steps.append(None)
        else:
            raise StepError(f"{assertion.label}: {letter!r} does not belong in a compressed proof")
    if number:
        raise StepError(f"{assertion.label}: the compressed proof ends inside of a number")
    return steps
