"""The sampler that rollouts talk to: slots over a pool of pages, filled by tiles, advanced by decode dispatches.

Whatever the order and the moment in which turns are submitted, a slot's tokens and log-probabilities are the same
bits: rows of a product do not mix, a turn begins at a dispatch, and its randomness comes from the request's key alone.
Batches of different size are used only if they give the same bits, which is tried out before the first dispatch.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from agentrl_jax.models.decoder import DecoderConfig
from agentrl_jax.rollout.sampling import Partial, Sample, SampleRequest, Stop, pack_kept
from agentrl_jax.runtime.grammars import Grammars, Matcher
from agentrl_jax.runtime.paging import PageBook, digests
from agentrl_jax.sampler import decode as sampler
from agentrl_jax.sampler import pages as paged
from agentrl_jax.sampler import placement
from agentrl_jax.sampler.pages import PAGE
from agentrl_jax.sampler.select import Cuts

ROWS = (8, 16, 24, 32)  # sizes of a decode batch; on a CPU 64 rows are no cheaper than twice 32
_COPIES = 8  # pages copied by one dispatch
_STOPS = 8  # a request's own stop ids that the device looks at; the host looks at all


@dataclass
class _Slot:
    """The host's view of one slot. Its pages hold `length` tokens; `pending` come next, the last is decoded from."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)
    request: SampleRequest | None = None
    source: int | None = None  # the slot whose prompt is to be shared
    failed: tuple[int, ...] | None = None  # the ids of a fresh request that was refused
    key: tuple[int, int] = (0, 0)
    room: int = 0  # tokens the context still holds when the turn starts
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    matcher: Matcher | None = None  # where its turn stands in the request's grammar
    allowed: Any = None  # u32[ceil(V / 32)] the tokens that the matcher lets come next

    @property
    def remaining(self) -> int:
        """Tokens the turn may still draw."""
        return 0 if self.request is None else min(self.request.max_tokens, self.room) - len(self.ids)


