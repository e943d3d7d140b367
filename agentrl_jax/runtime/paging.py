"""Who holds which page of the sampler's pools: a free list, a count of holders, and prompts worth keeping."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from agentrl_jax.sampler.pages import PAGE


class PageBook:
    """Pages 1..count-1 (page 0 is nobody's), each held by any number of slots and by the remembered prefixes."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._holders = [0] * count
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int | None:
        """A page for one holder; the prefix used longest ago goes first where none is free. None: all are in use."""
        while not self._free and self._prefixes:
            self.drop(self._prefixes.popitem(last=False)[1])
        if not self._free:
            return None
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> int:
        """One holder more."""
        self._holders[page] += 1
        return page

    def drop(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def shared(self, page: int) -> bool:
        """Whether writing to it would be seen by others."""
        return self._holders[page] > 1

    def remember(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Keep these full pages for prompts that begin alike."""
        for digest, page in zip(digests, pages, strict=False):
            if digest not in self._prefixes:
                self._prefixes[digest] = self.hold(page)

    def recall(self, digests: Sequence[bytes]) -> list[int]:
        """The longest run of remembered pages, each held once more."""
        pages = []
        for digest in digests:
            if digest not in self._prefixes:
                break
            self._prefixes.move_to_end(digest)
            pages.append(self.hold(self._prefixes[digest]))
        return pages

    def forget(self) -> None:
        """Remember nothing: what was computed with other params must not be taken up."""
        while self._prefixes:
            self.drop(self._prefixes.popitem()[1])


def digests(ids: Sequence[int]) -> list[bytes]:
    """One digest for each full page of `ids`, of all the tokens up to its end."""
    found, running = [], hashlib.blake2b(digest_size=16)
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        running.update(np.asarray(ids[start : start + PAGE], "<i4").tobytes())
        found.append(running.digest())
    return found
