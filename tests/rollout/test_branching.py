"""Members that go on from another's state: real workers, a sampler that keeps every context, faults on the way."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import fake_suites
import fork_suites
import pytest
import scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_renderer import PlainRenderer

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Cause, EnvironmentRef, StopReason, Task, ToolCall
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.episode import Episode
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Branch, Trajectory
from agentrl_jax.rollout.renderers import Following
from agentrl_jax.rollout.replay import replay_in
from agentrl_jax.rollout.sampling import Sample, SampleRequest
from agentrl_jax.rollout.wire import Answer, Capture, Captured, Command, Failure, Reply

DEADLINES = Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)
ADD1, ADD2, ADD3 = (ToolCall(name="add", arguments={"n": n}) for n in (1, 2, 3))
LOOK, FINISH = ToolCall(name="look"), ToolCall(name="finish")
Item = ToolCall | str


class Contexts(scripted.ScriptedSampler):
    """Keeps what each slot holds, and refuses a fork that no engine could make."""

    def __init__(self, *args: Any, near: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.near = near or self.slots
        self.held: dict[int, tuple[int, ...]] = {}

    def submit(self, request: SampleRequest) -> None:
        super().submit(request)
        source = request.fork_from
        if source is None:
            self.held[request.slot] = (*(() if request.fresh else self.held[request.slot]), *request.ids)
            return
        assert request.fresh and request.share_with is None and source != request.slot
        assert source // self.near == request.slot // self.near, "they are on one device"
        assert all(other.slot != source for other in self._pending), "the source is idle"
        self.held[request.slot] = (*self.held[source], *request.ids)

    def _sample(self, request: SampleRequest) -> Sample:
        sample = super()._sample(request)
        self.held[request.slot] += sample.ids
        return sample


def plan(member: int, branch: tuple[int, int] | None = None, *, group: int = 0, fault: str = "") -> EpisodePlan:
    task = Task(id=f"t{group}{fault}", split="train", data={"goal": 5, "fault": fault, "salt": 4})
    left = None if branch is None else Branch(member=branch[0], turn=branch[1])
    return EpisodePlan(group=group, member=member, task=task, seed=9, key=(group, member), branch=left)


def run(pool: Pool, renderer: Any, scripts: Mapping[int, Sequence[Item]], plans: Sequence[EpisodePlan], *,
        slots: int = 8, near: int | None = None, shuffle: int | None = None,
        sampler: Contexts | None = None) -> dict[int, Trajectory]:  # fmt: skip
    sampler = sampler or Contexts(renderer, scripted.by_turn(dict(scripts)), slots=slots, near=near, shuffle=shuffle)
    found = collect(plans, sampler, pool, renderer, max_turn_tokens=16, temperature=1.0, stall_s=120.0)
    return {t.group * 100 + t.member: t for t in found}


@pytest.fixture
def ref(tmp_path) -> EnvironmentRef:
    return EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})


@pytest.fixture
def pool(ref):
    with Pool(ref, 8, DEADLINES) as pool:
        yield pool


def test_a_branch_has_its_sources_record_up_to_the_turn_and_its_own_from_there(pool, renderer):
    scripts = {0: [ADD2, LOOK, ADD3, FINISH], 1: [ADD1, FINISH], 2: ["-", ADD3, FINISH], 3: ["-", "-", ADD1, FINISH]}
    sampler = Contexts(renderer, scripted.by_turn(scripts), slots=8)
    done = run(pool, renderer, scripts, [plan(0), plan(1), plan(2, (0, 1)), plan(3, (0, 2))], sampler=sampler)
    trunk, late, other = done[0], done[3], done[2]
    assert [done[m].branch for m in range(4)] == [None, None, Branch(member=0, turn=1), Branch(member=0, turn=2)]
    for branch in (other, late):
        start = branch.branch_start
        assert branch.turn_ids[start] == branch.branch.turn and branch.action_mask[start]
        for name in ("tokens", "sources", "action_mask", "behavior_logprobs", "policy_versions", "turn_ids"):
            assert getattr(branch, name)[:start] == getattr(trunk, name)[:start], name
        assert branch.receipt.steps[: branch.branch.turn] == trunk.receipt.steps[: branch.branch.turn]
        assert branch.receipt.breach() is None and replay_in(pool, branch.receipt) is None
        assert branch.fork.way == "copied" and branch.fork.refused == "" and branch.fork.bytes > 0
        assert branch.fork.tokens == start
        assert Trajectory.from_json(json.loads(json.dumps(branch.to_json()))) == branch
    assert other.success and other.receipt.ledger.tool_calls == 3 and other.receipt.ledger.steps == 3
    assert late.verdict.outcome is False and late.receipt.ledger.tool_calls == 4, "2 + 1 is not 5"
    assert trunk.success and late.receipt.ledger.tokens == sum(late.action_mask)
    forks = [request for request in sampler.requests if request.fork_from is not None]
    assert [(r.key, len(r.ids) < 12) for r in forks] == [((0, 2, 1), True), ((0, 3, 2), True)]
    assert sorted(sampler.held.values()) == sorted(t.tokens[: len(t.tokens) - _after(t)] for t in done.values())


def _after(t: Trajectory) -> int:
    """Tokens after the last action: none was asked for."""
    return next(n for n, chosen in enumerate(reversed(t.action_mask)) if chosen)


def test_a_record_without_the_field_is_read_as_one_from_the_reset(pool, renderer):
    (done,) = run(pool, renderer, {0: [FINISH]}, [plan(0)]).values()
    old = {name: value for name, value in done.to_json().items() if name not in ("branch", "fork")}
    assert Trajectory.from_json(old) == done and done.branch_start == 0


def test_where_the_source_ends_earlier_its_last_turn_is_the_branch_point(pool, renderer):
    scripts = {0: [ADD2, ADD3, FINISH], 1: [FINISH], 2: [LOOK, LOOK, ADD1, FINISH], 3: [ADD2, ADD3, FINISH]}
    done = run(pool, renderer, scripts, [plan(0), plan(1), plan(2, (0, 9)), plan(3, (1, 4))])
    assert done[2].branch == Branch(member=0, turn=2) and done[2].fork.way == "replayed"
    assert done[2].receipt.steps[:2] == done[0].receipt.steps[:2] and done[2].verdict.outcome is False
    assert done[3].branch is None and done[3].fork is None and done[3].success, "its source came to no turn 1"
    assert all(t.receipt.breach() is None and replay_in(pool, t.receipt) is None for t in done.values())


ITEMS = st.sampled_from([ADD1, ADD2, LOOK, FINISH, "hello", ToolCall(name="nothing"), ToolCall(name="break", arguments={
    "how": "raise"})])  # fmt: skip
POINTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def crowd():
    with tempfile.TemporaryDirectory() as scratch:
        ref = EnvironmentRef(target="fake_suites:counter", options={"scratch": scratch, "steps": 4})
        with Pool(ref, 8, DEADLINES) as wide, Pool(ref, 2, DEADLINES) as narrow:
            yield wide, narrow


@given(st.lists(st.lists(ITEMS, min_size=8, max_size=8), min_size=6, max_size=6), POINTS, st.integers(0, 99))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_branch_is_the_episode_that_its_sources_turns_and_its_own_make(crowd, renderer, scripts, points, shuffle):
    """The other way to it: one episode from the reset that says the source's turns and then the branch's. Neither
    timing nor the number of workers, slots and devices changes anything."""
    wide, narrow = crowd
    told = dict(enumerate(scripts))
    plans = [plan(0), plan(1), *(plan(2 + n, point) for n, point in enumerate(points))]
    done = run(wide, renderer, told, plans, shuffle=shuffle)
    spliced = dict(told)
    for member, (source, turn) in enumerate(points, start=2):
        left = min(turn, done[source].turns - 1)
        assert done[member].branch == (Branch(member=source, turn=left) if left else None)
        spliced[member] = [*told[source][:left], *told[member][left:]]
    alone = run(wide, renderer, spliced, [replace(each, branch=None) for each in plans])
    fewer = run(narrow, renderer, told, plans, slots=3)
    apart = run(wide, renderer, told, plans, slots=8, near=4, shuffle=shuffle + 1)
    assert facts(done) == facts(alone) == facts(fewer) == facts(apart)
    assert all(t.receipt.breach() is None for t in (*done.values(), *fewer.values()))


def facts(done: Mapping[int, Trajectory]) -> dict[int, list[Any]]:
    fields = ("tokens", "sources", "action_mask", "behavior_logprobs", "policy_versions", "turn_ids", "stop", "verdict")
    return {
        key: [
            *(getattr(t, name) for name in fields), t.receipt.actions, t.receipt.replay_id,
            [step.observation_hash for step in t.receipt.steps], replace(t.receipt.ledger, wall_s=0.0),
        ]
        for key, t in sorted(done.items())
    }  # fmt: skip


def test_units_of_a_group_that_start_apart_replay_and_the_slots_of_one_device_fork(pool, renderer):
    scripts = {m: [ADD2, LOOK, ADD3, FINISH] for m in range(4)}
    plans = [plan(0), plan(1), plan(2, (0, 2)), plan(3, (1, 1))]
    for slots, near, forks in ((4, None, 2), (4, 2, 0), (2, None, 0), (8, 4, 2)):
        sampler = Contexts(renderer, scripted.by_turn(scripts), slots=slots, near=near)
        done = run(pool, renderer, scripts, plans, sampler=sampler)
        assert all(t.success for t in done.values())
        assert sum(request.fork_from is not None for request in sampler.requests) == forks
        assert {done[m].fork.way for m in (2, 3)} == {"replayed" if slots == 2 else "copied"}


def test_a_shop_in_sqlite_is_copied_and_each_branch_finishes_the_order_by_itself():
    """Native snapshots: whatever turn it is left at, the rest of the reference solution succeeds in the copy."""
    ref, renderer = EnvironmentRef(target="agentrl_envs.workflow:suite"), PlainRenderer()
    suite = ref.load()
    tasks = [task for task in suite.tasks("train", 16, 0) if len(suite.solve(task)) >= 3][:3]
    plans = [
        replace(plan(m, None if m < 1 else (0, m), group=g), task=task)
        for g, task in enumerate(tasks)
        for m in range(4)
    ]
    with Pool(ref, 8, DEADLINES) as pool:
        sampler = Contexts(renderer, lambda request: suite.solve(tasks[request.key[0]])[request.key[2]], slots=8)
        done = run(pool, renderer, {}, plans, sampler=sampler)
        assert len(done) == 12 and all(t.success and replay_in(pool, t.receipt) is None for t in done.values())
    copied = [t.fork for t in done.values() if t.fork is not None and t.fork.way == "copied"]
    assert len(copied) >= 6 and all(fork.bytes > 1000 and fork.seconds > 0 for fork in copied)


class Rewriting(PlainRenderer):
    """Renders the whole talk anew at every turn: each one is a segment of its own."""

    def follow(self, talk: Sequence[Any], messages: Any) -> Following:
        ids = (*[at + 100 for at in range(len(talk) + 1)], 1)
        return Following(ids, (int(Source.ENVIRONMENT),) * len(ids), "rewritten")


def test_where_a_context_begins_at_the_branch_point_it_is_read_once_and_shared(pool):
    scripts, renderer = {m: [ADD2, LOOK, ADD3, FINISH] for m in range(3)}, Rewriting()
    for near, shared in ((None, 2), (2, 0)):  # three do not fit on two slots
        sampler = Contexts(renderer, scripted.by_turn(scripts), slots=4, near=near)
        done = run(pool, renderer, scripts, [plan(0), plan(1, (0, 1)), plan(2, (0, 2))], sampler=sampler)
        assert all(t.success and t.segments == 4 for t in done.values())
        assert [t.breaks for t in done.values()] == [done[0].breaks] * 3
        later = [request for request in sampler.requests if request.key[2] > 0]
        assert sum(request.share_with is not None for request in later) == shared
        assert not any(request.fork_from is not None for request in later)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        (EnvironmentRef(target="fake_suites:counter", options={"fork": "none"}), "says fork='none'"),
        (EnvironmentRef(target="fork_suites:large", options={"size": 40 << 20}), "is 83886080 bytes, at most"),
        (EnvironmentRef(target="fork_suites:dice", options={"fault": "measured"}), "has the hash"),
    ],
)
def test_a_refused_fork_is_counted_and_its_member_runs_from_the_reset(ref, words):
    roll, end = ToolCall(name="roll"), ToolCall(name="finish", arguments={"total": 3})
    if ref.target == "fake_suites:counter":
        roll, end = ADD2, FINISH
    renderer = PlainRenderer()
    with Pool(ref, 4, DEADLINES) as pool:  # what is too large to travel ends by its budget
        sampler = Contexts(renderer, lambda request: roll if request.key[2] < 3 else end, slots=4)
        done = run(pool, renderer, {}, [plan(0), plan(1, (0, 2))], sampler=sampler)
    refused = done[1]
    assert done[0].turns == refused.turns >= 4 and done[0].stop is refused.stop
    assert refused.branch is None and words in refused.fork.refused and refused.fork.tokens == 0


def test_a_source_whose_state_breaks_when_it_is_taken_is_rebuilt_and_hangs_nobody(pool, renderer):
    """The counter's snapshot raises from its first action on: at the fork, and in the end."""
    scripts = {0: [ADD2, ADD3, FINISH], 1: [ADD2, ADD3, FINISH]}
    done = run(pool, renderer, scripts, [plan(0, fault="snapshot"), plan(1, (0, 1), fault="snapshot")])
    assert done[0].receipt.healed == 1 and done[0].attribution.cause is Cause.ENVIRONMENT
    assert done[0].stop is StopReason.COMPLETED and done[0].receipt.steps[-1].performed
    assert done[1].branch is None and "the state is gone" in done[1].fork.refused
    assert done[1].turns == 3 and done[1].receipt.healed == 0


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("whose", ["all", "the source's"])
def test_workers_killed_before_at_and_after_the_branch_point_hang_nobody(pool, renderer, turn, whose):
    scripts = {0: [ADD2, LOOK, ADD3, FINISH], 1: [LOOK, LOOK, ADD3, FINISH]}
    killed: list[int] = []

    def script(request: SampleRequest) -> Item:
        if request.key[1:] == (0, turn) and not killed:
            pids = sorted(pool.pids().items())
            killed.extend(pid for _, pid in (pids if whose == "all" else pids[:1]))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return scripts[request.key[1]][request.key[2]]

    sampler = Contexts(renderer, script, slots=4)
    done = run(pool, renderer, scripts, [plan(0), plan(1, (0, 2))], sampler=sampler)
    assert killed and done[0].success and done[0].receipt.breach() is None
    branch = done[1]
    assert branch.receipt.breach() is None and branch.stop is StopReason.COMPLETED
    if branch.branch is None:  # its fork was lost with a worker
        assert branch.fork.refused and branch.receipt.steps[0].action.calls == (LOOK,)
    else:
        assert branch.success and branch.branch.turn == 2