@dataclass
class Counters:
    """Work done so far, for rates: tokens sampled, prefilled, taken over (`copied`), dispatches and their seconds."""

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

    A prefill dispatch computes up to `bank` tiles of `prefill_chunk` tokens, of any slots. A decode dispatch samples
    up to `decode_steps` tokens for each of its rows; running slots are gathered into batches of one of the sizes
    `rows`, so a finished slot costs nothing. Slots share the pages of a common prompt, which are copied when written.
    A prompt's full pages are taken up again by later prompts that begin alike, never after a `publish` unless
    `keep_across_versions`. `pages` bounds the pool (None: enough for every slot to be full); a request that finds no
    page ends with an error, and its slot is empty. `text_of` gives the text of ids, which stop strings need, and
    `grammars` reads the grammars of requests. A turn with a grammar is decoded apart from those without, one token a
    dispatch, since the host names the tokens that may come next; its functions are compiled only with `grammars`.
    `sharding` is one placement for everything but weights and pages, which a `tensor` axis of its mesh splits
    (`sampler.placement`). Call `publish` before `advance`.
    """

    def __init__(
        self, model_config: DecoderConfig, *, slots: int, context: int, bank: int, prefill_chunk: int,
        decode_steps: int, stop_ids: Sequence[int], seed: int, sharding: Any = None,
        rows: Sequence[int] = ROWS, pages: int | None = None,
        text_of: Callable[[Sequence[int]], str] | None = None, keep_across_versions: bool = False,
        grammars: Grammars | None = None,
    ) -> None:  # fmt: skip
        self._config, self._slots_count, self._context = model_config, slots, context
        self._bank, self._chunk, self._steps, self._seed = bank, prefill_chunk, decode_steps, seed
        self._stop_ids, self._text_of, self._keep = frozenset(stop_ids), text_of, keep_across_versions
        self._slots = [_Slot() for _ in range(slots)]
        self._finished: list[Sample] = []
        self._params: Any = None
        self._version = -1
        self.counters = Counters()
        self._sharding = sharding  # one placement for everything, or a first call would compile apart from the rest
        self._width = -(-context // PAGE)
        count = slots * self._width + 1 if pages is None else pages + 1
        self._book = PageBook(count)
        self._copies: list[tuple[int, int]] = []  # (source, target) pages, to be done before anything is written
        pools = placement.pools(sharding)
        self._pools = jax.jit(partial(sampler.allocate, model_config, count), out_shardings=pools)()
        self._prefill = jax.jit(partial(sampler.prefill, model_config), donate_argnums=1, out_shardings=pools)
        # A partial of its own each: jit shares what it compiled, and its count, between wrappers of one function.
        self._copy = jax.jit(partial(paged.copy), donate_argnums=0, out_shardings=pools)
        self._grammars = grammars
        sizes = _sizes(rows, slots)
        if model_config.compute_dtype == "bfloat16" and jax.default_backend() == "cpu":
            sizes = sizes[-1:]  # sums in bf16 differ with the size there: `_warm_up` would compile all to keep one

        def by_size(steps: int) -> dict[int, Any]:
            fixed = partial(sampler.decode, model_config, steps=steps, stop_ids=tuple(sorted(self._stop_ids)))
            places = (pools, sharding)
            return {size: jax.jit(partial(fixed), donate_argnums=1, out_shardings=places) for size in sizes}

        self._decode = by_size(decode_steps)
        self._held = {} if grammars is None else by_size(1)  # for turns with a grammar
        self._warm = len(self._decode) == 1

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

    @property
    def params(self) -> Any:
        """What was published last."""
        return self._params

    @property
    def free_pages(self) -> int:
        """Pages that neither a slot nor a remembered prompt holds."""
        return self._book.free

    def publish(self, params: Any, version: int) -> None:
        """Sample from these params (the layout of `runtime.publish.publish`) from the next dispatch on.

        Running turns keep their tokens and go on with the new params, named token by token in `Sample.versions`.
        What slots already hold was computed with the params of its time; start fresh contexts to be on-policy.
        """
        self._params, self._version = params, version
        if not self._keep:
            self._book.forget()

    def submit(self, request: SampleRequest) -> None:
        """Start a turn in an idle slot. Raises `ValueError` for a slot that is busy, unknown or empty.

        A request that cannot be served ends alone, as a `Sample` whose `message` says why.
        """
        slot = self._check(request)
        slot.ids, slot.logprobs, slot.raw_logprobs, slot.versions, slot.kept = [], [], [], [], []
        slot.failed = slot.matcher = None
        if refusal := self._refusal(request):
            slot.failed = request.ids if request.fresh else None
            return self._finish(request.slot, "error", refusal)
        if request.fresh:
            self._release(slot)
        if request.fork_from is not None:
            self._share(slot, self._slots[request.fork_from])
        slot.pending.extend(request.ids)
        slot.request, slot.key = request, turn_key(self._seed, request.key)
        if request.grammar is not None and self._grammars is not None:
            slot.matcher = self._grammars.start(request.grammar)
        led = request.share_with is not None and self._slots[request.share_with].request is not None
        slot.source = request.share_with if led else None
        slot.room = self._context - slot.length - len(slot.pending)
        if slot.room <= 0:
            held = slot.length + len(slot.pending)
            self._finish(request.slot, "context", f"{held} tokens leave no room to sample in context={self._context}")

    def peek(self, slot: int) -> Partial:
        """What a running turn has sampled so far; streaming reads it between two calls of `advance`."""
        state = self._slots[slot]
        return Partial(tuple(state.ids), tuple(state.logprobs), tuple(state.versions))

    def cancel(self, slot: int) -> None:
        """Drop the turn of a slot; it is idle at once and no `Sample` comes of it. Nothing happens to an idle one."""
        self._stand_down(slot)
        self._finished = [sample for sample in self._finished if sample.slot != slot]

    def release(self, slot: int) -> None:
        """Give back the pages of an idle slot, which then holds nothing; a fresh request does so by itself."""
        if self._slots[slot].request is not None:
            raise ValueError(f"Engine.release: slot={slot} is still busy")
        self._release(self._slots[slot])

    def advance(self) -> list[Sample]:
        """Prefill whatever waits, then one decode dispatch a batch; the turns that finished, in slot order."""
        if self._params is None:
            raise ValueError("Engine.advance: no params yet; call publish(params, version) first")
        if not self._warm:
            self._warm_up()
        self._fill()
        running = [q for q in range(self._slots_count) if self._slots[q].request is not None and self._reserve(q)]
        running.sort(key=lambda q: self._slots[q].length)  # rows of like length walk their pages together
        self._copy_pages()
        held = [q for q in running if self._slots[q].matcher is not None]
        free = [q for q in running if self._slots[q].matcher is None]
        for queue, functions in ((free, self._decode), (self._followed(held), self._held)):
            for start in range(0, len(queue), largest := max(functions, default=1)):
                self._sample(queue[start : start + largest], functions, only=len(queue) <= largest)
        finished, self._finished = self._finished, []
        return sorted(finished, key=lambda sample: sample.slot)

    def cache_sizes(self) -> dict[str, int]:
        """How often each device function was compiled: 1 each, however long the run."""
        functions = {"prefill": self._prefill, "copy_pages": self._copy}
        functions |= {f"decode_{size}": function for size, function in self._decode.items()}
        functions |= {f"decode_held_{size}": function for size, function in self._held.items()}
        return {name: _compiled(function) for name, function in functions.items()}

    def _check(self, request: SampleRequest) -> _Slot:
        if not 0 <= request.slot < self._slots_count:
            raise ValueError(f"SampleRequest.slot={request.slot}: expected 0..{self._slots_count - 1}")
        slot = self._slots[request.slot]
        if slot.request is not None:
            raise ValueError(f"SampleRequest.slot={request.slot}: still busy with an earlier turn")
        if request.max_tokens < 1:
            raise ValueError(f"SampleRequest.max_tokens={request.max_tokens}: expected at least 1")
        if request.fork_from is not None:
            self._check_fork(request)
        elif not request.ids and (request.fresh or not slot.pending):
            raise ValueError(f"SampleRequest.ids is empty and slot {request.slot} holds nothing to continue")
        if request.share_with is not None and len(request.ids) < self._context:
            self._check_share(request, self._slots[request.share_with])
        return slot

    def _check_fork(self, request: SampleRequest) -> None:
        name = f"SampleRequest.fork_from={request.fork_from}"
        assert request.fork_from is not None
        if not request.fresh or request.share_with is not None:
            raise ValueError(f"{name}: a fork is a fresh context that shares with nobody else")
        other = self._slots[request.fork_from] if 0 <= request.fork_from < self._slots_count else None
        if other is None or request.fork_from == request.slot or other.request is not None or not other.pending:
            raise ValueError(f"{name}: expected another slot that is idle and holds tokens (slot {request.slot})")

    def _check_share(self, request: SampleRequest, source: _Slot) -> None:
        other = source.request
        same = other is not None and other.fresh and other.ids == request.ids and not other.shares
        if not (request.fresh and ((same and not source.ids) or source.failed == request.ids)):
            raise ValueError(
                f"SampleRequest.share_with={request.share_with}: expected a slot whose fresh request of this wave "
                f"has the same ids and shares with nobody (slot {request.slot})"
            )

    def _refusal(self, request: SampleRequest) -> str | None:
        """Why this request cannot be served, in one line."""
        vocab = self._config.vocab_size
        if not (math.isfinite(request.temperature) and request.temperature >= 0):
            return f"temperature={request.temperature}: expected 0 (greedy) or more"
        if request.top_k < 0:
            return f"top_k={request.top_k}: expected 0 (off) or more"
        if not 0 < request.top_p <= 1:
            return f"top_p={request.top_p}: expected above 0, at most 1 (off)"
        if not 0 <= request.min_p <= 1:
            return f"min_p={request.min_p}: expected from 0 (off) to 1"
        if request.ids and (min(request.ids) < 0 or max(request.ids) >= vocab):
            return f"ids hold a token outside 0..{vocab - 1}: were they made by this model's tokenizer?"
        if request.stop_strings and (self._text_of is None or "" in request.stop_strings):
            return "stop_strings need strings that are not empty, and an engine that was given text_of"
        if request.grammar is not None:
            return self._grammar_refusal(request.grammar)
        return None

    def _grammar_refusal(self, grammar: str) -> str | None:
        if self._grammars is None:
            return "grammar needs an engine that was given grammars"
        try:
            self._grammars.start(grammar)
        except ValueError as error:
            return str(error)
        return None

    def _release(self, slot: _Slot) -> None:
        for page in slot.pages:
            self._book.drop(page)
        slot.pages, slot.length, slot.pending = [], 0, deque()

    def _share(self, slot: _Slot, other: _Slot) -> None:
        """The slot, which is empty, takes up all that another one holds; a page is copied when one writes to it."""
        slot.pages = [self._book.hold(page) for page in other.pages[: -(-other.length // PAGE)]]
        slot.length, slot.pending, slot.source = other.length, deque(other.pending), None
        self.counters.copied += slot.length

    def _reserve(self, q: int, tokens: int | None = None) -> bool:
        """Pages of its own for the next tokens of slot q; where none is left its turn ends, and alone."""
        slot = self._slots[q]
        end = slot.length + (min(self._steps, slot.remaining) if tokens is None else tokens)
        first = slot.length // PAGE
        if first < len(slot.pages) and self._book.shared(slot.pages[first]):
            page = self._book.take()
            if page is None:
                return self._no_page(q)
            self._copies.append((slot.pages[first], page))
            self._book.drop(slot.pages[first])
            slot.pages[first] = page
        while len(slot.pages) * PAGE < end:
            page = self._book.take()
            if page is None:
                return self._no_page(q)
            slot.pages.append(page)
        return True

    def _no_page(self, q: int) -> bool:
        pages = self._slots[q].pages
        self._copies = [copy for copy in self._copies if copy[1] not in pages]
        self._release(self._slots[q])
        self._finish(q, "error", "no page of the cache is free: raise pages, or run fewer slots")
        return False

    def _fill(self) -> None:
        """Prefill until one token is pending in every running slot, then share prompts."""
        started = time.perf_counter()
        waiting = [slot for slot in self._slots if slot.request is not None and slot.source is None]
        new = [slot for slot in waiting if slot.request and slot.request.fresh and not slot.pages and not slot.ids]
        for slot in new:
            self._recall(slot)
        while any(_waits(slot) for slot in self._slots):
            if tiles := self._tiles():  # none where those that waited found no page
                self._prefill_tiles(tiles)
        for slot in new:
            if slot.request is not None and slot.request.fork_from is None:
                self._book.remember(digests(slot.request.ids[: slot.length]), slot.pages)
        for slot in self._slots:
            if slot.request is not None and slot.source is not None:
                self._share(slot, self._slots[slot.source])
        jax.block_until_ready(self._pools)  # else its seconds would be booked on the decode that waits for it
        self.counters.prefill_s += time.perf_counter() - started

    def _recall(self, slot: _Slot) -> None:
        slot.pages = self._book.recall(digests(list(slot.pending)[:-1]))
        slot.length = len(slot.pages) * PAGE
        self.counters.copied += slot.length
        for _ in range(slot.length):
            slot.pending.popleft()

    def _tiles(self) -> list[tuple[list[int], int, list[int]]]:
        """Up to `bank` tiles of what waits: (pages, start, tokens) each."""
        tiles: list[tuple[list[int], int, list[int]]] = []
        for q, slot in enumerate(self._slots):
            while _waits(slot):
                if len(tiles) == self._bank:
                    return tiles
                if not self._reserve(q, len(slot.pending) - 1):  # all of them now: no tile may lose its pages
                    break
                count = min(self._chunk, len(slot.pending) - 1)
                tiles.append((slot.pages, slot.length, [slot.pending.popleft() for _ in range(count)]))
                slot.length += count
        return tiles

    def _prefill_tiles(self, tiles: list[tuple[list[int], int, list[int]]]) -> None:
        self._copy_pages()
        table = self._table([pages for pages, _, _ in tiles], self._bank)
        tokens = np.zeros((self._bank, self._chunk), np.int32)
        starts, counts = np.zeros(self._bank, np.int32), np.zeros(self._bank, np.int32)
        for r, (_, start, ids) in enumerate(tiles):
            starts[r], counts[r], tokens[r, : len(ids)] = start, len(ids), ids
        work = jax.device_put((table, starts, tokens, counts), self._sharding)
        self._pools = self._prefill(self._params, self._pools, *work)
        self.counters.prefilled += int(counts.sum())
        self.counters.prefill_dispatches += 1

    def _table(self, rows: list[list[int]], size: int) -> np.ndarray:
        table = np.zeros((size, self._width), np.int32)
        for r, pages in enumerate(rows):
            table[r, : len(pages)] = pages
        return table

    def _copy_pages(self) -> None:
        while self._copies:
            now, self._copies = self._copies[:_COPIES], self._copies[_COPIES:]
            pairs = np.zeros((2, _COPIES), np.int32)
            pairs[:, : len(now)] = np.asarray(now, np.int32).T
            self._pools = self._copy(self._pools, *jax.device_put((pairs[0], pairs[1]), self._sharding))

    def _followed(self, held: list[int]) -> list[int]:
        """Those whose grammar lets some token come next; the turns of the others end, each with an error."""
        for q in held:
            slot = self._slots[q]
            assert slot.matcher is not None
            slot.allowed = slot.matcher.allowed()
            if not slot.allowed.any():
                self._finish(q, "error", "the grammar leaves no token to go on with")
        return [q for q in held if self._slots[q].request is not None]

    def _sample(self, running: list[int], functions: dict[int, Any], *, only: bool) -> None:
        started = time.perf_counter()
        size = min(size for size in functions if size >= len(running))
        smaller = [other for other in functions if other < size]
        floor = np.int32(max(smaller, default=0) if only and functions is self._decode else 0)
        drawn = self._dispatch(functions, size, self._rows(running, size), floor, running)
        requests = [self._slots[q].request for q in running]
        records = any(request is not None and request.records for request in requests)
        drawn = jax.device_get(drawn if records else drawn._replace(kept=()))
        for r, q in enumerate(running):
            self._take(q, r, drawn)
        self.counters.decode_dispatches += 1
        self.counters.decode_s += time.perf_counter() - started

    def _dispatch(
        self, functions: dict[int, Any], size: int, rows: sampler.Rows, floor: np.int32, running: list[int]
    ) -> sampler.Drawn:
        allowed = {}
        if functions is self._held:
            masks = np.full((size, -(-self._config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
            for r, q in enumerate(running):
                masks[r] = self._slots[q].allowed
            allowed["allowed"] = masks
        rows, floor, allowed = jax.device_put((rows, floor, allowed), self._sharding)
        self._pools, drawn = functions[size](self._params, self._pools, rows, floor, **allowed)
        return drawn

    def _rows(self, running: list[int], size: int) -> sampler.Rows:
        lengths, last, drawn, remaining, top_k = (np.zeros(size, np.int32) for _ in range(5))
        temperature, top_p = np.ones(size, np.float32), np.ones(size, np.float32)
        min_p, active, key = np.zeros(size, np.float32), np.zeros(size, np.bool_), np.zeros((size, 2), np.uint32)
        stops = np.full((size, _STOPS), -1, np.int32)
        for r, q in enumerate(running):
            slot, request = self._slots[q], self._slots[q].request
            assert request is not None
            lengths[r], last[r], drawn[r], remaining[r] = slot.length, slot.pending[0], len(slot.ids), slot.remaining
            active[r], key[r] = True, slot.key
            temperature[r], top_k[r], top_p[r], min_p[r] = (
                request.temperature, min(request.top_k, self._config.vocab_size), request.top_p,
                request.min_p if request.min_p >= 2**-126 else 0.0,
            )  # fmt: skip
            own = request.stop_ids[:_STOPS]
            stops[r, : len(own)] = own
        table = self._table([self._slots[q].pages for q in running], size)
        cuts = Cuts(temperature, top_k, top_p, min_p)  # pyright: ignore[reportArgumentType]
        return sampler.Rows(table, lengths, last, key, drawn, active, remaining, stops, cuts)  # pyright: ignore

    def _take(self, q: int, r: int, drawn: Any) -> None:
        """Book one dispatch: each token drawn put the one before it into the cache; the last one waits.

        What was drawn past a stop is dropped; its places in the pages are written again before anyone reads them.
        """
        slot, request = self._slots[q], self._slots[q].request
        assert request is not None
        tokens = drawn.tokens[: int(drawn.emitted[:, r].sum()), r].tolist()
        if not tokens:
            return
        count, stopped = self._stop_at(slot, request, tokens)
        slot.ids += tokens[:count]
        slot.logprobs += drawn.logprobs[:count, r].tolist()
        slot.raw_logprobs += drawn.raw_logprobs[:count, r].tolist()
        slot.versions += [self._version] * count
        if slot.matcher is not None:
            slot.matcher.accept(tokens[0])
        if request.records:
            slot.kept += [pack_kept(drawn.kept[n, r].astype("<u4").tobytes()) for n in range(count)]
        slot.length += count
        slot.pending = deque(tokens[count - 1 : count])
        self.counters.sampled += count
        if stopped:
            self._finish(q, "stop")
        elif len(slot.ids) >= request.max_tokens:
            self._finish(q, "length")
        elif len(slot.ids) >= slot.room:
            self._finish(q, "context")

    def _stop_at(self, slot: _Slot, request: SampleRequest, tokens: list[int]) -> tuple[int, bool]:
        """How many of the new tokens belong to the turn, and whether it ends there."""
        ends = self._stop_ids.union(request.stop_ids)
        count = next((n + 1 for n, token in enumerate(tokens) if token in ends), None)
        found = count is not None
        tokens = tokens[:count]
        if request.stop_strings and self._said(request, [*slot.ids, *tokens]):
            return next(n for n in range(1, len(tokens) + 1) if self._said(request, [*slot.ids, *tokens[:n]])), True
        return len(tokens), found

    def _said(self, request: SampleRequest, ids: list[int]) -> bool:
        assert self._text_of is not None
        text = self._text_of(ids)
        return any(string in text for string in request.stop_strings)

    def _finish(self, q: int, stop: Stop, message: str = "") -> None:
        slot, request = self._slots[q], self._slots[q].request
        kept = tuple(slot.kept) if request is not None and request.records else None
        self._finished.append(
            Sample(
                slot=q, ids=tuple(slot.ids), logprobs=tuple(slot.logprobs), versions=tuple(slot.versions), stop=stop,
                raw_logprobs=tuple(slot.raw_logprobs), kept=kept, message=message,
            )
        )  # fmt: skip
        self._stand_down(q)

    def _stand_down(self, q: int) -> None:
        self._slots[q].request = self._slots[q].source = None
        for other in self._slots:
            if other.source == q:  # its leader left before the prompt was computed
                other.source = None

    def _warm_up(self) -> None:
        """Compile every batch size, and keep those that give the same bits as the largest.

        A matrix library may choose the order of a sum by the number of rows; then a slot's last bit would depend
        on how many others run, and the smaller batch is not used.
        """
        self._warm = True
        self._decode, self._held = (self._agreeing(functions) for functions in (self._decode, self._held))
        nothing = np.zeros(_COPIES, np.int32)
        self._pools = self._copy(self._pools, *jax.device_put((nothing, nothing), self._sharding))

    def _agreeing(self, functions: dict[int, Any]) -> dict[int, Any]:
        results = {size: self._probe(functions, size) for size in functions}
        return {size: functions[size] for size in functions if results[size] == results[max(results)]}

    def _probe(self, functions: dict[int, Any], size: int) -> bytes:
        """The log-probabilities of a few rows decoded in a batch of this size, on pages that nobody has written yet."""
        rows, count = self._rows([], size), min(8, *functions, self._book.free)
        for r in range(count):
            rows.table[r, 0], rows.last[r], rows.active[r] = 1 + r, (7 * r + 1) % self._config.vocab_size, True
            rows.remaining[r], rows.key[r] = PAGE, (r, 1)
        drawn = self._dispatch(functions, size, rows, np.int32(0), [])
        return np.asarray(jax.device_get(drawn.logprobs))[:, :count].tobytes()


def turn_key(seed: int, key: tuple[int, ...]) -> tuple[int, int]:
    """Two 32-bit words that depend on every number of (seed, *key): the turn's random key."""
    digest = hashlib.blake2b(",".join(map(str, (seed, *key))).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _sizes(rows: Sequence[int], slots: int) -> list[int]:
    """The batch sizes worth having for so many slots: the smallest that holds all of them is the last."""
    if not rows or min(rows) < 1:
        raise ValueError(f"Engine: rows={tuple(rows)}: expected batch sizes of at least 1")
    sizes = sorted(set(rows))
    return sizes[: next((n + 1 for n, size in enumerate(sizes) if size >= slots), len(sizes))]


def _waits(slot: _Slot) -> bool:
    """Whether tokens of its turn are still to be prefilled."""
    return slot.request is not None and slot.source is None and len(slot.pending) > 1


def _compiled(function: Any) -> int:
    return function._cache_size()
