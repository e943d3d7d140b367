"""Credit of turns in the stage: on the tokens it belongs to, over processes, in a real run; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_suites
import jax
import jax.numpy as jnp
import measured_suite
import numpy as np
import pytest

from agentrl_jax.batch import GroupTurns, TokenBatch
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Check, EnvironmentRef, ToolCall, Verdict
from agentrl_jax.recipes import shares
from agentrl_jax.recipes.config import Evaluation, Loop, Rollout, RunConfig, TinyPolicy
from agentrl_jax.recipes.rl import Outcomes, make_credit, read_outcomes, rl
from agentrl_jax.recipes.run import Run
from agentrl_jax.recipes.train import open_run, resolve
from agentrl_jax.recipes.turn_credit import (
    check_credit,
    lives_on_evidence,
    potential_error,
    read_step,
    refuse_endless,
    still_blind,
    turn_figures,
    turns_together,
)
from agentrl_jax.rl.algorithms import grpo, rloo
from agentrl_jax.rl.objective import credit_only
from agentrl_jax.rl.potentials import check_conservation
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.rl.turns import added, branch_credit, potential_credit, rtmc_credit, step_credit
from agentrl_jax.rollout.packing import pack
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime.hosts import Hosts
from agentrl_jax.runtime.interrupts import Interrupts

ONE, TWO = ToolCall(name="look"), ToolCall(name="add", arguments={"n": 1})
GROUP = 4


def loop(**changes: Any) -> Loop:
    objective = grpo(beta=0.0)
    return Loop(**{"tasks": 2, "group": GROUP, "objective": objective, "reward": lexicographic, "width": 64, **changes})


@pytest.fixture(scope="module")
def groups() -> list[list[Trajectory]]:
    """Two groups: their first turns differ or not, and one member of the second broke a constraint."""
    renderer = ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
    suite = measured_suite.suite()
    tasks = suite.tasks("train", 2, 0)
    scripts = ([ONE, ONE, TWO], [ONE, TWO, TWO], [TWO, ONE, ONE], [ONE, ONE, ONE])

    def one(group: int, member: int) -> Trajectory:
        t = play(suite, renderer, tasks[group], scripts[member], 0, group=group, member=member)
        broken = (Check(name="polite", passed=(group, member) != (1, 2)),)
        return replace(t, verdict=Verdict(outcome=member in (0, 2), constraints=broken))

    return [[one(group, member) for member in range(GROUP)] for group in range(2)]


def process(index: int = 0, count: int = 1, exchange: Any = None) -> Any:
    hosts = Hosts()
    hosts.index, hosts.count = index, count
    if exchange is not None:
        hosts.exchange = exchange  # type: ignore[method-assign]
    return hosts


def run_of(hosts: Hosts) -> Any:
    return SimpleNamespace(hosts=hosts, suite=measured_suite.suite())


def credited(
    groups: list[list[Trajectory]], settings: Loop
) -> tuple[TokenBatch, TokenBatch, Outcomes, np.ndarray, Any]:
    outcomes = read_outcomes(groups, settings)._replace(turns=read_step(run_of(process()), settings, groups))
    host = pack(groups, rows=8, width=64, group_size=GROUP, pad_id=0)
    batch, _, advantages, per_turn = make_credit(settings)(jax.tree.map(jnp.asarray, host), outcomes)
    return host, jax.tree.map(np.asarray, batch), outcomes, np.asarray(advantages), np.asarray(per_turn)


def test_a_token_has_its_episodes_advantage_and_the_credit_of_its_turn(groups: list[list[Trajectory]]) -> None:
    host, batch, outcomes, advantages, per_turn = credited(groups, loop(credit=potential_credit(scale=0.2)))
    gains = outcomes.turns.gains
    assert per_turn.shape == (2, GROUP, 4) and gains.any() and not outcomes.turns.valid[..., 3].any()
    for n in range(2 * GROUP):
        p, g = divmod(n, GROUP)
        for k in range(3):
            tokens = host.action_mask & (host.trajectory_ids == n) & (host.turn_ids == k)
            paid = 0.0 if (p, g) == (1, 2) else 0.2 * gains[p, g, k]
            np.testing.assert_allclose(batch.advantages[tokens], advantages[p, g] + paid, rtol=1e-5)
            assert tokens.any() and per_turn[p, g, k] == np.float32(paid)
    assert not batch.advantages[~host.action_mask].any()


def test_no_credit_and_no_places_leave_the_episodes_advantage(groups: list[list[Trajectory]]) -> None:
    plain = make_credit(loop())(
        jax.tree.map(jnp.asarray, pack(groups, rows=8, width=64, group_size=GROUP, pad_id=0)),
        read_outcomes(groups, loop()),
    )
    assert plain[3] is None
    _, batch, outcomes, _, per_turn = credited(groups, loop(credit=step_credit(), most_turns=1))
    assert per_turn.shape == (2, GROUP, 1) and turn_figures(outcomes.turns, per_turn, outcomes.valid)["turns_cut"] == 16
    later = (batch.turn_ids > 0) & batch.action_mask
    np.testing.assert_array_equal(batch.advantages[later], np.asarray(plain[0].advantages)[later])


def test_a_credit_in_place_of_the_episodes(groups: list[list[Trajectory]]) -> None:
    """Without a branch `branch_credit` alone is RLOO."""
    alone = replace(rloo(), advantage=credit_only)
    _, batch, *_ = credited(groups, loop(objective=alone, credit=branch_credit))
    expected, *_ = make_credit(loop(objective=rloo()))(
        jax.tree.map(jnp.asarray, pack(groups, rows=8, width=64, group_size=GROUP, pad_id=0)),
        read_outcomes(groups, loop()),
    )
    np.testing.assert_allclose(batch.advantages, expected.advantages, atol=1e-6)
    np.testing.assert_allclose(batch.weights, expected.weights)


def test_where_only_quality_differs_credit_by_outcome_moves_nothing(groups: list[list[Trajectory]]) -> None:
    same = [[replace(t, verdict=Verdict(outcome=True, quality=t.member / 4)) for t in group] for group in groups]
    _, batch, *_ = credited(same, loop(credit=step_credit(gamma=1.0)))
    assert not batch.advantages.any()


@pytest.mark.parametrize("count", [2])
def test_processes_read_their_own_groups_and_credit_as_one(groups: list[list[Trajectory]], count: int) -> None:
    settings = loop(credit=added(potential_credit(scale=0.2), step_credit()))
    whole = read_step(run_of(process()), settings, groups)
    assert whole is not None
    told: list[Any] = []
    for k in range(count):
        seen = [g if p in process(k, count).share(2) else [shares.outline(t) for t in g] for p, g in enumerate(groups)]
        read_step(run_of(process(k, count, lambda value: told.append(value) or [value])), settings, seen)
    told = json.loads(json.dumps(told))  # as it travels
    mine = read_step(run_of(process()), settings, groups[:1])
    assert mine is not None
    for name, field in turns_together(process(0, count, lambda _: told), mine)._asdict().items():
        np.testing.assert_array_equal(field, getattr(whole, name), err_msg=name)
        assert field.dtype == getattr(whole, name).dtype


def test_figures_of_turns(groups: list[list[Trajectory]]) -> None:
    _, _, outcomes, _, per_turn = credited(groups, loop(credit=potential_credit(scale=0.2)))
    turns = outcomes.turns
    figures = turn_figures(turns, per_turn, outcomes.valid)
    assert (figures["turns"], figures["turns_cut"], figures["turns_measured"]) == (24, 0, 1.0)
    # The start is shared by 4, look by 3, look look by 2.
    assert figures["turns_shared"] == round(9 / 12, 4) and figures["potential_error"] < 1e-6
    np.testing.assert_allclose(figures["turn_credit"], np.abs(per_turn).sum() / 24, rtol=1e-5)
    errors = [
        check_conservation(turns.gains[p, g], turns.potentials[p, g], turns.valid[p, g], gamma=1.0, terminated=False)
        for p, g in np.ndindex(2, GROUP)
    ]
    assert errors == [None] * 8, "what turns gained is what their potentials say"
    apart = turns._replace(potentials=turns.potentials * 2)
    np.testing.assert_allclose(potential_error(apart), turns.gains.sum(-1).max(), rtol=1e-6)
    assert turn_figures(None, None, outcomes.valid) == {}
    per_turn = np.where(turns.gains > 0, np.float32("nan"), per_turn)
    with pytest.raises(UserError, match=r"loop\.credit gave nan for turn . of member . of group 0"):
        refuse_endless(per_turn)


def test_a_credit_by_evidence_needs_an_environment_that_measures_it(groups: list[list[Trajectory]]) -> None:
    settings = loop(credit=potential_credit(scale=0.2))
    assert lives_on_evidence(settings)
    assert not lives_on_evidence(loop(credit=step_credit())) and not lives_on_evidence(loop())
    turns = read_step(run_of(process()), settings, groups)
    assert turns is not None and not still_blind("measured", turns)
    unmeasured = turns._replace(measured=np.zeros_like(turns.measured))
    with pytest.raises(
        UserError, match="environment 'mute' measured it at none of the first 24 turns that it answered"
    ):
        still_blind("mute", unmeasured)
    nothing_said = unmeasured._replace(answered=np.zeros_like(turns.answered))
    assert still_blind("mute", nothing_said), "a policy that cannot act yet says nothing about the environment"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing trains": (
        {"objective": replace(grpo(beta=0.0), advantage=credit_only)},
        "nothing trains without loop.cre",
    ),
    "no effect of states": ({"same_state": "observation"}, "loop.same_state='observation' has no effect without"),
    "no effect of places": ({"most_turns": 3}, "loop.most_turns=3 has no effect without loop.credit"),
    "no states in it": (
        {"same_state": "observation", "credit": potential_credit(scale=1.0)},
        "loop.same_state='observation' has no effect: loop.credit does not look at states",
    ),
    "the outcome twice": ({"credit": rtmc_credit()}, "it would count twice"),
    "the outcome never": (
        {"credit": potential_credit(scale=1.0), "objective": replace(grpo(beta=0.0), advantage=credit_only)},
        "outcome would not train",
    ),
    "nothing branches": (
        {"credit": branch_credit, "objective": replace(grpo(beta=0.0), advantage=credit_only)},
        "no episode branches without loop.branching",
    ),
    "groups that would still train": (
        {"credit": potential_credit(scale=1.0), "skip_constant_groups": True},
        "drops groups that loop.credit would still train",
    ),
    "of another shape": ({"credit": lambda turns, rewards, valid: rewards}, r"expected f32\[G, K\]"),
    "of nothing": (
        {"credit": lambda turns, rewards, valid: jnp.where(turns.valid, 1.0, 0.0)},
        "depends on neither turns nor rewards",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_effect_or_counts_wrongly_is_refused(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        check_credit(loop(**changes))


def test_what_goes_together_passes() -> None:
    alone = replace(grpo(beta=0.0), advantage=credit_only)
    for settings in (
        loop(),
        loop(credit=potential_credit(scale=0.1)),
        loop(credit=step_credit(), same_state="observation", skip_constant_groups=True),
        loop(credit=added(rtmc_credit(), potential_credit(scale=0.1)), objective=alone, most_turns=3),
        loop(credit=rtmc_credit(prior_count=0.0)),
    ):
        check_credit(settings)


# -- a real run --------------------------------------------------------------------------------------------------------


def config(place: Path, suite: str, **changes: Any) -> RunConfig:
    """Of the sizes of `test_ahead`, whose compiled functions serve here too."""
    return RunConfig(
        name="turns",
        environment=EnvironmentRef(target=suite),
        policy=TinyPolicy(layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, vocab_size=400),
        stages=(rl,),
        rollout=Rollout(workers=8, slots=8, context=64, max_turn_tokens=6, bank=8, decode_steps=4),
        loop=loop(steps=2, micro_rows=8, learning_rate=0.01, **changes),
        evaluation=Evaluation(episodes=4, every=0, every_episodes=4),
    )


@pytest.fixture
def open_(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def opened(suite: str, **changes: Any) -> Run:
            made = config(tmp_path, suite, **changes)
            found, policy = resolve(made)
            renderer: Any = policy.renderer  # random parameters seldom end a turn: here one token in nine does
            renderer.stop_ids = (renderer.end_id, *range(40, 64))
            interrupts = stack.enter_context(Interrupts())
            run = open_run(made, found, policy, tmp_path, stack, interrupts, resume=False, quiet=True)
            run.stage = "rl"
            return run

        yield opened


def test_the_stage_trains_with_credit_of_turns_and_compiles_once(open_: Any) -> None:
    run = open_("measured_suite:suite", credit=added(potential_credit(scale=0.2), step_credit()), max_lag=0)
    with jax.transfer_guard("disallow"):
        rl(run)
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["turns"] > 0 and row["turns_cut"] == 0 and row["potential_error"] < 1e-6
        assert 0 < row["turns_measured"] <= 1 and 8 / row["turns"] - 1e-3 <= row["turns_shared"] <= 1
    transcripts = [json.loads(line) for line in (run.directory / "transcripts.jsonl").read_text().splitlines()]
    of_turns = [
        {turn: credit for _, _, turn, logprob, credit in t["tokens"] if logprob is not None} for t in transcripts
    ]
    assert any(len(set(credits.values())) > 1 for credits in of_turns), "turns of one episode differ"


def test_a_credit_that_is_no_number_is_named_before_it_reaches_a_gradient(open_: Any) -> None:
    def endless(turns: GroupTurns, rewards: jax.Array, valid: jax.Array) -> jax.Array:
        del rewards, valid
        return jnp.where(turns.measured, jnp.float32("nan"), 0.0)

    run = open_("measured_suite:suite", credit=endless)
    with pytest.raises(UserError, match=r"loop\.credit gave nan for turn"):
        rl(run)
    assert run.at == 0, "no update was made of it"
