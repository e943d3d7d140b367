"""Processes that train one run, as real processes: they meet, agree on stopping, and name who hangs or is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_jax.errors import UserError
from agentrl_jax.runtime.hosts import Hosts
from agentrl_jax.runtime.interrupts import Interrupts
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import os, random, signal, sys, time
from agentrl_jax.errors import UserError
from agentrl_jax.runtime import hosts as module
from agentrl_jax.runtime.clock import Clock
from agentrl_jax.runtime.hosts import Hosts, join
from agentrl_jax.runtime.interrupts import Interrupted, Interrupts

me, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
clock = Clock()

def main(hosts, interrupts):
{body}

code = 0
try:
    with Interrupts() as interrupts, join(address, count, me, wait_s=60) as hosts:
        hosts.timeout_s, hosts.lost_s = {timeout_s}, {lost_s}
        hosts.watch(lambda: clock.now, interrupts)
        main(hosts, interrupts)
except UserError as error:
    print("agentrl: error:", error, file=sys.stderr)
    code = 2
except Interrupted as error:
    code = 128 + error.number
sys.exit(module.end(code))
"""


def start(body: str, *, count: int = 2, timeout_s: float = 30, lost_s: float = 30) -> list[subprocess.Popen]:
    address = f"127.0.0.1:{free_port()}"
    indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
    script = BEGIN.format(body=indented, timeout_s=timeout_s, lost_s=lost_s)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": str(ROOT)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, str(k), str(count), address],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for k in range(count)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of each."""
    try:
        found = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, found, strict=True)]


def test_alone_nothing_is_waited_for_and_nothing_runs():
    hosts = Hosts()
    with hosts:
        assert hosts.exchange({"rows": 3}) == [{"rows": 3}] and hosts.first("a") == "a"
        assert list(hosts.share(5)) == [0, 1, 2, 3, 4] and hosts.leads


def test_shares_are_stretches_that_hold_everything_once():
    hosts = Hosts()
    for count in (1, 2, 3, 7):
        found = []
        for index in range(count):
            hosts.index, hosts.count = index, count
            found += hosts.share(12)
        assert found == list(range(12))


def test_a_signal_passed_on_stops_at_the_next_check():
    with Interrupts() as interrupts:
        interrupts.check()
        interrupts.pass_on(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            interrupts.check()


def test_all_see_what_each_gave_and_a_signal_to_one_stops_all_at_the_same_meeting():
    body = """
with hosts.leader_first():
    print("resolved", me, flush=True)
noise = random.Random(0).randbytes(500_000).hex()  # what compression makes no less: several pieces
for n in range(10_000):
    if me == 1 and n == 20:
        os.kill(os.getpid(), signal.SIGTERM)
    text = noise if n == 3 else "x" * n
    try:
        found = hosts.exchange({"of": me, "n": n, "text": text})
    except Interrupted:
        print("stopped", n, hosts.exchange(n), flush=True)
        left = [key for key, _ in hosts._client.key_value_dir_get_bytes("agentrl/") if "alive" not in key]
        assert len(left) < 10, left  # of the last meetings alone
        raise
    assert found == [{"of": k, "n": n, "text": text} for k in (0, 1)]
    assert hosts.first(me) == 0
    assert hosts.gather([me, text]) == (None if me else [[0, text], [1, text]])
"""
    (code, out, err), (other_code, other_out, other_err) = ended(start(body))
    assert code == other_code == 128 + signal.SIGTERM, err + other_err
    assert "stopped 20 [20, 20]" in out and "stopped 20 [20, 20]" in other_out
    assert err == other_err == ""


def test_a_process_that_raised_and_never_closes_still_says_why():
    body = """
module._GRACE_S = 1.0
if me == 1:
    raise UserError("the disk is full")
try:
    hosts.exchange(0)
finally:
    time.sleep(90)
"""
    (code, _, err), _ = ended(start(body))
    assert code == 2 and "process 1 of 2" in err.splitlines()[-1] and "the disk is full" in err


def test_a_process_that_ends_gives_its_reason_to_all():
    body = """
if me == 1:
    hosts.exchange(0)
    raise UserError("the disk is full")
hosts.exchange(0)
with clock.phase("rollout"):
    while True:
        interrupts.check()
        time.sleep(0.01)
"""
    (code, _, err), (other_code, _, other_err) = ended(start(body))
    assert (code, other_code) == (2, 2)
    assert err == "agentrl: error: process 1 of 2 ended: the disk is full\n"
    assert other_err == "agentrl: error: the disk is full\n"


def test_a_process_that_hangs_is_named_with_its_phase_and_all_end():
    body = """
if me == 1:
    with clock.phase("rollout"):
        time.sleep(1000)
hosts.exchange(0)
"""
    (code, _, err), (other_code, _, other_err) = ended(start(body, timeout_s=3))
    assert (code, other_code) == (2, 2)
    assert (
        err.startswith("agentrl: error: process 1 of 2 has been in phase 'rollout' for ") and len(err.splitlines()) == 1
    )
    assert other_err.startswith("agentrl: error: process 0 of 2 ended: process 1 of 2 has been in phase 'rollout'")


@pytest.mark.parametrize("signalled", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_process_that_is_gone_is_named_also_where_the_other_waits_in_a_device_program(signalled: signal.Signals):
    body = f"""
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
everywhere = NamedSharding(Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec())
hosts.exchange(0)
if me == 1:
    with clock.phase("update"):
        hosts._beat()  # a sign of life in this phase
        time.sleep(4)  # by now the other waits in the device program
        os.kill(os.getpid(), {int(signalled)})
with clock.phase("update"):
    split = NamedSharding(everywhere.mesh, PartitionSpec("all"))
    spread = jax.make_array_from_callback((2,), split, lambda i: np.ones(2, np.float32)[i])
    jax.block_until_ready(jax.jit(lambda x: x.sum(), out_shardings=everywhere)(spread))
"""
    processes = start(body, lost_s=5)
    try:
        _, err = processes[0].communicate(timeout=150)
    finally:
        processes[0].kill()
        processes[1].kill()
        processes[1].communicate()
    assert processes[0].returncode == 2, err
    assert "agentrl: error: process 1 of 2 is gone: last seen in phase 'update'" in err.splitlines()[-1]


def test_the_death_of_process_0_is_named_by_the_others():
    body = """
hosts.exchange(0)
if me == 0:
    with clock.phase("checkpoint"):
        hosts._beat()
        time.sleep(2.5)
        os.kill(os.getpid(), signal.SIGKILL)
hosts.exchange(1)
"""
    _, (code, _, err) = ended(start(body, lost_s=3))
    assert code not in (0, None)
    assert "agentrl: error: process 0 of 2 is gone: last seen in phase 'checkpoint'" in err.splitlines()[-1]


def test_a_process_that_nobody_meets_says_so():
    address = f"127.0.0.1:{free_port()}"
    script = f"from agentrl_jax.runtime.hosts import join; join({address!r}, 2, 0, wait_s=2)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "agentrl: error: process 0 of 2: the processes did not find each other within 2 s"
    )


def test_one_line_says_that_a_run_ended():
    hosts = Hosts()
    with pytest.raises(UserError, match="mine"), hosts:
        raise UserError("mine")
