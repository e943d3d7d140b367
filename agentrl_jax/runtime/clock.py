"""Wall seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

OTHER = "other"  # what no phase names: starting up, writing


class Clock:
    """Adds up wall time under names; the totals travel in checkpoints, so that a resumed run reports all of it."""

    def __init__(self, seconds: Mapping[str, float] = {}) -> None:
        self._before = sum(seconds.values())
        self._phases = {name: s for name, s in seconds.items() if name != OTHER}
        self._started = self._lap = time.perf_counter()
        self._now = OTHER, self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        before, self._now = self._now[0], (name, start)
        try:
            yield
        finally:
            end = time.perf_counter()
            self._phases[name] = self._phases.get(name, 0.0) + end - start
            self._now = before, end

    @property
    def now(self) -> tuple[str, float]:
        """The phase it is, and for how many seconds it has been."""
        name, since = self._now
        return name, time.perf_counter() - since

    @property
    def seconds(self) -> dict[str, float]:
        """Wall seconds by phase; they add up to `total()`."""
        return {**self._phases, OTHER: max(0.0, self.total() - sum(self._phases.values()))}

    def total(self) -> float:
        """Wall seconds since the run began, without the time it was stopped."""
        return self._before + time.perf_counter() - self._started

    def lap(self) -> float:
        """Wall seconds since the last call (or since the clock was made)."""
        now = time.perf_counter()
        passed, self._lap = now - self._lap, now
        return passed
