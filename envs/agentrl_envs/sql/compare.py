"""Whether the rows of an answer are the rows of the gold query: the rules of result-set equivalence.

- Rows count as often as they occur: what the gold query repeats must be repeated, what it does not must not be.
- Their order counts only where the gold query orders, and there only as far as its keys decide: rows with equal keys
  may come in any order, and where its LIMIT cuts through equal keys, any of them may be the ones that are left.
- Columns may stand in any order, the same one on every database that is compared; their names do not count.
- Numbers are equal within a relative 1e-6; an integer equals its float. Text, blobs and NULL equal only themselves.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_jax.protocol import Status

from . import text
from .engine import Reader, Refused

RELATIVE, ABSOLUTE = 1e-6, 1e-9
MOST_ORDERS = 720
Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the gold query asks for on one database.

    `runs` are the rows without its LIMIT, cut where its keys change, in order; the answer is the window of `count`
    rows that begins after `offset`. `tied`: the window cuts through a run, so that more than one answer is right.
    """

    columns: int
    rows: tuple[Row, ...]
    runs: tuple[tuple[Row, ...], ...]
    offset: int
    tables: frozenset[str]

    @property
    def tied(self) -> bool:
        edges = list(itertools.accumulate((len(run) for run in self.runs), initial=0))
        inside = {self.offset, self.offset + len(self.rows)}
        return len(self.runs) > 0 and not inside <= set(edges)


def expected(reader: Reader, gold: str) -> Expected:
    """Runs the gold query. Raises `Refused` if it does not run within the limits that hold for answers."""
    parts = text.select(gold)
    result = reader.run(parts.text)
    if result.more:
        raise Refused("the gold query returns too many rows", Status.ERROR)
    rows = tuple(result.rows)
    pool, keys = _with_keys(reader, parts, result.columns)
    start = parts.offset if parts.limited else 0
    window = None if pool is None else pool[start : start + len(rows)]
    if pool is None or window != rows:  # the keys are out of sight: each row has its place
        pool, keys, start = rows, list(range(len(rows))), 0
    groups = itertools.groupby(zip(keys, pool, strict=True), key=lambda pair: pair[0])
    runs = tuple(tuple(row for _, row in group) for _, group in groups)
    return Expected(len(result.columns), rows, runs, start, result.tables)


def _with_keys(reader: Reader, parts: text.Select, columns: Sequence[str]) -> tuple[tuple[Row, ...] | None, list[Any]]:
    """The rows without LIMIT, each with the keys it is ordered by; (None, []) where they cannot be had."""
    try:
        if parts.keys is None:
            pool = reader.run(parts.unlimited)
            return (None if pool.more else tuple(pool.rows)), [()] * len(pool.rows)
        names = [column.lower() for column in columns]
        places = [_place(key, names) for key in parts.keys]
        sql, added = parts.unlimited, [key for key, place in zip(parts.keys, places, strict=True) if place is None]
        if added:
            if parts.insert_at is None:
                return None, []
            sql = f"{sql[: parts.insert_at]}, {', '.join(added)} {sql[parts.insert_at :]}"
        pool = reader.run(sql)
    except Refused:
        return None, []
    if pool.more:
        return None, []
    extra = itertools.count(len(columns))
    at = [place if place is not None else next(extra) for place in places]
    keys = [tuple(canonical(row[i]) for i in at) for row in pool.rows]
    return tuple(row[: len(columns)] for row in pool.rows), keys


def _place(key: str, names: Sequence[str]) -> int | None:
    """Which result column a key is, by its number or its name."""
    if key.isdigit() and 0 < int(key) <= len(names):
        return int(key) - 1
    bare = key.strip('"`[]').lower()
    return names.index(bare) if names.count(bare) == 1 else None


def canonical(value: Any) -> tuple[str, Any]:
    """Equal for values that are equal up to nine digits."""
    if value is None:
        return ("null", "")
    if isinstance(value, int | float):
        return ("number", f"{float(value) + 0.0:.8e}" if value else f"{0.0:.8e}")
    return (type(value).__name__, value)


def close(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(one) is type(other) and one == other


def orders(answer: Sequence[Row], gold: Expected) -> Iterator[tuple[int, ...]]:
    """The orders of the answer's columns that could make it the gold rows: `order[i]` holds gold column i. The order
    as it stands comes first."""
    width = gold.columns
    if answer and len(answer[0]) != width:
        return
    own = tuple(range(width))
    yield own
    pool = [row for run in gold.runs for row in run]
    held = [Counter(canonical(row[i]) for row in pool) for i in own]
    given = [Counter(canonical(row[j]) for row in answer) for j in own]
    fits = [[j for j in own if given[j] <= held[i]] for i in own]

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == width:
            yield chosen
            return
        for j in fits[len(chosen)]:
            if j not in chosen:
                yield from extend((*chosen, j))

    yield from (order for order in itertools.islice(extend(()), MOST_ORDERS) if order != own)


def matches(answer: Sequence[Row], gold: Expected, order: Sequence[int]) -> bool:
    """Whether the answer, its columns in this order, is a right answer."""
    if len(answer) != len(gold.rows):
        return False
    turned = [tuple(row[j] for j in order) for row in answer]
    start, end = gold.offset, gold.offset + len(gold.rows)
    at = 0
    for run in gold.runs:
        low, high = max(at, start), min(at + len(run), end)
        if low < high and not _taken_from(turned[low - start : high - start], run):
            return False
        at += len(run)
    return True


def _taken_from(some: Sequence[Row], run: Sequence[Row]) -> bool:
    """Whether these rows are rows of the run, each taken at most as often as it occurs."""
    have = Counter(tuple(map(canonical, row)) for row in run)
    want = Counter(tuple(map(canonical, row)) for row in some)
    if want <= have:
        return True
    left = [row for row in run if have[tuple(map(canonical, row))] > want[tuple(map(canonical, row))]]
    missing = [row for row in some if want[tuple(map(canonical, row))] > have[tuple(map(canonical, row))]]
    if len(missing) > 200:
        return False
    for row in missing:  # nearly equal, on either side of a rounding edge
        match = next((i for i, other in enumerate(left) if all(map(close, row, other))), None)
        if match is None:
            return False
        del left[match]
    return True
