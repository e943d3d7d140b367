"""The sampler that rollouts talk to: slots over a pool of pages, filled by tiles, advanced by decode dispatches.

Whatever the order and the moment in which turns are submitted, a slot's tokens and log-probabilities are the same
bits: rows of a product do not mix, a turn begins at a dispatch, and its randomness comes from the request's key alone.
Batches of different size are used only if they give the same bits, which is tried out before the first dispatch.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from agentrl_jax.models.decoder import DecoderConfig
from agentrl_jax.rollout.sampling import Partial, Sample, SampleRequest, Stop, pack_kept
from agentrl_jax.runtime.fleet import COLUMNS, SPLIT, WHOLE, Fleet
from agentrl_jax.runtime.grammars import Grammars
from agentrl_jax.runtime.paging import PageBook, digests
from agentrl_jax.runtime.slots import Slot, refusal
from agentrl_jax.sampler import decode as sampler
from agentrl_jax.sampler import pages as paged
from agentrl_jax.sampler.pages import PAGE
from agentrl_jax.sampler.select import Cuts

ROWS = (8, 16, 24, 32)  # sizes of a decode batch; on a CPU 64 rows are no cheaper than twice 32
T = TypeVar("T")
Places = list[tuple[int, T]]  # (row, what is there)
Tile = tuple[list[int], int, list[int]]  # (pages, start, tokens)
_COPIES = 8  # pages copied by one dispatch
_STOPS = 8  # a request's own stop ids that the device looks at; the host looks at all


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

    `sharding` is the placement of what is whole. With that of `fleet.spread` over n devices each of them has Q / n of
    the slots, in order, with `pages`, `bank` and `rows` of its own, and a dispatch is one for all of them. Which device
    a slot is on changes none of its bits. Slots of one device share a prompt; a group over several is prefilled once
    on each. A `tensor` axis of its mesh splits weights and pages (`sampler.placement`), over as many devices in the
    place of each. Call `publish` before `advance`.
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
        # One placement for everything, or a first call would compile apart from the rest.
        self._fleet = Fleet(sharding)
        n = self._fleet.count
        if slots % n:
            raise ValueError(f"Engine: slots={slots}: expected a multiple of the {n} devices")
        self._width = -(-context // PAGE)
        count = (slots // n * self._width if pages is None else pages) + 1
        books = [PageBook(count) for _ in range(n)]
        self._books, self._per = books, slots // n
        self._slots = [Slot(q // self._per, books[q // self._per]) for q in range(slots)]
        self._finished: list[Sample] = []
        self._params: Any = None
        self._version = -1
        self.counters = Counters()
        # By device: (source, target) pages, to be done before anything is written.
        self._copies: list[list[tuple[int, int]]] = [[] for _ in books]
        self._grammars = grammars
        self._compile(n * count, _sizes(rows, slots))

    def _compile(self, pages: int, sizes: list[int]) -> None:
        """The device functions, and pools of so many pages over all devices."""
        config, fleet = self._config, self._fleet
        self._pools = jax.jit(partial(sampler.allocate, config, pages), out_shardings=fleet.pools)()
        self._prefill = fleet.jit(partial(sampler.prefill, config), (WHOLE, *[SPLIT] * 5), SPLIT, fleet.pools, 1)
        self._copy = fleet.jit(paged.copy, (SPLIT, SPLIT, SPLIT), SPLIT, fleet.pools, 0)
        stop_ids = tuple(sorted(self._stop_ids))

        def by_size(steps: int, arguments: int) -> dict[int, Any]:
            def decode(params: Any, pools: Any, rows: Any, floor: jax.Array, *allowed: jax.Array) -> Any:
                return sampler.decode(config, params, pools, rows, floor[0], steps, stop_ids, *allowed)

            specs, places = (WHOLE, *[SPLIT] * arguments), (fleet.pools, fleet.columns)
            return {size: fleet.jit(decode, specs, (SPLIT, COLUMNS), places, 1) for size in sizes}

        self._decode = by_size(self._steps, 3)
        self._held = {} if self._grammars is None else by_size(1, 4)  # for turns with a grammar
        self._warm = len(sizes) == 1

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
    def sharding(self) -> Any:
        """Where its devices are: what `publish` is to be given."""
        return self._fleet.whole

    @property
    def params(self) -> Any:
        """What was published last."""
        return self._params

    @property
    def free_pages(self) -> int:
        """Pages that neither a slot nor a remembered prompt holds."""
        return sum(book.free for book in self._books)

    @property
    def near(self) -> int:
        """Slots in a row that are on one device, from slot 0 on; see `rollout.places`."""
        return self._per

    def shares(self, a: int, b: int) -> bool:
        """Whether two slots can share what is computed: they are on one device."""
        return a // self._per == b // self._per

    def publish(self, params: Any, version: int) -> None:
        """Sample from these params (those of `runtime.publish.publish`) from the next dispatch on.

        Running turns keep their tokens and go on with the new params, named token by token in `Sample.versions`.
        What slots already hold was computed with the params of its time; start fresh contexts to be on-policy.
        """
        self._params, self._version = self._fleet.adopt(self._config, params), version
        if not self._keep:
            for book in self._books:
                book.forget()

    def submit(self, request: SampleRequest) -> None:
        """Start a turn in an idle slot. Raises `ValueError` for a slot that is busy, unknown or empty.

        A request that cannot be served ends alone, as a `Sample` whose `message` says why.
        """
        slot = self._check(request)
        slot.ids, slot.logprobs, slot.raw_logprobs, slot.versions, slot.kept = [], [], [], [], []
        slot.failed = slot.matcher = None
        vocab, reads = self._config.vocab_size, self._text_of is not None
        if reason := refusal(request, vocab=vocab, reads_text=reads, grammars=self._grammars):
            slot.failed = request.ids if request.fresh else None
            return self._finish(request.slot, "error", reason)
        if request.fresh:
            self._release(slot)
        if request.fork_from is not None:
            self._share(slot, self._slots[request.fork_from])
        slot.pending.extend(request.ids)
        slot.request, slot.key = request, turn_key(self._seed, request.key)
        if request.grammar is not None and self._grammars is not None:
            slot.matcher = self._grammars.start(request.grammar)
        slot.source = None if request.share_with is None else self._leader(request, request.share_with)
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
            queues = [[q for q in queue if self._slots[q].device == n] for n in range(len(self._books))]
            longest = max(map(len, queues))
            for start in range(0, longest, largest := max(functions, default=1)):
                now = [queue[start : start + largest] for queue in queues]
                self._sample(now, functions, only=longest <= largest)
        finished, self._finished = self._finished, []
        return sorted(finished, key=lambda sample: sample.slot)

    def cache_sizes(self) -> dict[str, int]:
        """How often each device function was compiled: 1 each, however long the run."""
        functions = {"prefill": self._prefill, "copy_pages": self._copy}
        functions |= {f"decode_{size}": function for size, function in self._decode.items()}
        functions |= {f"decode_held_{size}": function for size, function in self._held.items()}
        return {name: _compiled(function) for name, function in functions.items()}

    def _check(self, request: SampleRequest) -> Slot:
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
        if not self.shares(request.slot, request.fork_from):
            raise ValueError(f"{name}: on another device than slot {request.slot}; ask shares(a, b)")

    def _check_share(self, request: SampleRequest, source: Slot) -> None:
        other = source.request
        same = other is not None and other.fresh and other.ids == request.ids and not other.shares
        if not (request.fresh and ((same and not source.ids) or source.failed == request.ids)):
            raise ValueError(
                f"SampleRequest.share_with={request.share_with}: expected a slot whose fresh request of this wave "
                f"has the same ids and shares with nobody (slot {request.slot})"
            )

    def _leader(self, request: SampleRequest, named: int) -> int | None:
        """The slot whose prompt this one takes up: `named`, or one like it on this slot's device; None: its own."""
        if self.shares(request.slot, named):
            return named if self._slots[named].request is not None else None
        first = request.slot - request.slot % self._per
        others = (q for q in range(first, first + self._per) if q != request.slot)
        return next((q for q in others if self._leads(self._slots[q], request, named)), None)

    def _leads(self, slot: Slot, request: SampleRequest, named: int) -> bool:
        other = slot.request
        return (
            other is not None and other.share_with == named and other.ids == request.ids
            and slot.source is None and not slot.ids
        )  # fmt: skip

    def _release(self, slot: Slot) -> None:
        for page in slot.pages:
            slot.book.drop(page)
        slot.pages, slot.length, slot.pending = [], 0, deque()

    def _share(self, slot: Slot, other: Slot) -> None:
        """The slot, which is empty, takes up all that another one holds; a page is copied when one writes to it."""
        slot.pages = [slot.book.hold(page) for page in other.pages[: -(-other.length // PAGE)]]
        slot.length, slot.pending, slot.source = other.length, deque(other.pending), None
        self.counters.copied += slot.length

    def _reserve(self, q: int, tokens: int | None = None) -> bool:
        """Pages of its own for the next tokens of slot q; where none is left its turn ends, and alone."""
        slot = self._slots[q]
        end = slot.length + (min(self._steps, slot.remaining) if tokens is None else tokens)
        first = slot.length // PAGE
        if first < len(slot.pages) and slot.book.shared(slot.pages[first]):
            page = slot.book.take()
            if page is None:
                return self._no_page(q)
            self._copies[slot.device].append((slot.pages[first], page))
            slot.book.drop(slot.pages[first])
            slot.pages[first] = page
        while len(slot.pages) * PAGE < end:
            page = slot.book.take()
            if page is None:
                return self._no_page(q)
            slot.pages.append(page)
        return True

    def _no_page(self, q: int) -> bool:
        slot = self._slots[q]
        self._copies[slot.device] = [copy for copy in self._copies[slot.device] if copy[1] not in slot.pages]
        self._release(slot)
        self._finish(q, "error", "no page of the cache is free: raise pages, or run fewer slots")
        return False

    def _fill(self) -> None:
        """Prefill until one token is pending in every running slot, then share prompts."""
        started = time.perf_counter()
        waiting = [slot for slot in self._slots if slot.request is not None and slot.source is None]
        new = [slot for slot in waiting if slot.request and slot.request.fresh and not slot.pages and not slot.ids]
        for slot in new:
            self._recall(slot)
        while any(slot.waits for slot in self._slots):
            if any(tiles := self._tiles()):  # none where those that waited found no page
                self._prefill_tiles(tiles)
        for slot in new:
            if slot.request is not None and slot.request.fork_from is None:
                slot.book.remember(digests(slot.request.ids[: slot.length]), slot.pages)
        for slot in self._slots:
            if slot.request is not None and slot.source is not None:
                self._share(slot, self._slots[slot.source])
        jax.block_until_ready(self._pools)  # else its seconds would be booked on the decode that waits for it
        self.counters.prefill_s += time.perf_counter() - started

    def _recall(self, slot: Slot) -> None:
        slot.pages = slot.book.recall(digests(list(slot.pending)[:-1]))
        slot.length = len(slot.pages) * PAGE
        self.counters.copied += slot.length
        for _ in range(slot.length):
            slot.pending.popleft()

    def _tiles(self) -> list[list[Tile]]:
        """Up to `bank` tiles of what waits on each device."""
        tiles: list[list[Tile]] = [[] for _ in self._books]
        for q, slot in enumerate(self._slots):
            mine = tiles[slot.device]
            while slot.waits and len(mine) < self._bank:
                if not self._reserve(q, len(slot.pending) - 1):  # all of them now: no tile may lose its pages
                    break
                count = min(self._chunk, len(slot.pending) - 1)
                mine.append((slot.pages, slot.length, [slot.pending.popleft() for _ in range(count)]))
                slot.length += count
        return tiles

    def _prefill_tiles(self, tiles: list[list[Tile]]) -> None:
        self._copy_pages()
        places = _places(tiles, self._bank)
        total = len(tiles) * self._bank
        table = self._table([(r, pages) for r, (pages, _, _) in places], total)
        tokens = np.zeros((total, self._chunk), np.int32)
        starts, counts = np.zeros(total, np.int32), np.zeros(total, np.int32)
        for r, (_, start, ids) in places:
            starts[r], counts[r], tokens[r, : len(ids)] = start, len(ids), ids
        work = self._fleet.put((table, starts, tokens, counts))
        self._pools = self._prefill(self._params, self._pools, *work)
        self.counters.prefilled += int(counts.sum())
        self.counters.prefill_dispatches += 1

    def _table(self, rows: Iterable[tuple[int, list[int]]], total: int) -> np.ndarray:
        table = np.zeros((total, self._width), np.int32)
        for r, pages in rows:
            table[r, : len(pages)] = pages
        return table

    def _copy_pages(self) -> None:
        while any(self._copies):
            pairs = np.zeros((2, len(self._copies), _COPIES), np.int32)
            for n, copies in enumerate(self._copies):
                now, self._copies[n] = copies[:_COPIES], copies[_COPIES:]
                pairs[:, n, : len(now)] = np.asarray(now, np.int32).reshape(-1, 2).T
            self._dispatch_copies(pairs)

    def _dispatch_copies(self, pairs: np.ndarray) -> None:
        self._pools = self._copy(self._pools, *self._fleet.put((pairs[0].reshape(-1), pairs[1].reshape(-1))))

    def _followed(self, held: list[int]) -> list[int]:
        """Those whose grammar lets some token come next; the turns of the others end, each with an error."""
        for q in held:
            slot = self._slots[q]
            assert slot.matcher is not None
            slot.allowed = slot.matcher.allowed()
            if not slot.allowed.any():
                self._finish(q, "error", "the grammar leaves no token to go on with")
        return [q for q in held if self._slots[q].request is not None]

    def _sample(self, running: list[list[int]], functions: dict[int, Any], *, only: bool) -> None:
        """One dispatch: on each device a batch of its `running` slots, all of one size."""
        started = time.perf_counter()
        size = min(size for size in functions if size >= max(map(len, running)))
        places = _places(running, size)
        rows = self._rows(places, len(running) * size)
        floor = np.asarray([self._floor(len(queue), functions) if only else 0 for queue in running], np.int32)
        drawn = self._dispatch(functions, size, rows, floor, places)
        requests = [self._slots[q].request for _, q in places]
        records = any(request is not None and request.records for request in requests)
        drawn = jax.device_get(drawn if records else drawn._replace(kept=()))
        for r, q in places:
            self._take(q, r, drawn)
        self.counters.decode_dispatches += 1
        self.counters.decode_s += time.perf_counter() - started

    def _floor(self, running: int, functions: dict[int, Any]) -> int:
        """With so few running rows left a device stops early: they fit a smaller batch."""
        return max((size for size in functions if size < running), default=0) if functions is self._decode else 0

    def _dispatch(
        self, functions: dict[int, Any], size: int, rows: sampler.Rows, floor: np.ndarray, places: Places[int]
    ) -> sampler.Drawn:
        allowed = ()
        if functions is self._held:
            masks = np.full((len(rows.last), -(-self._config.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
            for r, q in places:
                masks[r] = self._slots[q].allowed
            allowed = (masks,)
        self._pools, drawn = functions[size](self._params, self._pools, *self._fleet.put((rows, floor, *allowed)))
        return drawn

    def _rows(self, places: Places[int], total: int) -> sampler.Rows:
        lengths, last, drawn, remaining, top_k = (np.zeros(total, np.int32) for _ in range(5))
        temperature, top_p = np.ones(total, np.float32), np.ones(total, np.float32)
        min_p, active, key = np.zeros(total, np.float32), np.zeros(total, np.bool_), np.zeros((total, 2), np.uint32)
        stops = np.full((total, _STOPS), -1, np.int32)
        for r, q in places:
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
        table = self._table([(r, self._slots[q].pages) for r, q in places], total)
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

    def _stop_at(self, slot: Slot, request: SampleRequest, tokens: list[int]) -> tuple[int, bool]:
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
        self._dispatch_copies(np.zeros((2, len(self._books), _COPIES), np.int32))

    def _agreeing(self, functions: dict[int, Any]) -> dict[int, Any]:
        """Those that agree with the largest, up to the first that holds all slots of a device.

        What is compared does not depend on the devices, and so neither do a slot's bits.
        """
        results = {size: self._probe(functions, size) for size in functions}
        same = {size: functions[size] for size in functions if results[size] == results[max(results)]}
        enough = min((size for size in same if size >= self._per), default=max(same, default=0))
        return {size: function for size, function in same.items() if size <= enough}

    def _probe(self, functions: dict[int, Any], size: int) -> bytes:
        """The log-probabilities of a few rows decoded in a batch of this size, on pages that nobody has written yet."""
        n, count = len(self._books), min(8, *functions, *(book.free for book in self._books))
        rows = self._rows([], n * size)
        for r in (at * size + r for at in range(n) for r in range(count)):
            number = r % size
            rows.table[r, 0], rows.last[r] = 1 + number, (7 * number + 1) % self._config.vocab_size
            rows.active[r], rows.remaining[r], rows.key[r] = True, PAGE, (number, 1)
        drawn = self._dispatch(functions, size, rows, np.zeros(n, np.int32), [])
        logprobs = np.asarray(jax.device_get(drawn.logprobs))
        return logprobs.reshape(-1, n, size)[:, :, :count].tobytes()


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


def _places(by_device: list[list[T]], size: int) -> Places[T]:
    """What each device has, with its row among `size` rows for each."""
    return [(n * size + r, what) for n, mine in enumerate(by_device) for r, what in enumerate(mine)]


def _compiled(function: Any) -> int:
    return function._cache_size()