@pytest.mark.parametrize("late", [False, True])
def test_a_worker_that_failed_to_start_while_its_branch_waited_is_replaced_and_costs_no_fork(ref, renderer, late):
    """It is told before the source's state is there, or with it: then another process has been sent the state."""

    class Unlucky(Pool):
        def submit(self, worker: int, command: Command) -> None:
            super().submit(worker, command)
            if isinstance(command, Capture) and not late:
                self._replies.append(self._fail_to_start(1 - worker))

        def poll(self, timeout: float | None) -> list[tuple[int, Reply]]:
            replies = super().poll(timeout)
            held = [worker for worker, reply in replies if isinstance(reply, Answer)
                    and isinstance(reply.value, Captured)]  # fmt: skip
            return [*replies, *(self._fail_to_start(1 - worker) for worker in held if late)]

        def _fail_to_start(self, worker: int) -> tuple[int, Reply]:
            if worker in self._processes:
                self._discard(worker)
            lost.append(worker)
            return worker, Failure(kind="timeout", phase="start", message="no answer")

    lost: list[int] = []
    with Unlucky(ref, 2, DEADLINES) as pool:
        done = run(pool, renderer, {0: [ADD2, ADD3, FINISH], 1: ["-", ADD3, FINISH]}, [plan(0), plan(1, (0, 1))])
    assert len(lost) == 1 and done[0].success and done[1].success
    assert done[1].branch == Branch(member=0, turn=1) and done[1].fork.way == "copied" and not done[1].fork.refused


