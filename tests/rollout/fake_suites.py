"""Small environments for the tests of `rollout/`, good and bad ones; workers find them by module path."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from agentrl_jax.protocol import (
    Action,
    Budget,
    EnvironmentSpec,
    Message,
    Observation,
    Snapshot,
    Status,
    StopReason,
    Suite,
    Task,
    Tool,
    Verdict,
)

_INT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_NONE = {"type": "object", "properties": {}}
ADD = Tool(name="add", description="add n", parameters=_INT, writes=True)
LOOK = Tool(name="look", description="say the count", parameters=_NONE)
BREAK = Tool(
    name="break",
    description="fail in one of many ways",
    parameters={"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]},
)
FINISH = Tool(name="finish", description="end the task", parameters=_NONE)
TOOLS = (ADD, LOOK, BREAK, FINISH)
WORDS = "you count . count to please now bad add look break how n = finish crash hang 0 1 2 3 4 5 6 7 8 9"


class Counter:
    """Counts to `task.data["goal"]`; `break` and `task.data["fault"]` make it fail; `patient` goes on after text."""

    def __init__(self, spec: EnvironmentSpec, scratch: str, patient: bool) -> None:
        self.spec, self.scratch, self.count, self.fault, self.patient = spec, scratch, 0, "", patient

    def reset(self, task: Task, seed: int) -> Observation:
        self.count, self.fault = 0, str(task.data.get("fault", ""))
        if self.fault == "reset":
            raise OSError("no room for another tenant")
        if self.fault == "print":
            for _ in range(10):
                print("x" * 1_000_000)
        if self.fault == "role":
            return self._strange()
        goal = task.data["goal"]
        rules, wish = Message(role="system", content="you count ."), f"count to {goal} please"
        return Observation(content=(rules, Message(role="user", content=wish)))

    def step(self, action: Action) -> Observation:
        if action.error is not None:
            return self._say("bad", status=Status.INVALID_ACTION)
        if not action.calls:
            return self._say(f"now {self.count}") if self.patient else Observation(content=())
        call = action.calls[0]
        if call.name == "add":
            self.count += int(call.arguments["n"])  # type: ignore[arg-type]
        elif call.name == "break":
            return self._break(str(call.arguments["how"]))
        elif call.name == "finish":
            return Observation(content=(), terminated=True)
        return self._say(f"now {self.count}")

    def snapshot(self) -> Snapshot:
        if self.fault == "snapshot" and self.count:
            raise RuntimeError("the state is gone")
        return Snapshot(data=str(self.count).encode(), hash=str(self.count))

    def restore(self, snapshot: Snapshot) -> None:
        self.count = int(snapshot.data)

    def close(self) -> None:
        if self.fault == "close":
            raise RuntimeError("cannot close")

    def _say(self, text: str, **fields: Any) -> Observation:
        return Observation(content=(Message(role="tool", content=text),), **fields)

    def _strange(self) -> Observation:
        """A message of a role that no renderer of the tests knows."""
        return Observation(content=(Message(role="oracle", content="now"),))  # type: ignore[arg-type]

    def _break(self, how: str) -> Any:
        if how.startswith("once_"):  # only the first time on this machine: what a flaky environment does
            mark = Path(self.scratch) / how
            if mark.exists():
                return self._say(f"now {self.count}")
            mark.touch()
            how = how.removeprefix("once_")
        if how == "raise":
            raise ValueError("the database is locked")
        if how == "exit":
            raise SystemExit(3)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)
        if how == "count":  # long work, which comes to an end
            time.sleep(1.0)
            return self._say(f"now {self.count}")
        if how == "none":
            return None
        if how == "unpicklable":
            return Observation(content=(), env_status=lambda: None)  # type: ignore[arg-type]
        if how == "role":
            return self._strange()
        if how == "text":
            return Observation(content="now")  # type: ignore[arg-type]
        return self._say("x" * 100_000)


def _verify(task: Task, initial: Snapshot, actions: Any, final: Snapshot, stop: StopReason | None = None) -> Any:
    fault = task.data.get("fault")
    if fault == "verify_raise":
        raise KeyError("gold")
    if fault == "verify_hang":
        time.sleep(600)
    if fault == "verify_crash":
        os._exit(7)
    if fault == "verify_nan":
        return Verdict(outcome=float("nan"))
    if fault == "verify_garbage":
        return 1.0
    if fault == "unscored":
        return Verdict()
    if fault == "witness":
        seen = [
            {"text": a.text, "calls": [[c.name, dict(c.arguments)] for c in a.calls], "error": a.error} for a in actions
        ]
        told = {
            "stop": stop and str(stop),
            "actions": seen,
            "initial": initial.data.decode(),
            "final": final.data.decode(),
        }
        return Verdict(outcome=False, diagnostics=told)
    return Verdict(outcome=int(final.data) == task.data["goal"], quality=1.0 / (1 + len(actions)))


def tasks(split: str, count: int, seed: int) -> list[Task]:
    return [Task(id=f"{split}-{seed}-{i}", split=split, kind="count", data={"goal": i % 9 + 1}) for i in range(count)]


def counter(
    *,
    fork: Any = "replay",
    scratch: str = "",
    steps: int = 16,
    retries: int = 4,
    loud: bool = False,
    patient: bool = False,
) -> Suite:
    budget = Budget(steps=steps, retries=retries, finishing=("finish",))
    spec = EnvironmentSpec(name="counter", version="3", tools=TOOLS, budget=budget, fork=fork)
    return Suite(
        spec=spec, make=lambda: Counter(spec, scratch, patient), tasks=tasks, verify=_verify, verifier_version="2",
        vocabulary=lambda: [WORDS],
    )  # fmt: skip


def broken() -> Suite:
    raise RuntimeError("the index file is missing")


def stuck() -> Suite:
    time.sleep(600)
    raise AssertionError
