"""An environment that starts a daemon in every phase: a process of a session of its own, which no group holds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Snapshot, Suite, Task, Verdict

SPEC = EnvironmentSpec(name="daemons", version="1", tools=())


def leave(task: Task) -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (Path(task.data["place"]) / str(process.pid)).touch()


class Daemons:
    spec = SPEC

    def __init__(self) -> None:
        self.task: Task | None = None
        self.phase = ""

    def reset(self, task: Task, seed: int) -> Observation:
        self.task = task
        return self._at("reset")

    def step(self, action: Action) -> Observation:
        return self._at("step")

    def snapshot(self) -> Snapshot:
        if self.phase == "step":
            self._at("snapshot")
        return Snapshot(data=b"", hash="")

    def restore(self, snapshot: Snapshot) -> None:
        pass

    def close(self) -> None:
        self._at("close")

    def _at(self, phase: str) -> Observation:
        assert self.task is not None
        leave(self.task)
        self.phase = phase
        if self.task.data["fail"] == phase:
            raise RuntimeError(f"broken in {phase}")
        if self.task.data["fail"] == "hang" and phase == "step":
            time.sleep(600)
        return Observation(content=(Message(role="user", content=phase),))


def verify(task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot) -> Verdict:
    leave(task)
    if task.data["fail"] == "verify":
        raise RuntimeError("broken in verify")
    return Verdict(outcome=True)


def suite() -> Suite:
    return Suite(spec=SPEC, make=Daemons, tasks=lambda *_: (), verify=verify, verifier_version="1")
