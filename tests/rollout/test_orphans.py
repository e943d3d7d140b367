"""P48: whatever an environment starts is gone after the pool, however the pool, or the trainer, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl_jax.protocol import Action, EnvironmentRef, Task
from agentrl_jax.rollout import orphans
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.wire import Finish, Perform, Reset

REF = EnvironmentRef(target="daemons:suite")
DEADLINES = Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)  # no test waits for these
HASTY = replace(DEADLINES, step=1.0)  # where a hang is to meet them
TRAINER = """
import sys, time
from agentrl_jax.protocol import Task
from agentrl_jax.rollout.wire import Perform, Reset
sys.path.insert(0, sys.argv[1])
from test_orphans import DEADLINES, REF, play
from agentrl_jax.rollout.pool import Pool
pool = Pool(REF, 2, DEADLINES, label=sys.argv[2])
play(pool, sys.argv[3], until=sys.argv[4])
print("ready", flush=True)
time.sleep(600)
"""


def play(pool: Pool, place: str, until: str) -> None:
    """An episode whose environment leaves a daemon in each phase, given up in the phase `until`."""
    worker = pool.acquire()
    assert worker is not None
    commands = [Reset(Task(id=until, split="train", data={"place": place, "fail": until}), 0), Perform(Action(text=""))]
    for command in [*commands, Finish()]:
        pool.submit(worker, command)
        ((_, _),) = pool.poll(None)
        if pool.pids().get(worker) is None:  # it failed: its process is gone
            break
    pool.release(worker)


def daemons(place: Path) -> list[int]:
    """The daemons that were started and still live."""
    pids = [int(path.name) for path in place.iterdir()]
    assert pids, "no daemon was ever started"
    return [pid for pid in pids if _lives(pid)]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(place: Path) -> bool:
    limit = time.monotonic() + 30
    while (left := daemons(place)) and time.monotonic() < limit:
        time.sleep(0.02)
    return not left


@pytest.mark.parametrize("phase", ["reset", "step", "hang", "snapshot", "verify", "close", "nothing"])
def test_p48_a_daemon_of_any_phase_is_gone_with_its_worker(phase, tmp_path):
    with Pool(REF, 2, HASTY if phase == "hang" else DEADLINES, label=f"test-{os.getpid()}") as pool:
        play(pool, str(tmp_path), until=phase)
        if phase != "nothing":
            assert gone(tmp_path), "a worker that failed leaves what it had started"
    assert gone(tmp_path)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_p48_what_a_killed_trainer_leaves_is_reaped_at_the_next_start(how, tmp_path):
    label = f"test-killed-{os.getpid()}"
    command = [sys.executable, "-c", TRAINER, str(Path(__file__).parent), label, str(tmp_path), "nothing"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "ready\n"
        trainer.send_signal(how)
        trainer.wait(timeout=60)
    with Pool(REF, 1, DEADLINES, label=label):
        assert gone(tmp_path)


def test_other_runs_are_left_alone(tmp_path):
    label = f"test-other-{os.getpid()}"  # a run of the tests beside this one has another
    with Pool(REF, 1, DEADLINES, label=label) as pool:
        play(pool, str(tmp_path), until="nothing")
        assert orphans.reap(orphans.RUN, label[:-1]) == 0 and orphans.reap(orphans.RUN, "") == 0
        assert daemons(tmp_path)
    assert gone(tmp_path)


def test_a_label_is_one_for_a_directory_and_fit_for_a_container():
    label = orphans.run_label(Path("runs/über alles"))
    assert label == orphans.run_label(Path.cwd() / "runs/über alles") != orphans.run_label(Path("other/über alles"))
    assert label.startswith("ber-alles-") and len(orphans.run_label(Path("x" * 200))) <= 73
    assert orphans.run_label(Path("...")).startswith("run-")
