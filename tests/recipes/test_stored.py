"""Learning from a trajectory store: the rows are those that the episodes themselves give. Who may write to one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, Verdict
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.checks import check, check_environment
from agentrl_jax.recipes.config import Loop, RunConfig, Sft, Shown, Stored, TinyPolicy
from agentrl_jax.recipes.demonstrations import open_stores, packed, play_all, read_all
from agentrl_jax.recipes.keeping import about_run, open_store
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.sft import sft
from agentrl_jax.recipes.train import train
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.runtime.store import Store, Writer

REF = EnvironmentRef(target="agentrl_envs.workflow:suite", options={"handles": "short", "sloppiness": 0.5})
SHOWN = Shown(count=24)


def config(part: Shown | Stored, **changes: Any) -> RunConfig:
    settings = Sft(demonstrations=(part,), width=128)
    return RunConfig(name="x", environment=REF, policy=TinyPolicy(), stages=(sft,), sft=settings, **changes)


@pytest.fixture(scope="module")
def policy() -> policies.Policy:
    return policies.describe(config(SHOWN), REF.load())


@pytest.fixture(scope="module")
def episodes(policy: policies.Policy) -> list:
    """A teacher's, every third failed, as members of groups and with kept sets, as a sampler that cuts leaves them."""
    played = list(play_all(REF, policy.renderer, SHOWN, 0))
    return [
        replace(t, group=n // 4, member=n % 4, kept=(b"\x07",) * len(t.tokens), verdict=Verdict(outcome=n % 3 > 0))
        for n, t in enumerate(played)
    ]


@pytest.fixture
def place(policy: policies.Policy, episodes: list, tmp_path: Path) -> str:
    with Writer(str(tmp_path / "store"), about_run(config(SHOWN), policy)) as writer:
        writer.append(episodes)
    return str(tmp_path / "store")


def rows(wanted: RunConfig, policy: policies.Policy, lengths: list[int] | None = None) -> Any:
    stored = read_all(wanted, open_stores(wanted, policy, lengths))
    assert wanted.sft is not None
    return packed(REF, policy.renderer, wanted.sft, wanted.seed, stored)


def same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a, b)


def test_the_rows_are_those_of_the_episodes_themselves(place: str, policy: policies.Policy) -> None:
    same(rows(config(Stored(path=place, only_successes=False)), policy), rows(config(SHOWN), policy))


def test_failures_and_the_unscored_are_left_out(place: str, policy: policies.Policy, episodes: list) -> None:
    wanted = config(Stored(path=place))
    assert list(read_all(wanted, open_stores(wanted, policy))) == [t for n, t in enumerate(episodes) if n % 3]
    with Writer(place) as writer:
        writer.append([replace(t, verdict=None) for t in episodes])
    everything = config(Stored(path=place, only_successes=False))
    assert list(read_all(everything, open_stores(everything, policy))) == episodes


def test_a_count_is_drawn_by_the_seed(place: str, policy: policies.Policy) -> None:
    def drawn(seed: int) -> list[int]:
        wanted = config(Stored(path=place, count=7), seed=seed)
        return [t.seed for t in read_all(wanted, open_stores(wanted, policy))]

    assert drawn(0) == drawn(0) != drawn(1) and len(set(drawn(0))) == 7


def test_a_resumed_run_learns_from_what_was_there_when_it_began(
    place: str, policy: policies.Policy, episodes: list
) -> None:
    wanted = config(Stored(path=place))
    before = rows(wanted, policy)
    with Writer(place) as writer:
        writer.append(episodes)
    assert len(rows(wanted, policy).tokens) > len(before.tokens)
    same(rows(wanted, policy, [len(episodes)]), before)


def test_what_cannot_be_learned_from_is_refused_before_anything_runs(
    place: str, policy: policies.Policy, episodes: list, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no trajectory store"):
        train(config(Stored(path=str(tmp_path / "none"))), tmp_path / "run")
    with Writer(str(tmp_path / "other"), {"tokenizer": "another"}) as writer:
        writer.append(episodes)
    with pytest.raises(UserError, match=r"^sft\.demonstrations\.0\.path=.*another tokenizer"):
        train(config(Stored(path=str(tmp_path / "other"))), tmp_path / "run")
    failed = str(tmp_path / "failed")
    with Writer(failed, about_run(config(SHOWN), policy)) as writer:
        writer.append(episodes[:1])
    with pytest.raises(UserError, match="none of its 1 trajectories qualifies; see only_successes"):
        train(config(Stored(path=failed)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with Writer(failed) as writer:
        writer.append([replace(t, task=replace(t.task, split="heldout")) for t in episodes[:3]])
    wanted = config(Stored(path=failed))
    with pytest.raises(UserError, match=r"holds tasks of split 'heldout', which evaluation\.split measures on"):
        list(read_all(wanted, open_stores(wanted, policy)))


def test_stored_demonstrations_need_no_teacher() -> None:
    mute = replace(REF.load(), demonstrate=None)
    check_environment(check(config(Stored(path="s"))), mute)
    with pytest.raises(UserError, match=r"offers no demonstrate\(\); show what a run has kept"):
        check_environment(config(SHOWN), mute)


def test_a_run_has_a_store_of_its_own(policy: policies.Policy, episodes: list, tmp_path: Path) -> None:
    loop = Loop(objective=grpo(beta=0.0), reward=partial(lexicographic))
    mine = replace(config(SHOWN), stages=(rl,), sft=None, loop=loop, store="kept")
    with open_store(check(mine), policy, tmp_path, resume=False) as writer:
        writer.append(episodes)
    assert len(Store(str(tmp_path / "kept"))) == len(episodes), "a relative path begins in the run's directory"
    with pytest.raises(UserError, match=r"store='kept': holds 24 trajectories of the run 'x'; give each run a store"):
        open_store(mine, policy, tmp_path, resume=False)
    with pytest.raises(UserError, match="give each run a store of its own"):
        open_store(replace(mine, name="y"), policy, tmp_path, resume=True)
    assert len(open_store(mine, policy, tmp_path, resume=True)) == len(episodes)
