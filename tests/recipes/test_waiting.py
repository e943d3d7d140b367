"""What waits to be trained on comes back: from a checkpoint, from a stop since, in as many processes as there are."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_suites
import numpy as np
import pytest

from agentrl_jax.protocol import Attribution, Cause, ToolCall
from agentrl_jax.recipes import pacing, shares
from agentrl_jax.recipes.config import Checkpoints as CheckpointSettings
from agentrl_jax.recipes.config import Evaluation, RunConfig, TinyPolicy
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.train import train
from agentrl_jax.recipes.waiting import buffer_of, stop
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import play
from agentrl_jax.rollout.collector import Finished
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime import held
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.interrupts import Interrupted
from tests.end_to_end.small_config import config as small
from tests.end_to_end.test_train import kept, parameters
from tests.recipes.test_shares import process

TASKS, GROUP = 4, 2
FINISH = [ToolCall(name="finish")]


@pytest.fixture(scope="module")
def played() -> list[Trajectory]:
    """One trajectory of each of the groups 4 to 7, those of a second step."""
    renderer = ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
    suite = fake_suites.counter()
    task = suite.tasks("train", 1, 0)[0]
    return [play(suite, renderer, task, FINISH, 0, group=group, member=group % 2) for group in range(4, 8)]


def a_run(place: Path, index: int = 0, count: int = 1, waiting: Any = (), at: int = 1, arrived: Any = ()) -> Any:
    """As much of a run as keeps what waits."""
    hosts = process(index, count)
    buffer = Buffer.of(GROUP, waiting, {"added": len(waiting)})
    late = list(arrived)
    run = SimpleNamespace(
        config=SimpleNamespace(loop=SimpleNamespace(tasks=TASKS)), hosts=hosts, directory=place, at=at, buffer=buffer,
        home=shares.home(place, hosts), recorded=None, finished=Finished(), keep=lambda: None, taken=[],
        checkpoints=SimpleNamespace(held=lambda *_: pytest.fail("the stop is newer")),
        arrived=lambda finished, wait: [late.pop() for _ in range(len(late))],
    )  # fmt: skip
    return _Run(run)


class _Run:
    def __init__(self, parts: Any) -> None:
        vars(self).update(vars(parts))

    @property
    def waiting(self) -> list[Trajectory]:
        return [*self.buffer.held(), *self.taken]  # type: ignore[attr-defined]


RECORD: dict[str, Any] = {"buffer": {"group_size": GROUP, "counts": {"added": 9}}, "processes": 2}


def groups(run: Any, record: dict[str, Any] = RECORD) -> list[int]:
    return [t.group for t in buffer_of(run, record).held()]


def test_a_checkpoint_of_two_processes_goes_on_in_any_number(tmp_path: Path, played: list[Trajectory]) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(7, {"w": np.ones(2)}, RECORD, held=played[:2])  # what process 0 had
    checkpoints.wait()
    held.write(tmp_path / "checkpoints" / "7" / "held" / "1", played[2:])
    assert checkpoints.record(7) == RECORD and checkpoints.held(7, 0) == played[:2]
    for count in (1, 2, 4):
        runs = [a_run(tmp_path, k, count, at=7) for k in range(count)]
        for run in runs:
            run.checkpoints = checkpoints
        assert [group for run in runs for group in groups(run)] == [4, 5, 6, 7]
        assert sum(buffer_of(run, RECORD).counts["added"] for run in runs) == 9
    checkpoints.close()


def test_a_checkpoint_without_trajectories_has_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"w": np.ones(2)}, RECORD)
    checkpoints.wait()
    assert checkpoints.held(1) == [] and not list((tmp_path / "1").glob("held/[0-9]*"))
    checkpoints.close()


def test_a_checkpoint_that_has_them_in_its_record_still_goes_on(tmp_path: Path, played: list[Trajectory]) -> None:
    older = {"group_size": GROUP, "counts": {}, "trajectories": [t.to_json() for t in played]}
    assert groups(a_run(tmp_path, 1, 2), {"buffer": json.loads(json.dumps(older))}) == [6, 7]


@pytest.mark.parametrize("after", [1, 2, 4])
def test_what_is_over_at_a_stop_comes_back_in_any_number(tmp_path: Path, played: list[Trajectory], after: int) -> None:
    for k in range(2):
        run = a_run(tmp_path, k, 2, waiting=played[2 * k : 2 * k + 1], arrived=played[2 * k + 1 : 2 * k + 2])
        run.home.mkdir(parents=True, exist_ok=True)
        stop(run)  # one was in the buffer, the other had just arrived
    resumed = [a_run(tmp_path, k, after) for k in range(after)]
    assert [group for run in resumed for group in groups(run)] == [4, 5, 6, 7]
    assert sum(buffer_of(run, RECORD).counts["added"] for run in resumed) == 4


def test_what_the_signal_broke_is_tried_again(tmp_path: Path, played: list[Trajectory]) -> None:
    broken = replace(played[0], attribution=Attribution(cause=Cause.ENVIRONMENT, evidence="crash of signal SIGTERM"))
    stop(a_run(tmp_path, waiting=[broken, *played[1:3]], arrived=[replace(broken, group=7, member=1)]))
    assert groups(a_run(tmp_path)) == [5, 6]


def test_a_step_that_had_begun_gives_back_what_it_took(tmp_path: Path, played: list[Trajectory]) -> None:
    run = a_run(tmp_path, waiting=played[2:])
    run.taken = played[:2]
    stop(run)
    assert groups(a_run(tmp_path)) == [4, 5, 6, 7]


def test_what_was_left_at_another_step_is_not_taken(tmp_path: Path, played: list[Trajectory]) -> None:
    stop(a_run(tmp_path, waiting=played, at=3))
    run = a_run(tmp_path, at=4)
    run.checkpoints = SimpleNamespace(held=lambda at, own: played[:1])
    assert groups(run) == [4]
    gone_on = a_run(tmp_path, waiting=played, at=4)
    gone_on.recorded = {"at": 3}  # the params have been updated since
    stop(gone_on)
    assert groups(run) == [4]


def test_a_stop_of_one_process_is_newer_than_one_of_two_at_the_same_step(
    tmp_path: Path, played: list[Trajectory]
) -> None:
    for k in range(2):
        run = a_run(tmp_path, k, 2, waiting=played[2 * k : 2 * k + 1])
        run.home.mkdir(parents=True, exist_ok=True)
        stop(run)
    stop(a_run(tmp_path, waiting=played))
    assert groups(a_run(tmp_path)) == [4, 5, 6, 7]
    assert groups(a_run(tmp_path, 0, 2)) == [4, 5]


def config() -> RunConfig:
    base = small()
    assert base.loop is not None
    return replace(
        base, stages=(rl,), sft=None, store="trajectories", evaluation=Evaluation(episodes=2, every=0),
        policy=TinyPolicy(layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, vocab_size=512),
        rollout=replace(base.rollout, workers=2, slots=8), checkpoints=CheckpointSettings(every=1),
        loop=replace(base.loop, steps=3),
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_that_is_stopped_in_a_rollout_samples_no_episode_twice_and_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(config(), straight, quiet=True)
    take_in = pacing.take_in

    def until(run: Any, finished: Finished, *, wait: bool = False) -> None:
        take_in(run, finished, wait=wait)
        if run.step == 1 and len(run.buffer) >= 3:
            raise Interrupted(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(pacing, "take_in", until)
        with pytest.raises(Interrupted):
            train(config(), stopped, quiet=True)
    waiting = held.read(stopped / "waiting")
    assert 3 <= len(waiting) < 8
    train(config(), stopped, resume=True, quiet=True)
    one, other = parameters(straight), parameters(stopped)
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)
    assert kept(stopped) == kept(straight)
    saved = sum(sum(t.action_mask) for t in waiting)
    sampled = [[json.loads(line)["sampled"] for line in (place / "metrics.jsonl").read_text().splitlines()]
               for place in (straight, stopped)]  # fmt: skip
    assert sampled[1] == [sampled[0][0], sampled[0][1] - saved, sampled[0][2]]
