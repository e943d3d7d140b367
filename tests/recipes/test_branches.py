"""`loop.branching`: a real policy and engine, real workers; what is packed, what is refused, what comes back."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import fake_suites
import jax
import numpy as np
import pytest

from agentrl_jax.errors import UserError
from agentrl_jax.learner.score import make_score
from agentrl_jax.models import llama
from agentrl_jax.protocol import EnvironmentRef, ToolCall
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.checks import check, check_environment
from agentrl_jax.recipes.config import Branching, Evaluation, Loop, Rollout, RunConfig, TinyPolicy
from agentrl_jax.recipes.pacing import branch_figures, take_in
from agentrl_jax.recipes.rl import plan_step, rl
from agentrl_jax.recipes.train import open_run, resolve
from agentrl_jax.rl import corrections
from agentrl_jax.rl.algorithms import cispo, grpo
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import collect
from agentrl_jax.rollout.collector import Finished
from agentrl_jax.rollout.packing import pack, used_rows
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Fork, Trajectory
from agentrl_jax.runtime import held
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.interrupts import Interrupts
from agentrl_jax.runtime.publish import publish
from agentrl_jax.runtime.store import Store

sys.path.insert(0, str(Path(__file__).parent))
from test_pacing import a_run, steps_of

BRANCHING = Branching(trunks=2, max_turn=3)
PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def config(place: Path = Path(), **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "steps": 2, "tasks": 4, "group": 6, "objective": grpo(beta=0.0, correction=corrections.truncated()),
        "reward": lexicographic, "width": 384, "micro_rows": 8, "branching": BRANCHING, "max_lag": 1,
    }  # fmt: skip
    return RunConfig(
        name="branches",
        environment=EnvironmentRef(target="fake_suites:counter", options={"retries": 9, "steps": 3, "patient": True}),
        policy=TinyPolicy(layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, vocab_size=400),
        stages=(rl,),
        rollout=Rollout(workers=12, slots=64, context=160, max_turn_tokens=20, bank=8, decode_steps=4, prefill_chunk=8),
        loop=Loop(**settings | changes),
        evaluation=Evaluation(episodes=2, every=0, every_episodes=2),
        store=str(place / "store"),
    )  # fmt: skip


class Rig(NamedTuple):
    """What a run samples with, on one device."""

    policy: policies.Policy
    params: Any
    engine: Engine
    pool: Pool


def ends(policy: policies.Policy) -> tuple[int, ...]:
    """One token in six ends a turn: a random policy would end none."""
    return (*policy.renderer.stop_ids, *range(3, policy.model.vocab_size, 6))


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    _, policy = resolve(config())
    params = jax.jit(lambda key: llama.init(policy.model, key))(jax.random.key(3))
    engine = Engine(
        policy.model, slots=24, context=160, bank=4, prefill_chunk=8, decode_steps=4, stop_ids=ends(policy), seed=1,
        rows=(24,),
    )  # fmt: skip
    with Pool(config().environment, 24, Deadlines(start=60.0, reset=60.0, step=60.0, verify=60.0)) as pool:
        yield Rig(policy, params, engine, pool)


@pytest.fixture(scope="module")
def groups(rig: Rig) -> list[list[Trajectory]]:
    return sampled(rig)


def sampled(rig: Rig) -> list[list[Trajectory]]:
    r, loop = config().rollout, config().loop
    assert loop is not None
    rig.engine.publish(publish(rig.policy.model, rig.params), 1)
    plans, buffer = plan_step(5, 0, loop, fake_suites.tasks("train", 4, 0)), Buffer(loop.group)
    settings: Any = {"max_turn_tokens": r.max_turn_tokens, "temperature": r.temperature}
    for trajectory in collect(plans, rig.engine, rig.pool, rig.policy.renderer, **settings):
        buffer.add(trajectory)
    return buffer.pop(buffer.ready())


def test_the_packed_score_of_branches_is_the_samplers_and_that_of_each_by_itself(rig: Rig, groups: Any) -> None:
    flat = [t for group in groups for t in group]
    branches = [t for t in flat if t.branch is not None]
    assert len(branches) >= 6 and {t.fork.way for t in branches} == {"copied", "replayed"}, "both ways"
    score, params = make_score(policies.scorer(config(), rig.policy), micro_rows=8), jax.device_put(rig.params, PLACE)

    def scored(*packed: Any) -> tuple[Any, np.ndarray]:
        host = pack(*packed, rows=24, width=384, group_size=6, pad_id=0)
        return host, np.asarray(score(params, jax.device_put(host, PLACE), range(0, used_rows(host), 8)))

    host, found = scored(groups)
    own = sum(sum(t.action_mask[t.branch_start :]) for t in flat)
    assert host.action_mask.sum() == own < sum(sum(t.action_mask) for t in flat)
    assert np.abs(found - host.behavior_logprobs)[host.action_mask].max() < 1e-5
    by_place = {}
    for row, column in np.argwhere(host.action_mask):
        place = (int(host.trajectory_ids[row, column]), int(host.positions[row, column]))
        assert place not in by_place
        by_place[place] = found[row, column]
    for p, t in ((p, t) for p, group in enumerate(groups) for t in group):
        alone, logprobs = scored([[replace(t, branch=None, member=0)]])
        assert alone.action_mask.sum() == sum(t.action_mask)
        for row, column in np.argwhere(alone.action_mask):
            at = int(alone.positions[row, column])
            whose = t.branch.member if t.branch is not None and at < t.branch_start else t.member
            assert abs(by_place[p * 6 + whose, at] - logprobs[row, column]) < 1e-5


def test_what_is_sampled_follows_from_the_plan_and_the_params(rig: Rig, groups: Any) -> None:
    again, names = sampled(rig), ("tokens", "behavior_logprobs", "turn_ids", "branch", "stop")
    for one, two in zip(groups, again, strict=True):
        assert [[getattr(t, n) for n in names] for t in one] == [[getattr(t, n) for n in names] for t in two]


@pytest.mark.slow
def test_the_stage_trains_on_branches_and_says_what_they_cost(tmp_path: Path) -> None:
    suite, policy = resolve(config(tmp_path))
    policy.renderer.stop_ids = ends(policy)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        run = open_run(config(tmp_path), suite, policy, tmp_path, stack, interrupts, resume=False, quiet=True)
        run.stage = "rl"
        with jax.transfer_guard("disallow"):
            rl(run)
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    kept = list(Store(str(run.directory / "store")))
    assert len(rows) == 2 and len(kept) == 48
    for step, row in enumerate(rows):
        trained = kept[24 * step : 24 * step + 24]
        assert {name: row[name] for name in branch_figures(trained)} == branch_figures(trained)
        assert row["branches"] >= 4 and row["forks_refused"] == 0 and row["fork_s"] > 0 and row["lag_max"] <= 1
        assert row["trained_tokens"] == sum(sum(t.action_mask[t.branch_start :]) for t in trained if t.valid)


def test_a_refused_replay_is_counted_as_refused_alone() -> None:
    forks = (
        Fork(way="replayed", tokens=7),
        Fork(way="replayed", refused="another answer"),
        Fork(way="copied", tokens=5),
    )
    found: Any = [SimpleNamespace(branch=None if fork.refused else fork, fork=fork) for fork in forks]
    figures = branch_figures(found)
    assert [figures[f"forks_{name}"] for name in ("replayed", "refused")] == [1, 1]
    assert figures["branches"] == 2 and figures["branch_tokens"] == 12


def test_branches_are_drawn_from_seed_step_group_and_member_alone() -> None:
    made, tasks = config().loop, fake_suites.tasks("train", 5, 0)
    assert made is not None
    plans = [plan for step in range(60) for plan in plan_step(3, step, made, tasks)]
    assert plans[24:48] == plan_step(3, 1, made, tasks)
    assert [plan.branch is None for plan in plans] == [m < 2 for _ in range(240) for m in range(6)]
    drawn = [plan.branch for plan in plans if plan.branch is not None]
    assert [b.member for b in drawn[:4]] == [0, 1, 0, 1]
    counts = Counter(b.turn for b in drawn)
    assert set(counts) == {1, 2, 3} and min(counts.values()) > 260, "960 draws, a third each"
    wider = plan_step(3, 1, replace(made, group=8), tasks)
    assert [plan.branch for plan in wider if plan.key[2:] == (1, 5)] == [plans[24 + 11].branch]


def test_a_group_that_a_kill_cut_begins_anew_and_what_was_whole_is_kept(tmp_path: Path) -> None:
    tasks = fake_suites.tasks("train", 5, 0)
    settings = Loop(
        steps=5, tasks=2, group=3, objective=cispo(), reward=lexicographic, max_lag=2,
        branching=Branching(trunks=1, max_turn=2),
    )  # fmt: skip
    trained: list[Trajectory] = []

    def script(request: Any) -> ToolCall:
        return ToolCall(name="finish") if request.key[4] == 2 else ToolCall(name="look")

    with a_run(script, settings.group) as run:
        finished = Finished()
        for step, groups, _ in steps_of(run, settings, tasks, finished):
            trained += [t for group in groups for t in group]
            if step == 1:
                while len(run.buffer) < 12:
                    take_in(run, finished, wait=True)
                held.write(tmp_path / "held", run.buffer.held())
                counts = run.buffer.counts
                break
    left = held.read(tmp_path / "held")  # as a checkpoint keeps them
    assert sum(t.branch is not None for t in left) == 8
    del left[2], left[3]  # of group 4 a branch, of group 5 the trunk: as if they had not been over
    with a_run(script, settings.group, Buffer.of(settings.group, left, counts)) as run:
        for _, groups, figures in steps_of(run, settings, tasks, Finished(), start=2):
            trained += [t for group in groups for t in group]
            assert figures["forks_refused"] == 0 and figures["branches"] == 4
        assert run.buffer.counts["begun_anew"] == 4
    assert [(t.group, t.member) for t in trained] == [(g, m) for g in range(10) for m in range(3)]
    versions = {group: {t.oldest_version for t in trained if t.group == group} for group in (4, 5, 6, 7)}
    assert versions[4] == versions[5] == {3} and all(v < 3 for g in (6, 7) for v in versions[g]), "anew, and kept"
    for group in range(10):
        source, *branches = (t for t in trained if t.group == group)
        assert all(t.branch and t.tokens[: t.branch_start] == source.tokens[: t.branch_start] for t in branches)
        assert all(t.policy_versions[: t.branch_start] == source.policy_versions[: t.branch_start] for t in branches)


@pytest.mark.parametrize(
    ("branching", "words"),
    [
        (Branching(trunks=0, max_turn=2), "loop.branching.trunks=0: expected 1 to 5, so that of loop.group=6 members"),
        (Branching(trunks=6, max_turn=2), "loop.branching.trunks=6: expected 1 to 5"),
        (Branching(trunks=1, max_turn=0), "loop.branching.max_turn=0: expected the latest turn to branch before"),
    ],
)
def test_what_makes_no_sense_is_refused(branching: Branching, words: str) -> None:
    check(config())
    with pytest.raises(UserError) as caught:
        check(config(branching=branching))
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)


def test_an_environment_without_forks_is_refused() -> None:
    check_environment(config(), fake_suites.counter())
    with pytest.raises(UserError, match=r"loop\.branching: the states of the environment 'counter' cannot be copied"):
        check_environment(config(), fake_suites.counter(fork="none"))
    check_environment(config(branching=None), fake_suites.counter(fork="none"))
