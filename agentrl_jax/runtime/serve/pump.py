"""The thread that owns a sampler: whoever serves requests talks to it by jobs, never to the sampler itself.

Every call of the sampler happens here, its publications included, so that none meets another. What a reload does
before, reading a checkpoint and laying its params out, happens in a thread of its own beside the sampling: it makes
arrays that the sampler does not know yet, and requests do not wait for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agentrl_jax.rollout.sampling import LiveSampler, Partial, Sample, SampleRequest, Stop


class Busy(Exception):
    """The queue has no room: ask again later."""


class Stopped(Exception):
    """The pump takes no more jobs: it was stopped, or the sampler broke."""


class Piece(NamedTuple):
    """What a job's turn has sampled since its last piece; `stop` is None while it goes on."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: Stop | None


@dataclass(kw_only=True, eq=False)
class Job:
    """One turn to sample in a context of its own.

    Its tokens follow from `ids`, `key`, `max_tokens`, `temperature` and the cuts (see `SampleRequest`). `tell` is
    called from the pump's thread with each `Piece`, or once with the exception that ended the job.
    """

    ids: tuple[int, ...]
    key: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    grammar: str | None = None
    tell: Callable[[Piece | Exception], None]
    cancelled: bool = False
    _sent: int = field(default=0, repr=False)

    def request(self, slot: int, share_with: int | None) -> SampleRequest:
        """The job as the sampler's request for a slot. A field that requests gain is passed on here."""
        return SampleRequest(
            slot=slot, key=self.key, ids=self.ids, fresh=True, share_with=share_with,
            max_tokens=self.max_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
            min_p=self.min_p, stop_ids=self.stop_ids, grammar=self.grammar,
        )  # fmt: skip

    def report(self, found: Partial | Sample, stop: Stop | None) -> None:
        if len(found.ids) == self._sent and stop is None:
            return
        at, self._sent = self._sent, len(found.ids)
        self.tell(Piece(found.ids[at:], found.logprobs[at:], found.versions[at:], stop))


class Pump:
    """Feeds jobs to the idle slots of a sampler, first come first served, and advances it while it has work.

    At most `queue` jobs wait for a slot. After an exception of the sampler nothing is served any more: `failure` has
    it, and every job is told. `start` and `stop` the thread, or use it as a context manager.
    """

    def __init__(self, sampler: LiveSampler, *, queue: int) -> None:
        self._sampler, self._queue = sampler, queue
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._orders: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="agentrl-pump", daemon=True)

    def __enter__(self) -> Pump:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def context(self) -> int:
        return self._sampler.context

    @property
    def version(self) -> int:
        return self._sampler.version

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the dispatch it is in; jobs that are not over are told `Stopped`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of `jobs` or none. Raises `Busy` where they do not fit, `Stopped` where nothing is served."""
        with self._changed:
            self._check_alive()
            if len(self._waiting) + len(jobs) > self._queue:
                raise Busy(f"{len(self._waiting)} requests wait already, at most {self._queue} may; try again later")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Drop a job; it is told nothing more. What is over already stays so."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def publish(self, params: Any, version: int) -> Future[None]:
        """Sample from these params from the next dispatch on; requests in flight keep the tokens they have."""
        order: tuple[Callable[[], Any], Future[Any]] = (lambda: self._sampler.publish(params, version), Future())
        with self._changed:
            self._check_alive()
            self._orders.append(order)
            self._changed.notify()
        return order[1]

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise Stopped(f"the sampler broke: {type(self.failure).__name__}: {self.failure}")
        if self._stopping:
            raise Stopped("the server is shutting down")

    def _run(self) -> None:
        try:
            while self._next_move():
                if self._sampler.busy:
                    self._report(self._sampler.advance())
        except Exception as error:
            self.failure = error
        finally:
            self._close()

    def _next_move(self) -> bool:
        """Wait until there is work, then carry out orders, drop what was cancelled and fill the idle slots."""
        with self._changed:
            while not (self._stopping or self._orders or self._waiting or self._running):
                self._changed.wait()
            if self._stopping:
                return False
            orders, self._orders = self._orders, deque()
            dropped = [slot for slot, job in self._running.items() if job.cancelled]
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
            free = [slot for slot in range(self._sampler.slots) if slot not in self._running or slot in dropped]
            admitted = [(slot, self._waiting.popleft()) for slot in free[: len(self._waiting)]]
        for order, answer in orders:
            _obey(order, answer)
        for slot in dropped:
            self._sampler.cancel(slot)
            del self._running[slot]
        self._running.update(admitted)  # first of all, so that they are told whatever happens now
        self._admit(admitted)
        return True

    def _admit(self, admitted: Sequence[tuple[int, Job]]) -> None:
        """Equal prompts that start together are computed once."""
        leaders: dict[tuple[int, ...], int] = {}
        for slot, job in admitted:
            leader = leaders.get(job.ids)
            try:
                self._sampler.submit(job.request(slot, leader))
            except ValueError as error:  # a request that cannot be served fails alone
                del self._running[slot]
                job.tell(error)
                continue
            leaders.setdefault(job.ids, slot)

    def _report(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            job = self._running.pop(sample.slot)
            if job.cancelled:
                continue
            if sample.stop == "error":
                job.tell(ValueError(sample.message))
            else:
                job.report(sample, sample.stop)
        for slot, job in self._running.items():
            if not job.cancelled:
                job.report(self._sampler.peek(slot), None)

    def _close(self) -> None:
        with self._changed:
            self._stopping = True
            left = [*self._running.values(), *self._waiting]
            orders = list(self._orders)
            self._running.clear()
            self._waiting.clear()
        reason = Stopped("the server is shutting down") if self.failure is None else Stopped(str(self.failure))
        for job in left:
            if not job.cancelled:
                job.tell(reason)
        for _, answer in orders:
            answer.set_exception(reason)


def _obey(order: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        answer.set_result(order())
    except Exception as error:
        answer.set_exception(error)
