"""The sampler that rollouts talk to: slots on a device, filled by chunked prefill, advanced by decode dispatches.

Whatever the order and the moment in which turns are submitted, a slot's tokens and log-probabilities are the
same bits: its rows stand at fixed places in every product, a turn begins at a dispatch, and its randomness
comes from the request's key alone.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from agentrl_jax.models.llama import LlamaConfig
from agentrl_jax.rollout.sampling import Partial, Sample, SampleRequest, Stop
from agentrl_jax.sampler import decode as sampler


@dataclass
class _Slot:
    """The host's view of one slot. The cache holds `length` tokens; `pending` come next, the last is decoded from."""

    length: int = 0
    pending: deque[int] = field(default_factory=deque)
    request: SampleRequest | None = None
    source: int | None = None  # the slot whose prompt is to be copied
    key: tuple[int, int] = (0, 0)
    room: int = 0  # tokens the context still holds when the turn starts
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class Counters:
    """Work done so far, for rates: tokens sampled and prefilled, dispatches and seconds in them."""

    sampled: int = 0
    prefilled: int = 0
    copied: int = 0
    decode_dispatches: int = 0
    prefill_dispatches: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0

    def since(self, before: Counters) -> dict[str, float]:
        """What was added after `before` was taken."""
        return {name: round(value - getattr(before, name), 3) for name, value in vars(self).items()}


