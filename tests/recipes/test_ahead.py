"""The stage with rollouts in a thread of their own, against the loop in one thread: a real policy, real workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_suites
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agentrl_jax.recipes.rl as stage
from agentrl_jax.learner.placement import placed
from agentrl_jax.learner.score import make_score
from agentrl_jax.learner.state import init_state
from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes.config import Evaluation, Loop, Rollout, RunConfig, TinyPolicy
from agentrl_jax.recipes.rl import assemble, make_credit, optimizer_of, plan_step, rl, update_of
from agentrl_jax.recipes.run import Run
from agentrl_jax.recipes.train import open_run, resolve
from agentrl_jax.rl import corrections
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import collect
from agentrl_jax.rollout.packing import used_rows
from agentrl_jax.runtime.interrupts import Interrupts
from agentrl_jax.runtime.publish import publish
from agentrl_jax.runtime.store import Store

STEPS = 4


def config(place: Path) -> RunConfig:
    corrected = replace(grpo(beta=0.0, correction=corrections.truncated()), entropy_coef=0.01)
    return RunConfig(
        name="ahead",
        environment=EnvironmentRef(target="fake_suites:counter"),
        policy=TinyPolicy(layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, vocab_size=400),
        stages=(rl,),
        rollout=Rollout(workers=8, slots=8, context=64, max_turn_tokens=6, bank=8, decode_steps=4),
        loop=Loop(
            steps=STEPS, tasks=2, group=4, objective=corrected, reward=lexicographic, width=64, micro_rows=8,
            learning_rate=0.01,
        ),
        evaluation=Evaluation(episodes=4, every=2, every_episodes=4),
        store=str(place / "store"),
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = config(tmp_path)
    suite, policy = resolve(made)
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        run = open_run(made, suite, policy, tmp_path, stack, interrupts, resume=False, quiet=True)
        run.stage = "rl"
        yield run


def copied(params: Any) -> Any:
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed(params))(params)


def in_turn(run: Run, loop: Loop, update: Any, credit: Any, score: Any) -> Any:
    """The synchronous loop in one thread: every episode of a step, then its update. Returns the params."""
    r, objective, everywhere = run.config.rollout, loop.objective, run.everywhere
    assert objective.correction is not None and objective.kl is None
    state = init_state(optimizer_of(loop), copied(run.params))
    tasks = list(run.suite.tasks("train", loop.train_tasks, run.config.seed))
    for step in range(loop.steps):
        run.engine.publish(publish(run.policy.model, state.params), step + 1)
        plans, buffer = plan_step(run.config.seed, step, loop, tasks), Buffer(loop.group)
        settings: Any = {"max_turn_tokens": r.max_turn_tokens, "temperature": r.temperature}
        for trajectory in collect(plans, run.engine, run.pool, run.policy.renderer, **settings):
            buffer.add(trajectory)
        host, outcomes = assemble(run, loop, buffer.pop(buffer.ready()))
        batch, micro = jax.device_put(host, run.rows), range(0, max(8, used_rows(host)), 8)
        batch = batch._replace(old_logprobs=score(state.params, batch, micro))
        batch, *_ = credit(batch, jax.device_put(outcomes, everywhere))
        state, _ = update.step(state, batch, micro)
    return jax.device_get(state.params)


def test_without_lag_it_is_the_synchronous_loop_bit_for_bit_and_with_it_nothing_is_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.config.loop is not None
    loop, begun = run.config.loop, copied(run.params)
    update, credit, score = update_of(loop, run.scorer), make_credit(loop), make_score(run.scorer, micro_rows=8)
    expected = in_turn(run, loop, update, credit, score)
    for name, compiled in (("update_of", update), ("make_credit", credit), ("make_score", score)):
        monkeypatch.setattr(stage, name, lambda *_, compiled=compiled, **__: compiled)
    with jax.transfer_guard("disallow"):
        rl(run)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.params), expected)

    run.params, run.step, run.config = begun, 0, replace(run.config, loop=replace(loop, max_lag=2))
    with jax.transfer_guard("disallow"):
        rl(run)
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    in_turn_rows, ahead_rows = (
        [json.loads(line) for line in lines[:STEPS]],
        [json.loads(line) for line in lines[STEPS:]],
    )
    assert all(row["lag_max"] == 0 for row in in_turn_rows)
    assert [row["lag_max"] <= 2 and 0 <= row["learner_idle"] <= 1 for row in ahead_rows] == [True] * STEPS
    assert run.store is not None
    trained = [(t.group, t.member) for t in Store(str(run.directory / "store"))]
    assert trained == [(group, member) for group in range(2 * STEPS) for member in range(4)] * 2
    evaluations = [json.loads(line) for line in (run.directory / "evaluations.jsonl").read_text().splitlines()]
    assert [row["episodes"] for row in evaluations] == [4, 4], "one in the middle of each"


assert fake_suites.TOOLS  # the module the workers import by name is the one this test sees
