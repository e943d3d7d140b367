"""`workflow` with faults to be injected: `task.data["fault"]` names one, `FAULTS` says whose it must be found to be.

Each fault strikes at the second action of an episode, or where its name says; the `once_` ones only the first time that
a task is played, as a flaky machine does (a file in `scratch` remembers).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl_envs.workflow import suite as workflow

from agentrl_jax.protocol import (
    Action,
    Cause,
    EnvironmentSpec,
    EnvStatus,
    Message,
    Observation,
    Snapshot,
    Status,
    Suite,
    Task,
    Verdict,
)

ENVIRONMENT, EVALUATOR, POLICY = Cause.ENVIRONMENT, Cause.EVALUATOR, Cause.POLICY
FAULTS: dict[str, Cause | None] = {  # None: the episode goes through as if nothing had happened
    "": None,
    "slow": None,
    "once_kill": None,
    "once_kill_reset": None,
    "once_hang": None,
    "once_down": None,
    "once_down_reset": None,
    "kill_reset": ENVIRONMENT,
    "raise_reset": ENVIRONMENT,
    "hang_reset": ENVIRONMENT,
    "raise": ENVIRONMENT,
    "exit": ENVIRONMENT,
    "raise_snapshot": ENVIRONMENT,
    "hang_snapshot": ENVIRONMENT,
    "raise_close": ENVIRONMENT,
    "down": ENVIRONMENT,
    "broken_down": ENVIRONMENT,
    "corrupt_none": ENVIRONMENT,
    "corrupt_text": ENVIRONMENT,
    "corrupt_gain": ENVIRONMENT,
    "corrupt_flag": ENVIRONMENT,
    "corrupt_role": ENVIRONMENT,
    "raise_verify": EVALUATOR,
    "kill_verify": EVALUATOR,
    "hang_verify": EVALUATOR,
    "nan_verify": EVALUATOR,
    "garbage_verify": EVALUATOR,
    "hang": POLICY,  # the same actions hang again: a hang that it can cause is never forgiven
    "kill": POLICY,
}
SLOW_S = 0.1


class Faulty:
    """A workflow tenant that fails as `task.data["fault"]` says."""

    def __init__(self, spec: EnvironmentSpec, inner: Any, scratch: str) -> None:
        self.spec, self.inner, self.scratch = spec, inner, Path(scratch)
        self.task: Task | None = None
        self.steps = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.task, self.steps = task, 0
        if (strange := self._strike("reset")) is not None:
            return strange
        return self.inner.reset(task, seed)

    def step(self, action: Action) -> Observation:
        self.steps += 1
        if self.steps == 2 and (strange := self._strike("")) is not None:
            self.steps -= 1  # nothing has happened yet: it may be asked again
            return strange
        return self.inner.step(action)

    def snapshot(self) -> Snapshot:
        if self.steps:
            self._strike("snapshot")
        return self.inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self.inner.restore(snapshot)

    def close(self) -> None:
        self._strike("close")
        self.inner.close()

    def _strike(self, place: str) -> Any:
        assert self.task is not None
        fault = str(self.task.data.get("fault", ""))
        once, fault = fault.startswith("once_"), fault.removeprefix("once_")
        kind, _, at = fault.partition("_")
        if kind in ("corrupt", "broken"):
            kind, at = fault, ""
        if not fault or at != place or (once and not self._first(place)):
            return None
        return strike(kind)

    def _first(self, place: str) -> bool:
        assert self.task is not None
        mark = self.scratch / f"{self.task.id}-{self.task.data['member']}-{place}".replace("/", "-")
        if mark.exists():
            return False
        mark.touch()
        return True


def strike(kind: str) -> Any:
    """Fails, or gives the observation that a broken environment gives; None where it was only slow."""
    if kind == "raise":
        raise ConnectionError("the database went away")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(600)
    if kind == "slow":
        time.sleep(SLOW_S)
        return None
    if kind in ("down", "broken_down"):
        health = EnvStatus(service="tenant database: 503", retryable=kind == "down")
        return Observation(content=(Message(role="tool", content="503"),), status=Status.ERROR, env_status=health)
    answer = (Message(role="tool", content="ok"),)
    corrupt: dict[str, Any] = {"corrupt_none": None, "corrupt_text": Observation(content="ok")}  # type: ignore[arg-type]
    corrupt["corrupt_gain"] = Observation(content=answer, evidence_gain=float("nan"))
    corrupt["corrupt_flag"] = Observation(content=answer, terminated="no")  # type: ignore[arg-type]
    corrupt["corrupt_role"] = Observation(content=(replace(answer[0], role="oracle"),))  # type: ignore[arg-type]
    return 7 if corrupt[kind] is None else corrupt[kind]


@dataclass(frozen=True)
class FaultyVerifier:
    inner: Any

    def __call__(self, task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot) -> Any:
        kind, _, place = str(task.data.get("fault", "")).partition("_")
        if place != "verify":
            return self.inner(task, initial, actions, final)
        if kind == "nan":
            return Verdict(outcome=float("nan"))
        return 1.0 if kind == "garbage" else strike(kind)


def suite(scratch: str = "") -> Suite:
    """The workflow suite, which takes tasks that name a fault."""
    inner = workflow()
    spec = replace(inner.spec, name="faulty workflow", budget=replace(inner.spec.budget, infrastructure_retries=2))
    return replace(
        inner, spec=spec, make=lambda: Faulty(spec, inner.make(), scratch), verify=FaultyVerifier(inner.verify)
    )
