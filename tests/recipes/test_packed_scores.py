"""P03: what the sampler says of its tokens is what the learner's packed score says, however the rows are cut."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fake_suites
import jax
import numpy as np
import pytest

from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.score import make_score
from agentrl_jax.learner.state import init_state
from agentrl_jax.learner.update import make_update
from agentrl_jax.models import llama
from agentrl_jax.protocol import Message, Observation, StopReason, Task, Verdict
from agentrl_jax.recipes import policy as policies
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.objective import assign, policy_loss
from agentrl_jax.rollout.episode import Act, Ask, Episode, EpisodePlan
from agentrl_jax.rollout.packing import pack
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.publish import publish

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import small_config

GROUPS, GROUP, TURNS, TEMPERATURE = 2, 4, 3, 0.8
PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@cache
def parts() -> tuple[Any, policies.Policy, Any]:
    """(config, policy, params) of a random policy that speaks to the counter."""
    small = small_config.config()
    config = replace(small, rollout=replace(small.rollout, temperature=TEMPERATURE), logprob_chunk=64)
    renderer = ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
    model = llama.LlamaConfig(
        vocab_size=renderer.vocab_size, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=64, context=256
    )
    params = jax.jit(lambda key: llama.init(model, key))(jax.random.key(3))
    return config, policies.Policy(model, renderer.tokenizer, renderer), params


@cache
def groups() -> tuple[tuple[Trajectory, ...], ...]:
    """Episodes of three turns from the engine; one token in six ends a turn, since a random policy ends none."""
    _, policy, params = parts()
    ends = {*range(3, policy.model.vocab_size, 6), *policy.renderer.stop_ids}
    engine = Engine(
        policy.model, slots=GROUPS * GROUP, context=160, bank=2, prefill_chunk=16, decode_steps=4,
        stop_ids=tuple(ends), seed=1,
    )  # fmt: skip
    engine.publish(publish(policy.model, params), 1)
    spec = fake_suites.counter().spec
    found = []
    for p in range(GROUPS):
        task = Task(id=f"t{p}", split="train", data={"goal": 5 + p})
        plans = [EpisodePlan(group=p, member=m, task=task, seed=0, key=(p, m)) for m in range(GROUP)]
        found.append(tuple(played(engine, Episode(plan, spec, policy.renderer, max_turn_tokens=30)) for plan in plans))
    return tuple(found)


def played(engine: Engine, episode: Episode) -> Trajectory:
    plan = episode.plan
    slot = plan.group * GROUP + plan.member
    rules = Message(role="system", content="you count .")
    move: Any = episode.begin(Observation(content=(rules, Message(role="user", content=f"count to {plan.group}"))))
    while isinstance(move, Ask) and move.turn < TURNS:
        engine.submit(
            SampleRequest(
                slot=slot, key=(*plan.key, move.turn), ids=move.ids, fresh=move.fresh, max_tokens=move.max_tokens,
                temperature=TEMPERATURE,
            )
        )  # fmt: skip
        samples: list[Any] = []
        while engine.busy:
            samples += engine.advance()
        move = episode.on_sample(samples[0])
        if isinstance(move, Act):
            move = episode.on_observation(Observation(content=(Message(role="tool", content="now 1 2"),)), 1.0)
    episode.give_up(StopReason.BUDGET)
    verdict = Verdict(outcome=plan.member % 2 == 0)
    return episode.trajectory(verdict, None, verifier_version="1")


def packed(rows: int, width: int) -> Any:
    return pack(groups(), rows=rows, width=width, group_size=GROUP, pad_id=0)


def test_the_episodes_have_three_turns_of_their_own_length() -> None:
    flat = [t for group in groups() for t in group]
    turns = [{turn for turn, acts in zip(t.turn_ids, t.action_mask, strict=True) if acts} for t in flat]
    three = [found for found in turns if found == {0, 1, 2}]
    assert len(three) >= 4 and len({len(t.tokens) for t in flat}) > 4


@pytest.mark.parametrize(("rows", "width", "micro_rows"), [(8, 160, 1), (8, 160, 4), (4, 224, 2), (2, 512, 2)])
def test_p03_the_packed_score_is_the_samplers(rows: int, width: int, micro_rows: int) -> None:
    config, policy, params = parts()
    host = packed(rows, width)
    score = make_score(policies.scorer(config, policy), micro_rows=micro_rows)
    found = np.asarray(score(jax.device_put(params, PLACE), jax.device_put(host, PLACE)))
    assert host.action_mask.sum() == sum(sum(t.action_mask) for group in groups() for t in group)
    assert (found[~host.action_mask] == 0).all()
    difference = np.abs(found - host.behavior_logprobs)[host.action_mask]
    assert difference.max() < 1e-5  # the bar is 1e-4


@pytest.mark.parametrize(("rows", "width", "micro_rows"), [(8, 160, 2), (2, 512, 1)])
def test_p03_the_ratio_of_the_first_update_is_one(rows: int, width: int, micro_rows: int) -> None:
    config, policy, params = parts()
    objective = grpo(beta=0.0)
    rewards = np.tile(np.asarray([1, 0, 1, 0], np.float32), (GROUPS, 1))
    batch = jax.device_put(packed(rows, width), PLACE)
    batch = jax.jit(lambda b: assign(objective, b, rewards, rewards >= 0, rewards >= 0))(batch)
    optimizer = adamw(1e-3, warmup=0, total=4, schedule="constant", weight_decay=0.0, max_grad_norm=1.0)
    update = make_update(
        policies.scorer(config, policy), lambda *of: policy_loss(objective, *of), optimizer, micro_rows=micro_rows
    )
    state = init_state(optimizer, jax.device_put(jax.tree.map(np.asarray, params), PLACE))
    _, info = update.step(state, batch, range(0, rows, micro_rows))
    figures = info.to_host()
    assert figures["finite"] and figures["grad_norm"] > 0
    assert figures["ratio_deviation_max"] < 1e-5
