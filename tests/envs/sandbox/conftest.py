"""Boxes on every back end that this machine has. `escapes` is a plain module of this folder, also run as a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from agentrl_envs.sandbox import Sandbox, available, open_sandbox

Make = Callable[..., Sandbox]


@pytest.fixture(params=["namespaces", "landlock"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """make(files, **options) -> a box, closed with the test."""
    why_not = available()[request.param]
    if why_not:
        pytest.skip(f"{request.param}: {why_not}")
    boxes = []

    def opened(files: Any = None, **options: Any) -> Sandbox:
        boxes.append(open_sandbox(files, **{"backend": request.param, "run_label": "tests", **options}))
        return boxes[-1]

    yield opened
    for box in boxes:
        box.close()
