"""The verifier: runs the answer and the gold query, on the episode's database and on variations of it.

    success = database_unchanged  and  answer_explained  and  equal rows on the database and on each variation

The answer is a query. A result that was found out and written down agrees with the gold query on the one database and
on no other, so every task has at least one variation on which the gold query's rows differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from ..endings import never, unfinished
from . import variations
from .compare import Expected, expected, matches, orders
from .engine import Reader, Refused
from .env import unpack

VERSION = "2"


def verify(
    task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot, stop: StopReason | None = None
) -> Verdict:
    """Measures one episode.

    Constraints: `database_unchanged`; `answer_explained` - the answer in the final state was given by an action.
    Outcome: the answer is equivalent to the gold query (`compare`); None where the gold query itself does not run or
    no variation of the data changes its rows. Quality: 1 - (calls beyond the reference's) / (the reference's).
    """
    (_, before), (state, after) = unpack(initial), unpack(final)
    calls = [call for action in actions for call in action.calls]
    given = [call.arguments.get("sql") for call in calls if call.name == "answer"]
    explained = state.answer is None or state.answer in given
    count = sum(max(1, len(action.calls)) for action in actions)
    outcome, seen, diagnostics = _outcome(task, before, state.answer, stop)
    return Verdict(
        constraints=(
            Check(
                name="database_unchanged", passed=before == after, evidence="" if before == after else "bytes differ"
            ),
            Check(name="answer_explained", passed=explained, evidence="" if explained else f"{state.answer}"[:200]),
        ),
        outcome=outcome,
        quality=max(0.0, 1.0 - max(0, count - task.data["calls"]) / task.data["calls"]),
        diagnostics={
            "calls": count,
            "answered": state.answer is not None,
            "unfinished": unfinished(state.answer is not None, stop),
            **diagnostics,
        },
        evidence=tuple(seen),
    )


def _outcome(
    task: Task, data: bytes, answer: str | None, stop: StopReason | None
) -> tuple[bool | None, list[str], dict]:
    try:
        cases = _cases(data, task.data["gold"], task.data["seed"])
    except Refused as error:
        return None, [f"the gold query does not run: {error}"], {}
    if len(cases) < 2:
        return None, ["no variation of the data changes the gold query's rows"], {}
    if answer is None:
        return False, [never("answer", stop)], {}
    given = []
    for database, gold in cases:
        reader = Reader(database)
        try:
            result = reader.run(answer)
        except Refused as error:
            return False, [f"the answer does not run: {error}"], {"variation": len(given)}
        finally:
            reader.close()
        if len(result.columns) != gold.columns:
            return False, [f"{len(result.columns)} columns, expected {gold.columns}"], {"variation": len(given)}
        given.append(result.rows)
    first = cases[0][1]
    left = [order for order in orders(given[0], first) if matches(given[0], first, order)]
    if not left:
        return False, [f"other rows: {len(given[0])}, expected {len(first.rows)}"], {"variation": 0}
    for i, ((_, gold), rows) in enumerate(zip(cases, given, strict=True)):
        left = [order for order in left if matches(rows, gold, order)]
        if not left:
            return False, [f"right on the database itself, other rows on variation {i}"], {"variation": i}
    moved = left[0] != tuple(range(first.columns))
    return True, ["the same rows on the database and each variation"], {"columns_moved": moved}


@lru_cache(maxsize=64)
def _cases(data: bytes, gold: str, seed: str) -> tuple[tuple[bytes, Expected], ...]:
    """The database and its variations, with what is right on each; the group's members share them."""
    reader = Reader(data)
    try:
        original = expected(reader, gold)
    finally:
        reader.close()
    return ((data, original), *variations.choose(data, gold, seed))


def decidable(data: bytes, gold: str, seed: str) -> bool:
    """Whether an answer to this question can be told from its written-down result."""
    try:
        return len(_cases(data, gold, seed)) >= 2
    except Refused:
        return False
