"""One step of the stage, taken apart: plans, outcomes, credit; and what a policy learns from hangs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import fake_suites
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedSampler

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import (
    Attribution,
    Cause,
    EnvironmentRef,
    StopReason,
    ToolCall,
    Verdict,
)
from agentrl_jax.recipes.config import Loop, Rollout
from agentrl_jax.recipes.pacing import roll_out
from agentrl_jax.recipes.rl import (
    Outcomes,
    is_constant,
    make_credit,
    plan_step,
    read_outcomes,
    refuse_wrong,
    step_figures,
)
from agentrl_jax.rl.algorithms import dapo, grpo
from agentrl_jax.rl.rewards import decided, lexicographic
from agentrl_jax.rollout.collect import EpisodePlan, collect, play
from agentrl_jax.rollout.collector import Finished
from agentrl_jax.rollout.packing import pack
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime.hosts import Hosts

ADD, FINISH, HANG = (
    ToolCall(name="add", arguments={"n": 3}),
    ToolCall(name="finish"),
    ToolCall(name="break", arguments={"how": "hang"}),
)


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)


def loop(**changes: object) -> Loop:
    settings = {"tasks": 1, "group": 4, "objective": grpo(beta=0.0), "reward": lexicographic, "width": 64}
    return Loop(**{**settings, **changes})  # type: ignore[arg-type]


def member(renderer: ChatRenderer, index: int, verdict: Verdict | None, **changes: object) -> Trajectory:
    suite = fake_suites.counter()
    script = [ADD] * (1 + index % 2) + [FINISH]
    played = play(suite, renderer, suite.tasks("train", 3, 0)[2], script, 0, member=index)
    return replace(played, verdict=verdict, **changes)  # type: ignore[arg-type]


def credit(group: list[Trajectory], settings: Loop) -> tuple:
    outcomes = read_outcomes([group], settings)
    batch = pack([group], rows=4, width=64, group_size=4, pad_id=0)
    return (*make_credit(settings)(jax.tree.map(jnp.asarray, batch), outcomes), batch, outcomes)


def test_p15_a_truncated_trajectory_leaves_the_loss_and_the_denominators(renderer: ChatRenderer) -> None:
    verdicts = [Verdict(outcome=value) for value in (True, False, True, False)]
    group = [member(renderer, i, v) for i, v in enumerate(verdicts)]
    group[3] = replace(group[3], stop=StopReason.TOKEN_CAP)
    settings = loop(objective=dapo(), train_truncated=False)
    batch, _, advantages, _, host, _ = credit(group, settings)
    ids, mask = host.trajectory_ids, host.action_mask
    weights = np.asarray(batch.weights)
    assert (weights[mask & (ids == 3)] == 0).all()
    kept = mask & (ids != 3)
    np.testing.assert_allclose(weights[kept], 1 / kept.sum(), rtol=1e-6)
    assert advantages[0, 3] != 0, "it still counts in the baseline"


def test_p41_an_unscored_member_leaves_the_baseline_and_is_counted(renderer: ChatRenderer) -> None:
    verdicts = [Verdict(outcome=True), Verdict(), Verdict(outcome=False), Verdict(outcome=False)]
    group = [member(renderer, i, v) for i, v in enumerate(verdicts)]
    batch, rewards, advantages, _, host, outcomes = credit(group, loop(objective=dapo()))
    assert outcomes.valid.tolist() == [[True, False, True, True]]
    assert advantages[0, 1] == 0 and (np.asarray(batch.weights)[host.trajectory_ids == 1] == 0).all()
    np.testing.assert_allclose(float(advantages[0].sum()), 0.0, atol=1e-6)
    assert step_figures([group], outcomes, np.asarray(rewards))["unscored"] == 1


def test_p41_a_reward_that_is_no_number_stops_the_run_and_names_the_trajectory(renderer: ChatRenderer) -> None:
    group = [
        member(renderer, i, Verdict(outcome=True, quality=quality)) for i, quality in enumerate((0.5, float("nan")))
    ]
    settings = loop(group=2)
    outcomes = read_outcomes([group], settings)
    batch = pack([group], rows=4, width=64, group_size=2, pad_id=0)
    _, rewards, _, _ = make_credit(settings)(jax.tree.map(jnp.asarray, batch), outcomes)
    with pytest.raises(UserError, match=f"{group[1].task.id}' member 1: nan"):
        refuse_wrong([group], np.asarray(rewards), outcomes.valid)


def test_an_environments_failure_enters_no_baseline(renderer: ChatRenderer) -> None:
    group = [member(renderer, i, Verdict(outcome=value)) for i, value in enumerate((True, False, True, False))]
    blamed = Attribution(cause=Cause.ENVIRONMENT, evidence="the worker died and a replay did not")
    group[3] = replace(group[3], attribution=blamed)
    _, _, advantages, _, _, _ = credit(group, loop(objective=grpo(beta=0.0, eps=1e-6)))
    alone = grpo(beta=0.0).advantage(jnp.asarray([1.0, 0.0, 1.0]), jnp.ones(3, bool))
    np.testing.assert_allclose(np.asarray(advantages[0, :3]), np.asarray(alone), rtol=1e-5)
    assert advantages[0, 3] == 0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=1, max_size=6))
def test_the_host_and_the_device_agree_on_which_groups_have_no_signal(members: list[tuple[bool, float, bool]]) -> None:
    violated, outcome, valid = (np.asarray(column)[None] for column in zip(*members, strict=True))
    outcomes = Outcomes(violated, outcome.astype(np.float32), np.zeros_like(outcome), valid, valid)
    on_device = decided(*map(jnp.asarray, (violated[0], outcomes.outcome[0], valid[0])))
    assert is_constant(outcomes, 0) == (not bool(on_device))


def test_quality_alone_moves_nothing(renderer: ChatRenderer) -> None:
    group = [member(renderer, i, Verdict(outcome=True, quality=i / 4)) for i in range(4)]
    batch, rewards, advantages, _, _, outcomes = credit(group, loop())
    assert is_constant(outcomes, 0) and len(set(np.asarray(rewards[0]).tolist())) == 4
    assert not np.asarray(advantages).any() and not np.asarray(batch.advantages).any()


def test_a_violation_ranks_below_a_failure_and_quality_buys_nothing_back() -> None:
    reward = partial(lexicographic, broken=-0.5)
    violated = jnp.asarray([True, False, False, False])
    outcome, quality = jnp.asarray([1.0, 0.0, 1.0, 1.0]), jnp.asarray([1.0, 1.0, 0.0, 1.0])
    ranked = np.asarray(reward(violated, outcome, quality)).tolist()
    assert ranked == sorted(ranked) and len(set(ranked)) == 4


def test_p58_plans_are_a_function_of_seed_and_step_and_keys_are_unique() -> None:
    tasks = fake_suites.tasks("train", 5, 0)
    settings = loop(tasks=2)
    steps = [plan_step(7, step, settings, tasks) for step in range(6)]
    assert steps[3] == plan_step(7, 3, settings, tasks)
    keys = [(plan.key) for step in steps for plan in step]
    assert len(set(keys)) == len(keys)
    seen = [plan.task.id for step in steps for plan in step if plan.member == 0]
    assert set(seen[:5]) == {task.id for task in tasks} == set(seen[5:10]), "an epoch is a permutation"


def test_p21_hanging_is_no_way_out(renderer: ChatRenderer) -> None:
    """A policy over {solve, fail, hang} trained with the real pool: a hang never becomes more likely."""
    ref = EnvironmentRef(target="fake_suites:counter", options={})
    settings = loop(group=8, width=128)
    logits = jnp.zeros(3)
    turns = ([ADD, FINISH], [FINISH, FINISH], [HANG, FINISH])
    rng, chances = np.random.default_rng(3), []
    suite_task = fake_suites.tasks("train", 3, 0)[2]
    with Pool(ref, 8, Deadlines(start=60.0, reset=30.0, step=0.5, verify=30.0)) as pool:
        for step in range(4):
            chances.append(float(jax.nn.softmax(logits)[2]))
            chance = np.exp(np.asarray(logits, np.float64))
            arms = rng.choice(3, size=8, p=chance / chance.sum())
            sampler = ScriptedSampler(renderer, lambda r, arms=arms: turns[arms[r.key[1]]][r.key[2]], slots=8)
            plans = [EpisodePlan(group=0, member=m, task=suite_task, seed=step, key=(step, m)) for m in range(8)]
            done = sorted(
                collect(plans, sampler, pool, renderer, max_turn_tokens=32, temperature=1.0), key=lambda t: t.member
            )
            causes = [t.attribution.cause if t.attribution else None for t in done]
            assert causes == [Cause.POLICY if arm == 2 else None for arm in arms]
            outcomes = read_outcomes([done], settings)
            advantages = settings.objective.advantage(jnp.asarray(outcomes.outcome[0]), jnp.asarray(outcomes.valid[0]))
            grad = jax.grad(lambda x, a=arms, adv=advantages: jnp.mean(adv * jax.nn.log_softmax(x)[a]))(logits)
            logits = logits + 0.5 * grad
        figures = step_figures([done], outcomes, outcomes.outcome)
    chances.append(float(jax.nn.softmax(logits)[2]))
    assert chances[-1] < chances[0] and all(b <= a + 1e-6 for a, b in pairwise(chances))
    assert figures["stops"].get("timeout", 0) == int((arms == 2).sum())


def test_a_server_that_goes_back_to_older_params_stops_the_run(renderer: ChatRenderer) -> None:
    groups = [[member(renderer, i, None, policy_versions=(version,)) for i, version in enumerate((3, 3, 2, 3))]]
    held: Any = SimpleNamespace(complete=lambda groups: True, pop=lambda groups_: groups)
    run: Any = SimpleNamespace(
        buffer=held, version=3, hosts=Hosts(),
        config=SimpleNamespace(rollout=Rollout(max_failure_fraction=1, min_valid_fraction=0)),
        clock=SimpleNamespace(phase=lambda name: nullcontext()),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"1 of 4 episodes were sampled by older params than loop\.max_lag=0"):
        roll_out(run, loop(), [], Finished())
    _, figures = roll_out(run, loop(max_lag=1), [], Finished())
    assert (figures["lag_mean"], figures["lag_max"]) == (0.25, 1)
