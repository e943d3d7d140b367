"""Rollouts that run ahead of the learner: what trains is the plan, whatever is slow, stops or comes back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_suites
import pytest
import scripted

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, Task, ToolCall
from agentrl_jax.recipes.checks import check
from agentrl_jax.recipes.config import Loop, RateCap, Rollout, RunConfig, TinyPolicy
from agentrl_jax.recipes.guards import Drops
from agentrl_jax.recipes.pacing import admit, capped_rate, roll_out, take_in
from agentrl_jax.recipes.rl import plan_step, rl
from agentrl_jax.recipes.run import Run
from agentrl_jax.rl import corrections
from agentrl_jax.rl.algorithms import cispo, grpo, ppo
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import Driver
from agentrl_jax.rollout.collector import Collector, Finished
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.sampling import Sample, SampleRequest
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime.clock import Clock
from agentrl_jax.runtime.hosts import Hosts

FINISH = ToolCall(name="finish")


class Versioned(scripted.ScriptedSampler):
    version = 0

    def publish(self, params: Any, version: int) -> None:
        self.version = version

    def _sample(self, request: SampleRequest) -> Sample:
        sample = super()._sample(request)
        return replace(sample, versions=(self.version,) * len(sample.ids))


@contextmanager
def a_run(script: Any, group: int, buffer: Buffer | None = None, slots: int = 16) -> Iterator[Run]:
    """As much of a run as pacing needs: real workers, no model."""
    renderer = ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
    run, ref = Run.__new__(Run), EnvironmentRef(target="fake_suites:counter")
    with Pool(ref, slots, Deadlines(start=60.0, reset=60.0, step=60.0, verify=60.0)) as pool:
        driver = Driver(Versioned(renderer, script, slots=slots), pool, renderer, max_turn_tokens=16)
        with Collector(driver) as collector:
            vars(run).update(
                config=SimpleNamespace(rollout=Rollout(free_space_gb=0.0)), directory=Path(), clock=Clock(), version=0,
                collector=collector, buffer=buffer or Buffer(group), drops=Drops(1, Path()),
                sinks=SimpleNamespace(receipt=lambda row: None, broken=lambda row: None),
                interrupts=SimpleNamespace(check=lambda: None), hosts=Hosts(),
            )  # fmt: skip
            yield run


def steps_of(
    run: Run, loop: Loop, tasks: Sequence[Task], finished: Finished, start: int = 0
) -> Iterator[tuple[int, list, dict]]:
    """The loop of `recipes.rl` without its update: each step's groups and figures."""
    ahead: deque[Any] = deque()
    for step in range(start, loop.steps):
        run.version = step + 1
        run.collector.publish(None, run.version)
        for later in range(step + len(ahead), min(step + loop.max_lag + 1, loop.steps)):
            ahead.append(plan_step(3, later, loop, tasks))
            admit(run, ahead[-1], finished)
        groups, figures = roll_out(run, loop, ahead.popleft(), finished)
        yield step, groups, figures
        take_in(run, finished)


def loop(**changes: Any) -> Loop:
    settings: dict[str, Any] = {"steps": 6, "tasks": 4, "group": 2, "objective": cispo(), "reward": lexicographic}
    return Loop(**settings | changes)


def ids(groups: Sequence[Sequence[Trajectory]]) -> list[tuple[int, int]]:
    return [(t.group, t.member) for group in groups for t in group]


def test_p54_slow_tasks_train_as_often_as_they_are_drawn_and_nothing_is_discarded() -> None:
    """Half of the tasks take ten times as many exchanges as the others. At a bound of one step their share is 50 %."""
    tasks = [Task(id=f"{pace}-{i}", split="train", data={"goal": 5}) for i in range(12) for pace in ("slow", "fast")]
    settings, slow, lags = loop(max_lag=1), Counter(), []
    named = {plan.key[:4]: plan.task.id for step in range(6) for plan in plan_step(3, step, settings, tasks)}

    def script(request: SampleRequest) -> ToolCall:
        turns = 10 if named[request.key[:4]].startswith("slow") else 1
        return FINISH if request.key[4] + 1 == turns else ToolCall(name="look")

    with a_run(script, settings.group, slots=12) as run:
        trained: list[tuple[int, int]] = []
        for step, groups, figures in steps_of(run, settings, tasks, Finished()):
            trained += ids(groups)
            assert ids(groups) == [(4 * step + g, m) for g in range(4) for m in range(2)]
            slow.update(t.task.id.split("-")[0] for group in groups for t in group)
            lags.append(figures["lag_max"])
        assert slow["slow"] == slow["fast"] == 24, "six steps are one epoch: every task trains as a group, once"
        assert len(set(trained)) == len(trained) == run.buffer.counts["added"] == 48 and len(run.buffer) == 0
    assert max(lags) <= 1


