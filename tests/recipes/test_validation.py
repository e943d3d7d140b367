"""An early stop by validation, and a signal while it is measured: the stage goes on where it was."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentrl_jax.recipes.sft as stage
from agentrl_jax.recipes.config import Checkpoints, Evaluation, RunConfig, TinyPolicy
from agentrl_jax.recipes.sft import sft
from agentrl_jax.recipes.train import train
from agentrl_jax.runtime.interrupts import Interrupted
from tests.end_to_end.small_config import config as small
from tests.end_to_end.test_train import parameters


def config(until: float) -> RunConfig:
    base = small()
    assert base.sft is not None
    return replace(
        base, stages=(sft,), loop=None, evaluation=Evaluation(episodes=2, every=0),
        policy=TinyPolicy(layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, vocab_size=512),
        rollout=replace(base.rollout, workers=2, slots=8),
        sft=replace(base.sft, steps=5, until_success=until, check_every=2, check_episodes=2),
        checkpoints=Checkpoints(every=100),
    )  # fmt: skip


def rows(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def steps(directory: Path) -> list[int]:
    return [row["step"] for row in rows(directory, "metrics.jsonl")]


def validated(directory: Path) -> list[int]:
    return [row["step"] for row in rows(directory, "evaluations.jsonl") if row["split"] == "validation"]


@pytest.mark.slow
def test_a_validation_that_a_signal_ends_is_measured_again_and_no_step_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, asked = config(until=1.0), []
    evaluate = stage.evaluate

    def interrupted(run: Any, **settings: Any) -> dict[str, Any]:
        asked.append(run.step)
        if len(asked) == 2:
            raise Interrupted(signal.SIGTERM)
        return evaluate(run, **settings)

    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(never, straight, quiet=True)
    monkeypatch.setattr(stage, "evaluate", interrupted)
    with pytest.raises(Interrupted):
        train(never, stopped, quiet=True)
    assert steps(stopped) == [1, 2, 3, 4] and validated(stopped) == [2]
    assert [path.name for path in (stopped / "checkpoints").iterdir() if path.name.isdigit()] == ["4"]
    train(never, stopped, resume=True, quiet=True)
    assert asked == [2, 4, 4] and validated(stopped) == validated(straight) == [2, 4]
    assert steps(stopped) == steps(straight) == [1, 2, 3, 4, 5]
    found = parameters(stopped)
    for name, value in parameters(straight).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_a_stage_ends_at_the_validation_that_is_good_enough_also_where_it_is_known_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always, evaluate = config(until=1.0), stage.evaluate
    monkeypatch.setattr(stage, "evaluate", lambda *given, **settings: {**evaluate(*given, **settings), "success": 1.0})
    summary = train(always, tmp_path / "run", quiet=True)
    assert summary["optimizer_steps"] == 2 and steps(tmp_path / "run") == [1, 2] and validated(tmp_path / "run") == [2]
    train(always, tmp_path / "run", resume=True, quiet=True)
    assert steps(tmp_path / "run") == [1, 2] and validated(tmp_path / "run") == [2]
