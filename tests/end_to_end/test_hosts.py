"""One run on two processes, through the command line: it computes what one process computes, and goes on as one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from agentrl_jax.runtime.store import Store, committed
from tests.ports import free_port
from tests.strictly import STRICT

CONFIG = Path(__file__).with_name("hosts_config.py")
ROOT = Path(__file__).parents[2]
LIMIT_S = 270  # below pytest's own
PATIENCE_S = 1500  # of the long runs: the machine may have much else to do
PATIENT = pytest.mark.timeout(2 * PATIENCE_S)
RUN = Path("runs") / "hosts"
DEVICES = 8
# Nothing here is computed for long: compiling without optimisation is twice as fast.
FAST = "--xla_backend_optimization_level=0"


def start(
    home: Path, *settings: str, processes: int, devices: int = DEVICES, **more: str
) -> list[subprocess.Popen[str]]:
    """`agentrl train` on so many processes that share `devices`. `more`: of their environment."""
    home.mkdir(exist_ok=True)
    address = f"127.0.0.1:{free_port()}"
    given = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    flags = f"{given} {FAST} --xla_force_host_platform_device_count={devices // processes}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "envs"), str(CONFIG.parent)])
    found = []
    for index in range(processes):
        joined = ["--coordinator", address, "--processes", str(processes), "--process", str(index)]
        command = [*STRICT, "-m", "agentrl_jax.cli.main", "train", str(CONFIG), *settings]
        found.append(
            subprocess.Popen(
                [*command, *(joined if processes > 1 else [])], cwd=home, text=True,
                env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | more,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    return found


def finish(processes: list[subprocess.Popen[str]], code: int = 0, limit_s: float = PATIENCE_S) -> list[str]:
    """What they left on stderr, once all have ended."""
    try:
        errors = [process.communicate(timeout=limit_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), errors
    return errors


def rows(home: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (home / RUN / name).read_text().splitlines()]


def wait_for_rows(home: Path, count: int, processes: list[subprocess.Popen[str]]) -> None:
    metrics, deadline = home / RUN / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= count):
        assert all(p.poll() is None for p in processes) and time.monotonic() < deadline, finish(processes)
        time.sleep(0.05)


def parameters(home: Path) -> list[np.ndarray]:
    """Every array of the newest checkpoint."""
    numbers = [int(path.name) for path in (home / RUN / "checkpoints").iterdir() if path.name.isdigit()]
    place = (home / RUN / "checkpoints" / str(max(numbers)) / "state").resolve()
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(place).item_metadata.tree
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return jax.tree.leaves(reader.restore(place, restore_args=plain)["params"])


def kept(home: Path) -> list[tuple]:
    """What all processes have trained on: step, group, member, task and tokens."""
    found = []
    for place in (home / RUN / "trajectories", *(home / RUN).glob("hosts/*/trajectories")):
        if committed(str(place)) is None:  # its process was killed before it had kept any
            continue
        store = Store(str(place))
        steps = store.column("steps").read().result().tolist()
        found += [(step, t.group, t.member, t.task.id, t.tokens) for step, t in zip(steps, store, strict=True)]
    return sorted(found)


def losses(home: Path) -> list[float]:
    return [row["loss"] for row in rows(home)]


SHORT = ("loop.steps=2", "sft.steps=2", "evaluation.episodes=2", "checkpoints.every=100")


def test_two_processes_compute_what_one_computes(tmp_path: Path) -> None:
    alone = start(tmp_path / "one", *SHORT, processes=1, devices=4)
    # Params lie on both, and the rows of one are no stretch.
    both = start(tmp_path / "two", *SHORT, "mesh.fsdp=4", processes=2, devices=4, IN_TURN="1")
    finish(both, limit_s=LIMIT_S)
    finish(alone, limit_s=LIMIT_S)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=0, atol=1e-5)
    assert kept(tmp_path / "two") == kept(tmp_path / "one")
    own = tmp_path / "two" / RUN / "hosts" / "1"
    assert {path.name for path in own.iterdir()} == {
        "infrastructure.jsonl", "receipts.jsonl", "trajectories", "transcripts.jsonl"
    }  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes from start to end in one go."""
    home = tmp_path_factory.mktemp("straight")
    finish(start(home, processes=2))
    return home


