"""Settings of every test: CPU, 8 virtual devices, strict promotion. Warnings are errors by pyproject.toml.

They are environment variables, set before anything imports JAX, so that tests of the JAX-free half stay free of JAX and
so that processes which a test starts (the command line, a worker) run under the same rules.
"""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, settings

DEVICES = 8
# On two cores, 8 devices share few threads: a collective may wait long for its last participant. The defaults (a
# warning after 20 s, an abort after 40 s) turn a busy machine into a failure. The abort stays below pytest's own
# timeout, since it names the collective.
COLLECTIVE_FLAGS = {
    "--xla_force_host_platform_device_count": str(DEVICES),
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "60",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "240",
}


def _configure_jax() -> None:
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before tests/conftest.py could set its device count")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
    os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"{flag}={value}" for flag, value in COLLECTIVE_FLAGS.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()


_configure_jax()

# Hypothesis fails an example that takes longer than 200 ms, and a strategy that draws slowly: on a busy machine, any.
# With CI set (`.ci/run` does) the examples are the same in every run; elsewhere each run draws new ones.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("any machine")


SHARED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
PROBE = "import jax; jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.ones((8, 8)))"


def pytest_configure(config: pytest.Config) -> None:
    """Workers of one session, and the processes their tests start, share what they compiled; nothing outlives it."""
    name = "JAX_COMPILATION_CACHE_DIR"
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput") or name in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="agentrl-compiled-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    shared = {name: folder, **SHARED}
    if _loads_what_it_compiled({**os.environ, **shared}):
        os.environ.update(shared)


def _loads_what_it_compiled(environment: dict[str, str]) -> bool:
    """On some processors XLA complains of programs that it made itself (jax-ml/jax#38445): there nothing is shared."""
    for _ in range(2):
        command = [sys.executable, "-W", "error", "-c", PROBE]
        probe = subprocess.run(command, env=environment, capture_output=True, check=False)
    return probe.returncode == 0 and not probe.stderr