def test_a_source_lost_for_good_leaves_its_last_turn_to_branch_from(tmp_path, renderer):
    script = [ADD2, ToolCall(name="break", arguments={"how": "raise"}), ADD3, FINISH]
    ref = EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})
    with Pool(ref, 4, DEADLINES) as pool:
        done = run(pool, renderer, {0: script, 1: ["-", ADD3, FINISH]}, [plan(0), plan(1, (0, 3))])
    assert not done[0].valid and done[0].attribution.cause is Cause.ENVIRONMENT
    assert done[1].branch == Branch(member=0, turn=1) and done[1].success and done[1].fork.way == "replayed"


def test_the_clock_of_a_branch_goes_on_from_its_sources_and_not_from_the_wait(renderer):
    now = [0.0]
    spec = fake_suites.counter().spec
    source = Episode(plan(0), spec, renderer, max_turn_tokens=16, clock=lambda: now[0])
    world = fake_suites.counter().make()
    source.begin(world.reset(source.plan.task, 0))
    for turn, item in enumerate([ADD2, LOOK]):
        now[0] += 1.0
        ids = renderer.turn(item)
        sample = Sample(slot=0, ids=ids, logprobs=(-1.0,) * len(ids), versions=(turn,) * len(ids), stop="stop")
        source.on_sample(sample)
        source.on_observation(world.step(source.pending), 1.0)
    now[0] = 50.0
    branch, ask = source.branched(plan(1, (0, 1)), 1)
    assert branch.meter.ledger().wall_s == 1.0 and branch.meter.ledger().steps == 1
    assert ask.fresh and ask.turn == 1 and len(ask.ids) == branch.length
    with pytest.raises(ValueError, match="no turn 0"):
        source.branched(plan(1, (0, 1)), 0)


@pytest.mark.parametrize(
    "plans",
    [
        [plan(1, (0, 1)), plan(0)],
        [plan(0), plan(1, (0, 0))],
        [plan(0), plan(1, (0, 1)), plan(2, (1, 1))],
        [plan(0), plan(1, (0, 1), fault="x")],
        [plan(0), plan(1, (0, 1), group=1)],
    ],
)
def test_a_plan_whose_branch_could_never_start_is_named(pool, renderer, plans):
    with pytest.raises(ValueError, match=r"member \d continues member \d before turn \d: expected"):
        run(pool, renderer, {}, plans)


assert fork_suites.TOOLS  # the modules the workers import by name are the ones this test sees