@pytest.mark.slow
@PATIENT
def test_twenty_steps_have_the_same_losses_on_one_process_and_on_two(straight: Path, tmp_path: Path) -> None:
    finish(start(tmp_path, processes=1))
    assert len(losses(tmp_path)) == 20
    found = max(abs(a - b) for a, b in zip(losses(straight), losses(tmp_path), strict=True))
    print(f"two processes: losses of 20 steps differ by {found:.1e}")
    assert found < 1e-5
    for one, two in zip(rows(tmp_path), rows(straight), strict=True):
        assert one["trained_tokens"] == two["trained_tokens"] and one.get("sampled") == two.get("sampled")
    assert kept(straight) == kept(tmp_path)


@pytest.mark.slow
@PATIENT
@pytest.mark.parametrize("after", [1, 2])
def test_p57_two_killed_processes_go_on_as_any_number(straight: Path, tmp_path: Path, after: int) -> None:
    processes = start(tmp_path, processes=2)
    wait_for_rows(tmp_path, random.randrange(2, 19), processes)
    time.sleep(random.random())
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
    finish(start(tmp_path, "--resume", processes=after))
    assert kept(tmp_path) == kept(straight), "no task is repeated or skipped"
    np.testing.assert_allclose(losses(tmp_path), losses(straight), rtol=0, atol=1e-5)
    for mine, theirs in zip(parameters(tmp_path), parameters(straight), strict=True):
        # One process adds the devices' gradients up in another order than two do: Adam makes 1e-6 of the last bit.
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=0 if after == 2 else 1e-5)


@pytest.mark.slow
@PATIENT
def test_a_signal_to_one_process_leaves_one_checkpoint_of_all(straight: Path, tmp_path: Path) -> None:
    often = "checkpoints.every=100"
    processes = start(tmp_path, often, processes=2)
    wait_for_rows(tmp_path, 10, processes)
    processes[1].send_signal(signal.SIGTERM)
    errors = finish(processes, code=128 + signal.SIGTERM)
    assert all("agentrl: stopped" in error for error in errors)
    numbers = {int(path.name) for path in (tmp_path / RUN / "checkpoints").iterdir() if path.name.isdigit()}
    assert numbers == {8, len(rows(tmp_path))}, "one at the end of the first stage, and one of the last step"
    finish(start(tmp_path, often, "--resume", processes=2))
    assert kept(tmp_path) == kept(straight)
    np.testing.assert_allclose(losses(tmp_path), losses(straight), rtol=0, atol=0)


AHEAD = ("sft.steps=2", "loop.steps=8", "evaluation.episodes=2", "checkpoints.every=3")


@pytest.mark.slow
@PATIENT
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_p57_rollouts_ahead_go_on_in_another_number(tmp_path: Path, before: int, after: int, stop: int) -> None:
    """Which params sample which token is a matter of time then; that each episode trains once, at its step, is not."""
    processes = start(tmp_path, *AHEAD, processes=before, devices=4, AHEAD="1")
    wait_for_rows(tmp_path, 6, processes)
    for process in processes if stop == signal.SIGKILL else processes[-1:]:
        process.send_signal(stop)
    finish(processes, code=-stop if stop == signal.SIGKILL else 128 + stop)
    finish(start(tmp_path, *AHEAD, "--resume", processes=after, devices=4, AHEAD="1"))
    trained = [(step, group, member) for step, group, member, *_ in kept(tmp_path)]
    assert trained == [(3 + group // 2, group, member) for group in range(16) for member in range(4)]
    figures = rows(tmp_path)
    assert [row["at"] for row in figures] == list(range(1, 11))
    assert max(row["lag_max"] for row in figures if row["stage"] == "rl") <= 2


@pytest.mark.slow
@PATIENT
def test_a_process_that_is_killed_ends_the_run_by_name(tmp_path: Path) -> None:
    processes = start(tmp_path, "hosts.lost_s=5", processes=2)
    wait_for_rows(tmp_path, 9, processes)
    processes[1].kill()
    _, errors = processes[0].communicate(timeout=60)
    processes[1].communicate()
    assert processes[0].returncode == 2, errors
    assert "agentrl: error: process 1 of 2 is gone: last seen in phase" in errors.splitlines()[-1]
