"""Branches as the driver makes them, with the credit that compares them: on the tokens of who took each turn, once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import fake_suites
import jax
import jax.numpy as jnp
import numpy as np
from scripted import ScriptedSampler, by_turn

from agentrl_jax.protocol import EnvironmentRef, ToolCall
from agentrl_jax.recipes.config import Branching, Loop
from agentrl_jax.recipes.rl import make_credit, read_outcomes
from agentrl_jax.recipes.turn_credit import check_credit
from agentrl_jax.rl.algorithms import rloo
from agentrl_jax.rl.objective import credit_only
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.rl.turns import branch_credit
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.packing import pack
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Branch
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.rollout.turns import read_turns

ONE, TWO, FINISH = (
    ToolCall(name="add", arguments={"n": 1}),
    ToolCall(name="add", arguments={"n": 2}),
    ToolCall(name="finish"),
)
# The goal is 3. 0 gets there by 2 + 1, 2 leaves it before its second turn and misses; 1 misses, 3 leaves it before its
# last turn and gets there.
SCRIPTS = {0: [TWO, ONE, FINISH], 1: [ONE, ONE, FINISH], 2: ["-", TWO, FINISH], 3: ["-", "-", ONE, FINISH]}
LEFT = {2: (0, 1), 3: (1, 2)}


def test_a_turn_that_branches_share_is_paid_once_for_all_that_came_of_it() -> None:
    renderer = ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
    task = fake_suites.tasks("train", 3, 0)[2]
    plans: list[Any] = [
        EpisodePlan(
            group=0, member=m, task=task, seed=0, key=(0, m),
            branch=Branch(member=LEFT[m][0], turn=LEFT[m][1]) if m in LEFT else None,
        )
        for m in SCRIPTS
    ]  # fmt: skip
    sampler = ScriptedSampler(renderer, by_turn(SCRIPTS), slots=4)
    deadlines = Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)
    with Pool(EnvironmentRef(target="fake_suites:counter"), 4, deadlines) as pool:
        found = list(collect(plans, sampler, pool, renderer, max_turn_tokens=16, temperature=1.0, stall_s=120.0))
    group = sorted(found, key=lambda t: t.member)
    assert [t.success for t in group] == [True, False, False, True]
    settings: Any = {"branching": Branching(trunks=2, max_turn=2), "credit": branch_credit}
    loop = Loop(
        tasks=1, group=4, objective=replace(rloo(), advantage=credit_only), width=128,
        reward=partial(lexicographic, quality_scale=0.0), **settings,
    )  # fmt: skip
    check_credit(loop)
    turns = read_turns([group], group_size=4, most=5)
    assert turns.branch_turn.tolist() == [[-1, -1, 1, 2]] and turns.valid[0].sum(-1).tolist() == [3, 3, 2, 2]
    assert turns.state_ids[0, 2, 1] == turns.state_ids[0, 0, 1] and turns.state_ids[0, 3, 2] == turns.state_ids[0, 1, 2]
    host = pack([group], rows=4, width=128, group_size=4, pad_id=0)
    outcomes = read_outcomes([group], loop)._replace(turns=turns)
    batch, *_, per_turn = make_credit(loop)(jax.tree.map(jnp.asarray, host), outcomes)
    # Start: 0's way came to 1 and 0, 1's to 0 and 1. Before turn 1 of 0: 1 beside 0. Before turn 2 of 1: 0 beside 1.
    np.testing.assert_allclose(
        per_turn[0], [[0, 1, 1, 0, 0], [0, 0, -1, 0, 0], [0, -1, -1, 0, 0], [0, 0, 1, 1, 0]], atol=1e-6
    )
    for member in range(4):
        for turn in range(4):
            tokens = host.action_mask & (host.trajectory_ids == member) & (host.turn_ids == turn)
            assert tokens.any() == turns.valid[0, member, turn], "whoever took it has its tokens"
            np.testing.assert_allclose(np.asarray(batch.advantages)[tokens], per_turn[0, member, turn], atol=1e-6)
