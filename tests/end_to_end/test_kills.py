"""A run that dies ten times, wherever it stands, ends as one that never died."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.test_train import (
    CONFIG,
    KEEPING,
    KEPT,
    LIMIT_S,
    READ_ONLY,
    agentrl,
    finish,
    kept,
    parameters,
    rows,
)

KILLS = 10
PATIENCE_S = 900  # the machine may have much else to do: what is slow is no failure here
COMMAND = ("train", str(CONFIG), KEEPING, "loop.steps=24")
STEPS = 6 + 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    finish(agentrl(*COMMAND, cwd=home))
    return home / "runs" / "small"


def written(directory: Path) -> int:
    metrics = directory / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def killed(process: subprocess.Popen[str], directory: Path, after: int, seconds: float) -> None:
    """SIGKILL some seconds after so many rows are written: in a step, an evaluation, a checkpoint's write."""
    deadline = time.monotonic() + PATIENCE_S
    while written(directory) < after:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.005)
    time.sleep(seconds)
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_p57_ten_kills_at_random_points_change_nothing(undisturbed: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    directory = tmp_path / "runs" / "small"
    points = sorted(draw.sample(range(STEPS - 3), KILLS))  # all over the run, whatever the machine's speed
    for point in points:
        again = ["--resume"] if (directory / "config.json").exists() else []
        killed(agentrl(*COMMAND, *again, cwd=tmp_path, **READ_ONLY), directory, point, draw.uniform(0.0, 0.4))
    finish(agentrl(*COMMAND, "--resume", cwd=tmp_path, **READ_ONLY))
    before, after = parameters(undisturbed), parameters(directory)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)
    for one, other in zip(kept(directory), kept(undisturbed), strict=True):
        differing = [name for name, a, b in zip(KEPT, one, other, strict=True) if a != b]
        assert not differing, f"lost, doubled or another, by {differing}: {one}, expected {other}"
    assert [row["at"] for row in rows(directory, "metrics.jsonl")] == list(range(1, STEPS + 1))