class Engine:
    """A `rollout.sampling.Sampler` over one model.

    `slots` rows decode together; a prefill dispatch appends up to `prefill_chunk` tokens to `bank` slots;
    a decode dispatch samples up to `decode_steps` tokens a slot. Call `publish` before the first `advance`.
    """

    def __init__(
        self, model_config: LlamaConfig, *, slots: int, context: int, bank: int, prefill_chunk: int,
        decode_steps: int, stop_ids: Sequence[int], seed: int, sharding: Any = None,
    ) -> None:  # fmt: skip
        if slots % bank:
            raise ValueError(f"Engine: bank={bank} must divide slots={slots}")
        self._slots_count, self._context, self._bank = slots, context, bank
        self._chunk, self._steps, self._stop_ids, self._seed = prefill_chunk, decode_steps, tuple(stop_ids), seed
        self._slots = [_Slot() for _ in range(slots)]
        self._finished: list[Sample] = []
        self._params: Any = None
        self._version = -1
        self.counters = Counters()
        self._sharding = sharding  # one placement for everything, or a first call would compile apart from the rest
        empty = jax.jit(partial(sampler.allocate, model_config, slots, context), out_shardings=sharding)()
        self._cache = (empty.keys, empty.values)
        self._prefill = jax.jit(partial(_prefill, model_config), donate_argnums=1)
        self._copy = jax.jit(_copy, donate_argnums=0)
        self._decode = jax.jit(
            partial(_decode, model_config, steps=decode_steps, stop_ids=self._stop_ids), donate_argnums=1
        )

    @property
    def slots(self) -> int:
        return self._slots_count

    @property
    def context(self) -> int:
        return self._context

    @property
    def busy(self) -> bool:
        return bool(self._finished) or any(slot.request is not None for slot in self._slots)

    @property
    def version(self) -> int:
        return self._version

    def publish(self, params: Any, version: int) -> None:
        """Sample from these params (the layout of `runtime.publish.publish`) from the next dispatch on.

        What slots already hold was computed with the params of its time; start fresh contexts to be on-policy.
        """
        self._params, self._version = params, version

    def submit(self, request: SampleRequest) -> None:
        """Start a turn in an idle slot. Raises `ValueError` for a slot that is busy, unknown or empty."""
        slot = self._check(request)
        previous = [] if request.fresh else list(slot.pending)
        if request.fresh:
            slot.length = 0
        slot.pending = deque((*previous, *request.ids))
        slot.request, slot.source = request, request.share_with
        slot.key = turn_key(self._seed, request.key)
        slot.ids, slot.logprobs, slot.versions = [], [], []
        slot.room = self._context - slot.length - len(slot.pending)
        if slot.room <= 0:
            self._finish(request.slot, "context")

    def advance(self) -> list[Sample]:
        """Prefill whatever waits, then one decode dispatch; the turns that finished, in slot order."""
        if self._params is None:
            raise ValueError("Engine.advance: no params yet; call publish(params, version) first")
        self._fill()
        running = [q for q, slot in enumerate(self._slots) if slot.request is not None]
        if running:
            self._sample(running)
        finished, self._finished = self._finished, []
        return sorted(finished, key=lambda sample: sample.slot)

    def peek(self, slot: int) -> Partial:
        """What a running turn has sampled so far; streaming reads it between two calls of `advance`."""
        state = self._slots[slot]
        return Partial(tuple(state.ids), tuple(state.logprobs), tuple(state.versions))

    def cancel(self, slot: int) -> None:
        """Drop the turn of a slot; it is idle at once and no `Sample` comes of it. Nothing happens to an idle one."""
        for other in self._slots:
            if other.source == slot:  # it was to copy the prompt that nobody computes now
                other.source = None
        self._slots[slot].request = self._slots[slot].source = None
        self._finished = [sample for sample in self._finished if sample.slot != slot]

    def cache_sizes(self) -> dict[str, int]:
        """How often each device function was compiled: 1 each, however long the run."""
        functions = {"prefill": self._prefill, "copy_prefix": self._copy, "decode": self._decode}
        return {name: _compiled(function) for name, function in functions.items()}

    def _check(self, request: SampleRequest) -> _Slot:
        if not 0 <= request.slot < self._slots_count:
            raise ValueError(f"SampleRequest.slot={request.slot}: expected 0..{self._slots_count - 1}")
        slot = self._slots[request.slot]
        if slot.request is not None:
            raise ValueError(f"SampleRequest.slot={request.slot}: still busy with an earlier turn")
        if request.max_tokens < 1:
            raise ValueError(f"SampleRequest.max_tokens={request.max_tokens}: expected at least 1")
        if not request.ids and (request.fresh or not slot.pending):
            raise ValueError(f"SampleRequest.ids is empty and slot {request.slot} holds nothing to continue")
        if request.share_with is not None and len(request.ids) < self._context:
            self._check_share(request, self._slots[request.share_with])
        return slot

    def _check_share(self, request: SampleRequest, source: _Slot) -> None:
        other = source.request
        same = other is not None and other.fresh and other.share_with is None and other.ids == request.ids
        if not (request.fresh and same and not source.ids):
            raise ValueError(
                f"SampleRequest.share_with={request.share_with}: expected a slot whose fresh request of this wave "
                f"has the same ids and shares with nobody (slot {request.slot})"
            )

    def _fill(self) -> None:
        """Prefill until one token is pending in every running slot, then copy shared prompts."""
        started = time.perf_counter()
        running = [(q, slot) for q, slot in enumerate(self._slots) if slot.request is not None]
        waiting = [q for q, slot in running if slot.source is None and len(slot.pending) > 1]
        while waiting:
            taken: dict[int, int] = {}
            for q in waiting:
                taken.setdefault(self._row(q), q)
            self._prefill_rows(taken)
            waiting = [q for q in waiting if len(self._slots[q].pending) > 1]
        sharing = [q for q, slot in running if slot.source is not None]
        if sharing:
            self._copy_prompts(sharing)
        jax.block_until_ready(self._cache)  # else its seconds would be booked on the decode that waits for it
        self.counters.prefill_s += time.perf_counter() - started

    def _row(self, q: int) -> int:
        """The fixed row of a prefill where slot q is computed; skewed, so that group leaders spread over rows."""
        return (q + q // self._bank) % self._bank

    def _prefill_rows(self, taken: dict[int, int]) -> None:
        rows = np.asarray([taken.get(r, r) for r in range(self._bank)], np.int32)  # row r of the first bank: slot r
        tokens = np.zeros((self._bank, self._chunk), np.int32)
        counts = np.zeros(self._bank, np.int32)
        lengths = self._lengths()
        for r, q in taken.items():
            slot = self._slots[q]
            count = min(self._chunk, len(slot.pending) - 1)
            tokens[r, :count] = [slot.pending.popleft() for _ in range(count)]
            counts[r] = count
            slot.length += count
        work = jax.device_put((lengths, rows, tokens, counts), self._sharding)
        self._cache = self._prefill(self._params, self._cache, *work)
        self.counters.prefilled += int(counts.sum())
        self.counters.prefill_dispatches += 1

    def _copy_prompts(self, sharing: list[int]) -> None:
        source, lengths = np.arange(self._slots_count, dtype=np.int32), self._lengths()
        for q in sharing:
            slot = self._slots[q]
            assert slot.source is not None
            leader, source[q] = self._slots[slot.source], slot.source
            slot.length, slot.pending, slot.source = leader.length, deque(leader.pending), None
            self.counters.copied += slot.length
        self._cache = self._copy(self._cache, *jax.device_put((lengths, source), self._sharding))

    def _sample(self, running: list[int]) -> None:
        started = time.perf_counter()
        control = jax.device_put(self._control(running), self._sharding)
        self._cache, *out = self._decode(self._params, self._cache, control)
        tokens, logprobs, emitted = jax.device_get(out)
        for q in running:
            count = int(emitted[:, q].sum())
            self._take(q, tokens[:count, q].tolist(), logprobs[:count, q].tolist())
            self.counters.sampled += count
        self.counters.decode_dispatches += 1
        self.counters.decode_s += time.perf_counter() - started

    def _lengths(self) -> np.ndarray:
        return np.asarray([slot.length for slot in self._slots], np.int32)

    def _control(self, running: list[int]) -> tuple[np.ndarray, ...]:
        n = self._slots_count
        last, drawn, remaining = (np.zeros(n, np.int32) for _ in range(3))
        active, temperature, key = np.zeros(n, np.bool_), np.ones(n, np.float32), np.zeros((n, 2), np.uint32)
        for q in running:
            slot = self._slots[q]
            assert slot.request is not None
            last[q], drawn[q], active[q], key[q] = slot.pending[0], len(slot.ids), True, slot.key
            remaining[q] = min(slot.request.max_tokens, slot.room) - len(slot.ids)
            temperature[q] = slot.request.temperature
        return self._lengths(), last, key, drawn, active, remaining, temperature

    def _take(self, q: int, tokens: list[int], logprobs: list[float]) -> None:
        """Book one dispatch: each token drawn put the one before it into the cache; the last one waits."""
        slot = self._slots[q]
        assert slot.request is not None
        slot.ids += tokens
        slot.logprobs += logprobs
        slot.versions += [self._version] * len(tokens)
        slot.length += len(tokens)
        slot.pending = deque(tokens[-1:])
        if tokens[-1] in self._stop_ids:
            self._finish(q, "stop")
        elif len(slot.ids) >= slot.request.max_tokens:
            self._finish(q, "length")
        elif len(slot.ids) >= slot.room:
            self._finish(q, "context")

    def _finish(self, q: int, stop: Stop) -> None:
        slot = self._slots[q]
        self._finished.append(
            Sample(slot=q, ids=tuple(slot.ids), logprobs=tuple(slot.logprobs), versions=tuple(slot.versions), stop=stop)
        )
        slot.request = slot.source = None


def turn_key(seed: int, key: tuple[int, ...]) -> tuple[int, int]:
    """Two 32-bit words that depend on every number of (seed, *key): the turn's random key."""
    digest = hashlib.blake2b(",".join(map(str, (seed, *key))).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _compiled(function: Any) -> int:
    return function._cache_size()


def _slots_of(cache: Any, lengths: jax.Array, control: Sequence[Any] = (None,) * 6) -> sampler.Slots:
    """Slots of the device's cache and the host's numbers; prefill and copy look at the lengths only."""
    keys, values = cache
    last, key, drawn, active, remaining, temperature = control
    return sampler.Slots(keys, values, lengths, last, key, drawn, active, remaining, temperature)


def _prefill(config: LlamaConfig, params: Any, cache: Any, lengths: Any, rows: Any, tokens: Any, counts: Any) -> Any:
    slots = sampler.prefill(config, params, _slots_of(cache, lengths), rows, tokens, counts)
    return slots.keys, slots.values


def _copy(cache: Any, lengths: jax.Array, source: jax.Array) -> Any:
    slots = sampler.copy_prefix(_slots_of(cache, lengths), source)
    return slots.keys, slots.values


def _decode(
    config: LlamaConfig, params: Any, cache: Any, control: Any, *, steps: int, stop_ids: tuple[int, ...]
) -> Any:
    start = _slots_of(cache, control[0], control[1:])
    slots, tokens, logprobs, emitted = sampler.decode(config, params, start, steps, stop_ids)
    return (slots.keys, slots.values), tokens, logprobs, emitted