@pytest.mark.parametrize("max_lag", [0, 2])
def test_p57_what_was_in_flight_at_a_checkpoint_trains_once(max_lag: int) -> None:
    """Killed after step 2, with groups of the next steps whole, in part and not begun; the record brings back what was
    over, and the rest is planned again."""
    tasks, settings, finished = fake_suites.tasks("train", 5, 0), loop(max_lag=max_lag), Finished()
    trained: list[tuple[int, int]] = []
    with a_run(lambda request: FINISH, settings.group) as run:
        for step, groups, _ in steps_of(run, settings, tasks, finished):
            trained += ids(groups)
            if step == 2:
                while max_lag and len(run.buffer) < 5:
                    take_in(run, finished, wait=True)
                held, counts = run.buffer.held(), run.buffer.counts
                break
    assert bool(held) == bool(max_lag)
    cut, held = held[:1], held[1:]  # as if this one had not been over yet when the record was written
    before = {(t.group, t.member): t for t in held}
    with a_run(lambda request: FINISH, settings.group, Buffer.of(settings.group, held, counts)) as run:
        for _, groups, figures in steps_of(run, settings, tasks, Finished(), start=3):
            trained += ids(groups)
            assert figures["lag_max"] <= max_lag
            for t in (t for group in groups for t in group):
                assert t == before.get((t.group, t.member), t), "kept, not run again"
                assert t.oldest_version is not None and (t.oldest_version > 3 or (t.group, t.member) in before)
    assert not any((t.group, t.member) in before for t in cut)
    assert trained == [(group, member) for group in range(24) for member in range(2)]


def config(**changes: Any) -> RunConfig:
    return RunConfig(
        name="x", environment=EnvironmentRef(target="fake_suites:counter"), policy=TinyPolicy(), stages=(rl,),
        loop=Loop(objective=grpo(beta=0.0), reward=lexicographic, **changes),
    )  # fmt: skip


def with_objective(objective: Any, **changes: Any) -> RunConfig:
    made = config(**changes)
    assert made.loop is not None
    return replace(made, loop=replace(made.loop, objective=objective))


def test_p40_stale_samples_need_a_correction_or_a_bound() -> None:
    check(config())
    with pytest.raises(UserError) as caught:
        check(config(max_lag=2))
    assert str(caught.value).startswith("loop.max_lag=2: objective: at lag 2 its loss has no bound")
    assert "ppo_clip(dual=3.0)" in str(caught.value) and "\n" not in str(caught.value)
    clipped = replace(ppo(dual=3.0), advantage=grpo(beta=0.0).advantage)  # without a critic there is no other
    for bounded in (cispo(), clipped, grpo(beta=0.0, correction=corrections.truncated())):
        check(with_objective(bounded, max_lag=2))
    with pytest.raises(UserError, match=r"loop\.max_lag=-1: expected a whole number from 0 on"):
        check(config(max_lag=-1))


def test_old_log_probs_are_rescored_where_they_are_the_right_ones() -> None:
    """Stale samples without a correction: the behavior policy is the old one, and its ratio makes up for their age."""
    corrected = grpo(beta=0.0, correction=corrections.truncated())
    assert [loop(max_lag=lag, updates_per_batch=2).rescores for lag in (0, 1)] == [True, False]
    assert [loop(max_lag=lag, objective=corrected).rescores for lag in (0, 1)] == [True, True]
    assert not loop().rescores


def test_the_cap_on_the_learning_rate_follows_the_lag() -> None:
    cap = RateCap(batch_radius=0.02, critical_radius=0.5, update_norm=10.0)
    assert capped_rate(loop(learning_rate=1e-2)) == 1e-2, "no cap is asked for"
    rates = [capped_rate(loop(steps=200, learning_rate=1.0, max_lag=lag, rate_cap=cap)) for lag in (0, 4, 16)]
    assert rates == pytest.approx([2.5e-4, 2.5e-4, 1.25e-4]), "by the horizon, then by the lag"
    assert capped_rate(loop(steps=200, learning_rate=1e-5, max_lag=16, rate_cap=cap)) == 1e-5
    half = capped_rate(loop(steps=200, learning_rate=1.0, max_lag=16, rate_cap=replace(cap, margin=0.5)))
    assert half == pytest.approx(0.625e-4)
    twice = loop(steps=100, learning_rate=1.0, max_lag=7, updates_per_batch=2, rate_cap=cap)
    assert twice.oldest == 15 and capped_rate(twice) == pytest.approx(0.02 / 150)
    wrong = partial(config, max_lag=0)
    for changes, words in (({"margin": 0.0}, "margin"), ({"update_norm": 0.0}, "update_norm")):
        with pytest.raises(UserError, match=rf"loop\.rate_cap: .*{words}"):
            check(wrong(rate_cap=replace(cap, **changes)))
