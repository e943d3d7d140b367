"""What the rollout side asks of a sampler, and what comes back. No JAX."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Stop = Literal["stop", "length", "context", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One turn to sample in one slot.

    `fresh` starts a new context of `ids`; otherwise `ids` continue what the slot already holds, after the
    tokens sampled there. `share_with` names a slot whose fresh request of the same wave has the same `ids`:
    the prompt is then computed once and shared. `fork_from` names an idle slot: this one takes up all it holds,
    sharing its cache, and goes on with `ids`. `key` makes the randomness: requests with equal keys draw
    equal uniforms, so it must be unique per (seed, step, task, member, turn). `temperature` 0 is greedy;
    `top_k` 0, `top_p` 1 and `min_p` 0 cut nothing. `stop_ids` end the turn beside the sampler's own;
    the turn also ends after the token that completes one of `stop_strings` in the text of the turn. `grammar` (as
    `rollout.grammar` writes it) leaves, before any cut, the tokens by which a text of its language goes on; such a
    turn takes one dispatch a token.
    """

    slot: int
    key: tuple[int, ...]
    ids: tuple[int, ...]
    fresh: bool
    max_tokens: int
    temperature: float
    share_with: int | None = None
    fork_from: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    grammar: str | None = None

    @property
    def shares(self) -> bool:
        """Whether it takes up what another slot computed."""
        return self.share_with is not None or self.fork_from is not None

    @property
    def cuts(self) -> bool:
        """Whether this draws from a part of the vocabulary, as a sampler of f32 numbers sees it."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 - 2**-25 or self.min_p >= 2**-126)

    @property
    def records(self) -> bool:
        """Whether the kept set of each token is recorded."""
        return self.cuts or self.grammar is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What part of the vocabulary every turn of a collection draws from; see `SampleRequest`. By default all of it."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


WHOLE = Cut()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The tokens of one turn; `logprobs`, `raw_logprobs`, `kept` and `versions` (of the params) are per token.

    `logprobs` are under the distribution sampled from (at temperature 0: that of temperature 1), `raw_logprobs`
    under the whole vocabulary at temperature 1. `kept` is None unless the request cuts or has a grammar; then it
    holds, packed, the tokens that were left (`kept_bits`), from which a learner recomputes `logprobs`.

    `stop`: a stop id or string was sampled (it is the end of `ids`), `max_tokens` is reached, the slot's context
    is full, or the request could not be served and `message` says why.
    """

    slot: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: Stop
    raw_logprobs: tuple[float, ...] = ()
    kept: tuple[bytes, ...] | None = None
    message: str = ""


class Partial(NamedTuple):
    """What a turn has sampled so far: three tuples of one length."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


def pack_kept(bits: bytes) -> bytes:
    """Compressed: 6 KB of a vocabulary of 49152 become some 100 bytes where a few tokens are kept."""
    return zlib.compress(bits, 1)


def kept_bits(kept: bytes) -> bytes:
    """Token v was kept where bit v % 8 of byte v // 8 is set; as little-endian u32 words, what `kernels.kept` reads."""
    return zlib.decompress(kept)


def kept_ids(kept: bytes) -> tuple[int, ...]:
    """The kept tokens, in order."""
    return tuple(8 * n + bit for n, byte in enumerate(kept_bits(kept)) if byte for bit in range(8) if byte >> bit & 1)


class Sampler(Protocol):
    """Fixed slots that sample in any order; a slot's tokens depend on its own requests only.

    `submit` takes a request for a slot that is idle. `advance` does a bounded amount of work and returns
    the turns that finished. `busy` says whether any slot still has work.
    """

    @property
    def slots(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def submit(self, request: SampleRequest) -> None: ...
    def advance(self) -> list[Sample]: ...


class LiveSampler(Sampler, Protocol):
    """A sampler whose params change between dispatches and whose turns can be looked at and dropped while they run.

    `publish(params, version)` takes effect from the next dispatch on. `peek` gives what a slot's turn has sampled so
    far; `cancel` makes the slot idle at once, and no `Sample` comes of it.
    """

    @property
    def version(self) -> int: ...
    def publish(self, params: Any, version: int) -> None: ...
    def peek(self, slot: int) -> Partial: ...
    def cancel(self, slot: int) -> None: ...
