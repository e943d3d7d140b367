"""Plays turns in an environment and verifies them. The folder itself goes on the path, for other processes as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

from agentrl_jax.protocol import Action, Observation, Snapshot, Suite, Task, ToolCall, Verdict

sys.path.insert(0, str(Path(__file__).parent))


class Played(NamedTuple):
    verdict: Verdict
    observations: list[Observation]
    actions: list[Action]
    initial: Snapshot
    final: Snapshot


def _play(suite: Suite, task: Task, turns: Sequence[ToolCall | str]) -> Played:
    environment = suite.make()
    environment.reset(task, 0)
    initial = environment.snapshot()
    observations, actions = [], []
    for turn in turns:
        calls = (turn,) if isinstance(turn, ToolCall) else ()
        actions.append(Action(text=str(turn), calls=calls))
        observations.append(environment.step(actions[-1]))
        if observations[-1].terminated:
            break
    final = environment.snapshot()
    environment.close()
    return Played(suite.verify(task, initial, actions, final), observations, actions, initial, final)


@pytest.fixture(scope="session")
def play() -> Callable[[Suite, Task, Sequence[ToolCall | str]], Played]:
    """play(suite, task, turns) -> Played"""
    return _play


def _calls(work: Callable[[], object]) -> int:
    """What it costs, told the same by any machine: function calls, those into C too."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.fixture(scope="session")
def calls() -> Callable[[Callable[[], object]], int]:
    """calls(work) -> how many function calls it takes."""
    return _calls
