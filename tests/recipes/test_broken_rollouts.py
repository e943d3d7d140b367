"""What a run does when episodes break: it keeps their receipts apart, and ends with a line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_suites
import pytest
import scripted

from agentrl_jax.cli.main import main
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Attribution, Cause, EnvironmentRef, StopReason, Task, ToolCall, Verdict
from agentrl_jax.recipes.checks import check
from agentrl_jax.recipes.config import External, Rollout, RunConfig, Sft, Shown, TinyPolicy
from agentrl_jax.recipes.directory import require_space
from agentrl_jax.recipes.evaluate import measure
from agentrl_jax.recipes.guards import Drops, refuse_thin
from agentrl_jax.recipes.run import Run
from agentrl_jax.recipes.sft import sft
from agentrl_jax.rollout.collect import Driver, EpisodePlan, collect
from agentrl_jax.rollout.collector import Collector
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.sampling import WHOLE
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime.hosts import Hosts
from agentrl_jax.runtime.sinks import RunSinks

ADD, FINISH = ToolCall(name="add", arguments={"n": 5}), ToolCall(name="finish")
RAISE = ToolCall(name="break", arguments={"how": "raise"})
DEADLINES = Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)
STALL_S = 1.0  # a worker's start must not count: `pool` has one that runs


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)


@pytest.fixture
def pool():
    with Pool(EnvironmentRef(target="fake_suites:counter"), 4, DEADLINES) as pool:
        assert pool.spec.name == "counter"
        yield pool


def plan(count: int) -> list[EpisodePlan]:
    task = Task(id="t", split="train", data={"goal": 5})
    return [EpisodePlan(group=0, member=m, task=task, seed=1, key=(0, m)) for m in range(count)]


@contextmanager
def run_with(
    pool: Pool, renderer: ChatRenderer, directory: Path, scripts: Any, sinks: Any, **settings: Any
) -> Iterator[Any]:
    """As much of a run as collecting needs."""
    rollout, run = Rollout(**settings), Run.__new__(Run)
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn(scripts), slots=4)
    with Collector(Driver(sampler, pool, renderer, max_turn_tokens=16)) as collector:
        vars(run).update(
            config=SimpleNamespace(rollout=rollout), directory=directory, collector=collector, sinks=sinks,
            interrupts=SimpleNamespace(check=lambda: None), hosts=Hosts(),
        )  # fmt: skip
        yield run


def test_receipts_of_broken_episodes_are_kept_apart_and_replay_reads_them(pool, renderer, tmp_path, capsys):
    scripts = {m: [ADD, RAISE] if m % 2 else [ADD, FINISH] for m in range(4)}
    with RunSinks(tmp_path, tensorboard=False) as sinks, run_with(pool, renderer, tmp_path, scripts, sinks) as run:
        found = list(run.collect(plan(4), temperature=1.0, cut=WHOLE))
    assert [t.valid for t in sorted(found, key=lambda t: t.member)] == [True, False, True, False]
    receipts, broken = ((tmp_path / f"{n}.jsonl").read_text().splitlines() for n in ("receipts", "infrastructure"))
    assert len(receipts) == 4 and len(broken) == 2 and set(broken) < set(receipts)
    assert all(json.loads(line)["attribution"]["cause"] == "environment" for line in broken)
    assert main(["replay", f"{tmp_path / 'infrastructure.jsonl'}:1"]) == 0, "the database is locked again"
    assert "reproduced" in capsys.readouterr().out


def test_too_many_drops_in_a_row_end_the_run(pool, renderer, tmp_path):
    with RunSinks(tmp_path, tensorboard=False) as sinks:
        scripts = {m: [RAISE] for m in range(4)}
        stopped = run_with(pool, renderer, tmp_path, scripts, sinks, max_consecutive_drops=3)
        with stopped as run, pytest.raises(UserError) as caught:
            list(run.collect(plan(4), temperature=1.0, cut=WHOLE))
    words = ["3 episodes in a row", "max_consecutive_drops=3", "database is locked", "agentrl replay", "--resume"]
    assert not [word for word in words if word not in str(caught.value)]


def trajectory(renderer: ChatRenderer, member: int = 0, **changes: Any) -> Trajectory:
    suite = fake_suites.counter()
    task = Task(id="t", split="train", data={"goal": 5})
    return replace(play(suite, renderer, task, [ADD, FINISH], 0, member=member), **changes)


def test_drops_are_counted_in_a_row_and_a_policys_failure_is_none(renderer):
    broken = trajectory(renderer, attribution=Attribution(cause=Cause.EVALUATOR, evidence="no gold"), verdict=None)
    hung = trajectory(renderer, attribution=Attribution(cause=Cause.POLICY, evidence="hang"))
    drops = Drops(2, Path("runs/x"))
    for t in (broken, hung, broken, trajectory(renderer), broken):
        drops.add(t)
    with pytest.raises(UserError, match=r"no gold.*runs/x/infrastructure\.jsonl"):
        drops.add(broken)


def test_a_step_with_too_few_valid_episodes_ends_the_run(renderer):
    unscored = trajectory(renderer, verdict=Verdict())
    refuse_thin([trajectory(renderer), unscored], 0.5)
    with pytest.raises(UserError, match=r"1 of 3 episodes .*min_valid_fraction=0\.5.* 2 were left unscored.*triage"):
        refuse_thin([trajectory(renderer), unscored, unscored], 0.5)


def test_p47_a_stall_names_who_waits_for_what(pool, renderer):
    class Silent(scripted.ScriptedSampler):
        def advance(self):
            return [] if self._pending and self._pending[0].key[-1] else super().advance()

    sampler = Silent(renderer, scripted.by_turn({0: [ADD, FINISH]}), slots=2)
    running = collect(plan(1), sampler, pool, renderer, max_turn_tokens=16, temperature=1.0, stall_s=STALL_S)
    with pytest.raises(UserError, match=r"nothing has moved for 1 s .*task 't' member 0 in sample.*--resume"):
        list(running)
    assert [pool.acquire() for _ in range(4)].count(None) == 0, "the workers are free again"


def test_p47_a_worker_that_is_waited_for_is_named_with_its_phase(pool, renderer):
    """Its own deadline ends a hang first; the watchdog is for where that is longer."""
    scripts = {0: [ADD, ToolCall(name="break", arguments={"how": "hang"})]}
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn(scripts), slots=2)
    running = collect(plan(1), sampler, pool, renderer, max_turn_tokens=16, temperature=1.0, stall_s=STALL_S)
    with pytest.raises(UserError, match="task 't' member 0 in step"):
        list(running)


def test_p50_a_run_needs_room_for_its_directory(tmp_path):
    require_space(tmp_path, 0.0)
    with pytest.raises(UserError, match=r"GB of its disk are free.*rollout\.free_space_gb=1e\+09.*runs=DIR"):
        require_space(tmp_path / "not" / "there", 1e9)


def test_low_evidence_stops_by_a_setting(renderer):
    assert Rollout().evidence is None
    rule = Rollout(evidence_patience=2, evidence_threshold=0.1).evidence
    assert rule is not None and (rule.patience, rule.threshold) == (2, 0.1)


def test_how_episodes_ended_is_measured(renderer):
    stops = (StopReason.COMPLETED, StopReason.EARLY_STOP, StopReason.BUDGET, StopReason.TOKEN_CAP)
    figures = measure([trajectory(renderer, member=m, stop=stop) for m, stop in enumerate(stops)])
    assert figures["premature_stop_rate"] == 0.25 and figures["unfinished_after_budget"] == 0.5


def config(**rollout: Any) -> RunConfig:
    return RunConfig(
        name="x", environment=EnvironmentRef(target="fake_suites:counter"), policy=TinyPolicy(), stages=(sft,),
        sft=Sft(demonstrations=(Shown(count=8),)), rollout=Rollout(**rollout),
    )  # fmt: skip


WRONG: dict[str, tuple[Callable[[], RunConfig], str]] = {
    "a share above one": (lambda: config(max_failure_fraction=1.5), r"rollout\.max_failure_fraction=1\.5"),
    "a negative share": (lambda: config(min_valid_fraction=-0.1), r"rollout\.min_valid_fraction=-0\.1"),
    "no drop at all": (lambda: config(max_consecutive_drops=0), r"rollout\.max_consecutive_drops=0"),
    "a stall within a deadline": (lambda: config(stall_s=5.0), r"rollout\.stall_s=5\.0 must be above start_d"),
    "a stall within a server's turn": (
        lambda: replace(config(stall_s=200.0), external=External(url="http://127.0.0.1:1")),
        r"stall_s=200\.0 must be above external\.deadline_s=300",
    ),
    "a threshold without patience": (lambda: config(evidence_threshold=0.1), "has no effect without rollout"),
    "patience without a threshold": (lambda: config(evidence_patience=2), "expected a gain above 0"),
    "less than no room": (lambda: config(free_space_gb=-1.0), r"rollout\.free_space_gb=-1\.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_without_effect_or_beyond_its_bounds_is_refused(name):
    make, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        check(make())
