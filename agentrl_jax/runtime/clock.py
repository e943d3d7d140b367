"""Wall seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """Adds up wall time under names; the totals travel in checkpoints, so that a resumed run reports all of it."""

    def __init__(self, seconds: Mapping[str, float] = {}) -> None:
        self.seconds: dict[str, float] = dict(seconds)
        self._lap = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        return sum(self.seconds.values())

    def lap(self) -> float:
        """Wall seconds since the last call (or since the clock was made)."""
        now = time.perf_counter()
        passed, self._lap = now - self._lap, now
        return passed
