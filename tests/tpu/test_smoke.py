"""The smoke test of a slice, run as users run it: in processes of its own, here on virtual CPU devices."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentrl_jax.batch import TokenBatch
from tests.ports import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
SMOKE = ROOT / "tpu" / "smoke.py"
SMALL = ("policy.layers=1", "policy.width=32")
# Nothing here is computed for long: compiling without optimisation is twice as fast.
FAST = "--xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", SMOKE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(*arguments: str, devices: int) -> subprocess.Popen:
    given = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    flags = f"{given} {FAST} --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    return subprocess.Popen(
        [sys.executable, str(SMOKE), *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(output: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"loss ([\d.]+), then ([\d.]+)", output)]


def test_proves_eight_devices():
    process = start("--devices", "8", "--platform", "cpu", *SMALL, devices=8)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert output.splitlines()[-1] == "[0/1] ok"
    assert all(f"{name} over 8 devices: right on 8" in output for name in ("all-reduce", "all-gather"))
    together, alone = losses(output)
    np.testing.assert_allclose(together, alone, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--devices", "16"], "expected 16 devices, found 8"),
        (["--platform", "tpu"], "expected platform tpu, found cpu"),
        (["--processes", "2", "--process", "0"], "go together"),
    ],
)
def test_says_what_is_wrong(smoke, capsys, monkeypatch, arguments, reason):
    monkeypatch.setattr(smoke.jax.config, "update", lambda *_: None)  # the precision of other tests stays
    try:
        assert smoke.main(arguments) == 1
    except SystemExit as stopped:
        assert stopped.code == 2
    found = capsys.readouterr()
    assert reason in found.out + found.err


def test_a_wrong_collective_is_found(smoke, monkeypatch):
    smoke.check_collectives()
    right = smoke.jax.lax.psum
    monkeypatch.setattr(smoke.jax.lax, "psum", lambda x, axis: right(x, axis) + 1)
    with pytest.raises(smoke.Failed, match="all-reduce on device 0"):
        smoke.check_collectives()


@pytest.mark.parametrize("devices", [1, 6, 8, 64])
def test_repeated_rows_have_the_same_total_weight(smoke, devices):
    fields = {name: np.zeros((16, 4), np.float32) for name in TokenBatch._fields}
    fields["weights"] = np.full((16, 4), 0.5, np.float32)
    batch = smoke.repeated(TokenBatch(**fields), devices)
    assert len(batch.tokens) % devices == 0 and len(batch.tokens) % 16 == 0
    np.testing.assert_allclose(batch.weights.sum(), 32, rtol=1e-6)


def test_a_phase_that_hangs_ends_the_process_and_is_named():
    program = f"""
import importlib.util, time
spec = importlib.util.spec_from_file_location("smoke", {str(SMOKE)!r})
smoke = importlib.util.module_from_spec(spec)
spec.loader.exec_module(smoke)
with smoke.phase("collectives", 0.1):
    time.sleep(60)
"""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "envs")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "process 0/1: phase `collectives` did not end within 0.1 s" in done.stderr


@pytest.mark.slow
def test_two_processes_over_gloo_are_one_slice():
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--devices", "4", *SMALL)
    processes = [start(*where, "--process", str(index), devices=2) for index in range(2)]
    outputs = [process.communicate(timeout=280) for process in processes]
    for index, (process, (output, errors)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, errors
        assert f"[{index}/2] ok" in output and f"[{index}/2] 2 of 4 devices here" in output
        together, alone = losses(output)
        np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert losses(outputs[0][0]) == losses(outputs[1][0])


@pytest.mark.slow
def test_a_host_that_never_comes_is_named():
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process", "0", "--timeout", "10")
    process = start(*where, devices=1)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 3
    assert "phase `join` did not end within 10 s" in output + errors
