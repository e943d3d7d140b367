"""What a suite can be asked for, checked once."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("generated", "hotpotqa", "twowiki", "wiki")
SPLITS = ("train", "validation", "heldout", "adversarial")
SCORINGS = ("exact", "f1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    source: str = "generated"
    index: str = "fts5"  # resolved: "bm25s" or "fts5"
    scoring: str = "exact"
    results: int = 5
    max_calls: int = 20
    sloppiness: float = 0.6
    system: bool = True
    human_pool: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("source", self.source, SOURCES), ("scoring", self.scoring, SCORINGS)):
            if value not in known:
                raise ValueError(f"search: {name}={value!r} is not known; expected one of {', '.join(known)}")
        if not 1 <= self.results <= 20:
            raise ValueError(f"search: results={self.results!r}; expected 1 to 20 documents a search")
        if self.max_calls < 18:
            raise ValueError(f"search: max_calls={self.max_calls!r}; the longest reference solution needs 18")
        if not 0.0 <= self.sloppiness <= 1.0:
            raise ValueError(f"search: sloppiness={self.sloppiness!r}; expected a number from 0 to 1")
