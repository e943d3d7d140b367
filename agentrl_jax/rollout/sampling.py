"""What the rollout side asks of a sampler, and what comes back. No JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Stop = Literal["stop", "length", "context", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One turn to sample in one slot.

    `fresh` starts a new context of `ids`; otherwise `ids` continue what the slot already holds, after the
    tokens sampled there. `share_with` names a slot whose fresh request of the same wave has the same `ids`:
    the prompt is then computed once and copied. `key` makes the randomness: requests with equal keys draw
    equal uniforms, so it must be unique per (seed, step, task, member, turn). `temperature` 0 is greedy.
    """

    slot: int
    key: tuple[int, ...]
    ids: tuple[int, ...]
    fresh: bool
    max_tokens: int
    temperature: float
    share_with: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The tokens of one turn; `logprobs` and `versions` (of the params that sampled) are per token.

    `stop`: a stop id was sampled (it is the last of `ids`), `max_tokens` is reached, the slot's context is full, or
    the sampler failed: then `error` says how, no token came, and the slot holds what it held before the turn.
    """

    slot: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: Stop
    error: str | None = None


class Partial(NamedTuple):
    """What a turn has sampled so far: three tuples of one length."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


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
