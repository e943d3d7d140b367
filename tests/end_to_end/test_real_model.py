"""The same loop on a real model and real tasks, a few steps of it. Minutes long, and it needs the model's package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agentrl_envs import data
from agentrl_envs.sets.retail import RETAIL

from agentrl_jax.errors import UserError
from agentrl_jax.runtime import model_store

ROOT = Path(__file__).parents[2]
SMALL = ("sft.steps=2", "sft.warmup=1", "loop.steps=1", "loop.tasks=1", "loop.group=2", "evaluation.episodes=2")


def model_or_skip() -> None:
    try:
        model_store.find("smollm2-135m")
    except UserError as error:
        pytest.skip(str(error))


def train(config: str, home: Path, *overrides: str) -> dict:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    environment = dict(os.environ, PYTHONPATH=paths, XLA_FLAGS="")
    command = [
        sys.executable,
        "-m",
        "agentrl_jax.cli.main",
        "train",
        str(ROOT / "configs" / config),
        *SMALL,
        *overrides,
    ]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (summary,) = home.glob("runs/*/summary.json")
    assert (summary.parent / "report.html").is_file()
    return json.loads(summary.read_text())


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_retail_runs_through_every_stage(tmp_path: Path) -> None:
    model_or_skip()
    if data.locate(RETAIL) is None:
        pytest.skip("the data set 'retail' is not here: set AGENTRL_DATA to the folder that holds it")
    summary = train("retail_smollm2.py", tmp_path, "sft.demonstrations.0.count=8", "rollout.max_turn_tokens=48")
    assert {"success_before", "success_after_sft", "success_after_rl"} <= set(summary)
    assert summary["parameters"] == 134_515_008 and summary["trained_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_workflow_runs_through_every_stage(tmp_path: Path) -> None:
    model_or_skip()
    changes = ("sft.check_every=2", "sft.check_episodes=2", "sft.demonstrations.0.count=8", "loop.warmup=0")
    summary = train("workflow_smollm2.py", tmp_path, *changes)
    assert summary["optimizer_steps"] == 3
