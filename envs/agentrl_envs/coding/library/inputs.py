"""Draws arguments for the library's functions: small values, the edges (empty, equal, touching) often among them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

WORDS = ("a", "be", "sea", "oak", "pine", "cedar", "willow", "chestnut", "undergrowth")
NAMES = ("ada", "bo", "cy", "dee", "eve", "fay", "gus")


def _numbers(rng: Random, low: int, high: int, most: int) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(0, most))]


def _spans(rng: Random) -> list[tuple[int, int]]:
    starts = [rng.randint(0, 14) for _ in range(rng.randint(0, 5))]
    return [(start, start + rng.randint(0, 5)) for start in starts]


def _span(rng: Random) -> tuple[int, int]:
    start = rng.randint(0, 9)
    return (start, start + rng.randint(1, 4))


def _lines(rng: Random) -> list[tuple[int, int]]:
    return [(rng.randint(1, 400), rng.choice((1, 2, 4, 5, 6, 8, 9, 10, 11, 12))) for _ in range(rng.randint(0, 5))]


def _offers(rng: Random) -> list[tuple[str, int, int]]:
    return [(name, rng.randint(3, 6), rng.randint(1, 4)) for name in rng.sample(NAMES, rng.randint(0, 4))]


def _text(rng: Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 7)))


def _letters(rng: Random) -> str:
    return "".join(rng.choice("abz") * rng.choice((1, 1, 2, 3, 11)) for _ in range(rng.randint(0, 4)))


def _grid(rng: Random, values: int, least: int = 1) -> list[list[int]]:
    height, width = rng.randint(least, 4), rng.randint(least, 4)
    return [[rng.randrange(values) for _ in range(width)] for _ in range(height)]


def _cell(rng: Random, values: int) -> list[Any]:
    rows = _grid(rng, values)
    return [rows, rng.randrange(len(rows)), rng.randrange(len(rows[0]))]


def _open_grid(rng: Random) -> list[list[int]]:
    return [[int(cell == 0) for cell in row] for row in _grid(rng, 6, least=2)]


def _moves(rng: Random) -> list[tuple[str, int]]:
    return [(rng.choice(NAMES[:3]), rng.randint(-4, 5)) for _ in range(rng.randint(0, 8))]


def _lots(rng: Random) -> list[Any]:
    lots = [(rng.randint(0, 6), rng.randint(1, 9)) for _ in range(rng.randint(0, 4))]
    held = sum(quantity for quantity, _ in lots)
    return [lots, rng.choice((0, held, held + 1, rng.randint(0, held)))]


def _date(rng: Random) -> list[int]:
    year = rng.choice((1900, 1999, 2000, 2023, 2024, 2100))
    return [year, rng.choice((1, 2, 2, 3, 6, 11, 12)), rng.randint(1, 28)]


DRAWS: dict[str, Callable[[Random], list[Any]]] = {
    "spans.merge": lambda rng: [_spans(rng)],
    "spans.covered": lambda rng: [_spans(rng)],
    "spans.gaps": lambda rng: [_spans(rng), rng.randint(0, 6), rng.randint(7, 20)],
    "spans.close": lambda rng: [_span(rng), _span(rng)],
    "spans.deepest": lambda rng: [_spans(rng)],
    "prices.subtotal": lambda rng: [_lines(rng)],
    "prices.discount": lambda rng: [_lines(rng)],
    "prices.shipping": lambda rng: [_lines(rng), rng.random() < 0.5],
    "prices.instalments": lambda rng: [rng.randint(0, 500), rng.randint(1, 7)],
    "prices.cheapest": lambda rng: [_offers(rng), rng.randint(1, 4)],
    "texts.wrap": lambda rng: [_text(rng)],
    "texts.longest_run": lambda rng: [_letters(rng)],
    "texts.rotate": lambda rng: [_text(rng) + rng.choice(("", " az", "Z{`")), rng.randint(0, 30)],
    "texts.compress": lambda rng: [_letters(rng)],
    "texts.common": lambda rng: [_letters(rng), _letters(rng)],
    "scores.top": lambda rng: [{name: rng.randint(1, 4) for name in NAMES[: rng.randint(0, 7)]}, rng.randint(0, 4)],
    "scores.ranks": lambda rng: [_numbers(rng, 1, 5, 6)],
    "scores.median": lambda rng: [_numbers(rng, -5, 9, 6)],
    "scores.sums": lambda rng: [_numbers(rng, -5, 9, 7)],
    "scores.best_streak": lambda rng: [_numbers(rng, -6, 6, 7)],
    "scores.histogram": lambda rng: [_numbers(rng, -9, 20, 8), rng.randint(2, 6)],
    "grids.turn": lambda rng: [_grid(rng, 10)],
    "grids.neighbours": lambda rng: _cell(rng, 9),
    "grids.paths": lambda rng: [_open_grid(rng)],
    "grids.area": lambda rng: _cell(rng, 2),
    "grids.saddle": lambda rng: [_grid(rng, 6)],
    "stock.levels": lambda rng: [_moves(rng)],
    "stock.orders": lambda rng: [{name: rng.randint(0, 12) for name in NAMES[: rng.randint(0, 6)]}],
    "stock.cost": _lots,
    "stock.shelf": lambda rng: [[rng.randint(1, 9) for _ in range(rng.randint(0, 7))], rng.randint(9, 12)],
    "stock.turnover": lambda rng: [_moves(rng)],
    "dates.leap": lambda rng: [rng.choice((1900, 1996, 2000, 2019, 2100, 2104, 2400, 2023))],
    "dates.length": lambda rng: [rng.choice((1900, 2000, 2023, 2024)), rng.randint(1, 12)],
    "dates.day_of_year": _date,
    "dates.later": lambda rng: [*_date(rng), rng.choice((0, 1, 3, 4, 28, 31, 60, 365, 400))],
    "dates.quarter": lambda rng: [rng.randint(1, 12)],
    "codes.digits": lambda rng: [rng.choice((0, 1, 9, 10, rng.randint(0, 999))), rng.choice((2, 3, 8, 10))],
    "codes.check_digit": lambda rng: ["".join(rng.choice("0123456789") for _ in range(rng.randint(0, 9)))],
    "codes.roman": lambda rng: [rng.choice((1, 4, 5, 9, 10, 40, 90, 100, rng.randint(1, 399)))],
    "codes.factors": lambda rng: [rng.choice((2, 3, 4, 9, 25, 49, rng.randint(2, 400)))],
    "codes.gray": lambda rng: [rng.randint(0, 300)],
}
"""By `module.function`. Constants of a module that a task varies: `VARIED`."""

VARIED: dict[str, dict[str, tuple[int, ...]]] = {
    "spans": {"MARGIN": (1, 2, 3)},
    "prices": {"BULK": (5, 8, 10), "PERCENT": (5, 10, 15, 20), "FREE_FROM": (2000, 3000, 5000), "BASE_FEE": (390, 490)},
    "texts": {"WIDTH": (9, 10, 12, 14)},
    "scores": {"WINDOW": (2, 3, 4)},
    "grids": {},
    "stock": {"LOW": (4, 5, 8), "PACK": (3, 4, 6)},
    "dates": {},
    "codes": {"WEIGHT": (3, 7, 9)},
}
