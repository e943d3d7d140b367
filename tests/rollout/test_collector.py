"""Episodes in a thread of their own: what is ordered arrives, nothing is lost, and tokens bear the right version."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import scripted

from agentrl_jax.protocol import EnvironmentRef, Task, ToolCall
from agentrl_jax.rollout.collect import Driver, EpisodePlan
from agentrl_jax.rollout.collector import Collector, Finished
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.sampling import Sample, SampleRequest

GOOD = [ToolCall(name="add", arguments={"n": 5}), ToolCall(name="finish")]


class Versioned(scripted.ScriptedSampler):
    """Numbers its tokens by the params that were published last; `hold(request, version)` says who waits for others."""

    version = 0

    def __init__(self, *arguments: Any, hold: Any = lambda request, version: False, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._hold = hold

    def publish(self, params: Any, version: int) -> None:
        self.version = version

    def advance(self) -> list[Sample]:
        held = [request for request in self._pending if self._hold(request, self.version)]
        self._pending = [request for request in self._pending if request not in held]
        found = super().advance()
        self._pending += held
        return found

    def _sample(self, request: SampleRequest) -> Sample:
        sample = super()._sample(request)
        return Sample(
            slot=sample.slot, ids=sample.ids, logprobs=sample.logprobs, versions=(self.version,) * len(sample.ids),
            stop=sample.stop,
        )  # fmt: skip


def plan(group: int, members: int = 2) -> list[EpisodePlan]:
    task = Task(id=f"t{group}", split="train", data={"goal": 5})
    return [EpisodePlan(group=group, member=m, task=task, seed=group, key=(group, m)) for m in range(members)]


def collector(renderer: Any, pool: Pool, **changes: Any) -> Collector:
    sampler = Versioned(renderer, lambda request: GOOD[request.key[2]], slots=4, **changes)
    return Collector(Driver(sampler, pool, renderer, max_turn_tokens=16))


def all_of(running: Collector, finished: Finished) -> list[Trajectory]:
    found: list[Trajectory] = []
    while finished.owed:
        found += running.take(finished, wait_s=10.0)
    return found


@pytest.fixture
def pool():
    with Pool(EnvironmentRef(target="fake_suites:counter"), 4, Deadlines(start=60.0)) as pool:
        yield pool


def test_what_starts_after_a_publication_has_no_older_token_and_what_runs_goes_on_with_it(renderer, pool):
    """The last turn of group 0 is held back until a version that comes only once group 1 is there: nothing waits for
    the slowest episode, and its tokens say which params sampled which."""
    early, late = Finished(), Finished()

    def hold(request: SampleRequest, version: int) -> bool:
        return request.key[0] == 0 and request.key[2] == 1 and version < 3

    with collector(renderer, pool, hold=hold) as running:
        running.publish(None, 1)
        running.start(plan(0), early, temperature=1.0)
        running.publish(None, 2)
        running.start(plan(1), late, temperature=1.0)
        second = all_of(running, late)
        assert {v for t in second for v in t.policy_versions} == {-1, 2} and early.owed == 2
        running.publish(None, 3)
        first = all_of(running, early)
    for t in first:
        by_turn = {turn: v for turn, v in zip(t.turn_ids, t.policy_versions, strict=True) if v >= 0}
        assert by_turn[0] in (1, 2) and by_turn[1] == 3 and t.success


def test_an_evaluation_runs_beside_training_and_before_what_waits(renderer, pool):
    """Two episodes hold half of the slots, six wait; those of the evaluation come first, and all arrive where they
    were ordered to."""
    released = threading.Event()
    training, evaluation = Finished(), Finished()

    def hold(request: SampleRequest, version: int) -> bool:
        return request.key[0] != 9 and not released.is_set()

    with collector(renderer, pool, hold=hold) as running:
        for group in range(4):
            running.start(plan(group), training, temperature=1.0)
        running.start(plan(9, members=1), Finished(), temperature=1.0)  # waits behind all of them
        with pytest.raises(RuntimeError, match="nothing is on its way"):
            running.take(evaluation, wait_s=1.0)
        assert running.take(training) == []
        released.set()
        running.start(plan(9), evaluation, temperature=0.0, first=True)
        assert [t.group for t in all_of(running, evaluation)] == [9, 9]
        found = Counter((t.group, t.member) for t in all_of(running, training))
    assert found == Counter((group, member) for group in range(4) for member in range(2))


def test_what_breaks_in_the_thread_is_raised_to_whoever_looks_and_the_workers_are_free(renderer, pool):
    def hold(request: SampleRequest, version: int) -> bool:
        raise OSError("the device is gone")

    finished = Finished()
    with collector(renderer, pool, hold=hold) as running:
        running.start(plan(0), finished, temperature=1.0)
        with pytest.raises(OSError, match="the device is gone"):
            all_of(running, finished)
        with pytest.raises(OSError, match="the device is gone"):
            running.check()
    assert [pool.acquire() for _ in range(4)].count(None) == 0


def test_leaving_ends_the_thread_and_what_runs(renderer, pool):
    finished = Finished()
    with collector(renderer, pool, hold=lambda request, version: True) as running:
        running.start(plan(0), finished, temperature=1.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "collector"]
    assert [pool.acquire() for _ in range(4)].count(None) == 0 and running.take(finished) == []


def test_the_guard_is_entered_in_the_thread(renderer, pool):
    entered: list[str] = []

    class Guard:
        def __enter__(self) -> None:
            entered.append(threading.current_thread().name)

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    driver = Driver(Versioned(renderer, lambda request: GOOD[0], slots=4), pool, renderer, max_turn_tokens=16)
    with Collector(driver, guard=Guard):
        pass
    assert entered == ["collector", "left"]
