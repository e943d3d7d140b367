"""Episodes go on in a thread of their own while whoever ordered them learns.

The thread alone touches the sampler and the pool. Orders go in by a queue; trajectories come out, and what breaks in
there is raised to whoever waits or looks next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self, cast

from agentrl_jax.rollout.collect import Driver
from agentrl_jax.rollout.episode import EpisodePlan
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.sampling import WHOLE, Cut, LiveSampler

_GLANCE_S = 0.02  # how long a new order may wait while nothing is sampled and no environment answers


class Finished:
    """Where the episodes of one purpose arrive. `owed`: those that were ordered and not yet taken."""

    def __init__(self) -> None:
        self.owed = 0
        self.arrived: list[Trajectory] = []


class Collector:
    """Runs episodes in the background.

        with Collector(driver) as collector:
            finished = Finished()
            collector.publish(params, version)
            collector.start(plans, finished, temperature=1.0)
            while finished.owed:
                learn_from(collector.take(finished, wait_s=1.0))

    Orders are carried out as they were given, between two moves of the driver: no episode that was started after a
    `publish` has a token of older params, and one that runs goes on with the new ones from its next dispatch on.
    `guard` is entered in the thread, for settings that hold for one thread only. Leaving the context ends the thread
    and kills the episodes that run.
    """

    def __init__(self, driver: Driver, *, guard: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._driver, self._guard = driver, guard
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._news = threading.Condition()  # something arrived, or broke
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.put(None)
        self._thread.join()

    def start(
        self, plans: Sequence[EpisodePlan], finished: Finished, *, temperature: float, cut: Cut = WHOLE,
        first: bool = False,
    ) -> None:  # fmt: skip
        """Have these episodes run, before those that wait where `first`. Their trajectories arrive at `finished`."""
        finished.owed += len(plans)
        settings: Any = {"temperature": temperature, "cut": cut, "first": first}
        self._orders.put(partial(self._driver.add, plans, deliver=partial(self._deliver, finished), **settings))

    def publish(self, params: Any, version: int) -> None:
        """Sample from these params from the next dispatch on; see `sampling.LiveSampler`."""
        sampler = cast(LiveSampler, self._driver.sampler)
        self._orders.put(partial(sampler.publish, params, version))

    def take(self, finished: Finished, *, wait_s: float = 0.0) -> list[Trajectory]:
        """What has arrived by now, in that order; where that is nothing, what does within `wait_s` seconds.

        Raises what ended the thread, and `RuntimeError` where one would wait for nothing.
        """
        if wait_s and not finished.owed:
            raise RuntimeError("nothing is on its way: no episode was ordered that has not been taken")
        with self._news:
            self._news.wait_for(lambda: finished.arrived or self._failure is not None, wait_s)
            found, finished.arrived = finished.arrived, []
        finished.owed -= len(found)
        if not found:
            self.check()
        return found

    def check(self) -> None:
        """Raises what ended the thread, where anything did."""
        if self._failure is not None:
            raise self._failure

    def _deliver(self, finished: Finished, trajectory: Trajectory) -> None:
        with self._news:
            finished.arrived.append(trajectory)
            self._news.notify_all()

    def _work(self) -> None:
        try:
            with self._guard():
                try:
                    while self._carry_out():
                        self._driver.advance(_GLANCE_S)
                finally:
                    self._driver.abandon()
        except BaseException as failure:  # the thread's last words, for `check`
            with self._news:
                self._failure = failure
                self._news.notify_all()

    def _carry_out(self) -> bool:
        """Every order that is there, and the next one where there is nothing else to do; False to end."""
        while True:
            try:
                order = self._orders.get(block=self._driver.over)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
