"""Boxes on every back end that this machine has. `escapes` and what it imports are plain modules."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import engine
from agentrl_envs.sandbox import Sandbox, docker, open_sandbox
from agentrl_envs.sandbox.opening import works

Make = Callable[..., Sandbox]
BACKENDS = ["namespaces", "landlock", *(pytest.param(name, marks=pytest.mark.slow) for name in ("docker", "gvisor"))]


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[None]:
    """A Docker engine, whose address is in DOCKER_HOST."""
    if why_not := engine.missing():
        pytest.skip(why_not)
    with engine.started() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", address)
        yield
        docker.end_all()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a back end that works here."""
    if request.param == "gvisor" and (why_not := engine.gvisor_missing()):
        pytest.skip(why_not)
    if request.param in ("docker", "gvisor"):
        request.getfixturevalue("docker_engine")
    elif why_not := works(request.param):
        pytest.skip(f"{request.param}: {why_not}")
    return request.param


@pytest.fixture
def make(backend: str) -> Iterator[Make]:
    """make(files, **options) -> a box, closed with the test. `fresh`: with a keeper that is started only then."""
    boxes = []

    def opened(files: Any = None, *, fresh: bool = False, **options: Any) -> Sandbox:
        label = f"tests-{time.monotonic_ns()}" if fresh else "tests"
        chosen = {"backend": "docker", "runtime": "runsc"} if backend == "gvisor" else {"backend": backend}
        boxes.append(open_sandbox(files, **{**chosen, "run_label": label, **options}))
        return boxes[-1]

    yield opened
    for box in boxes:
        box.close()
