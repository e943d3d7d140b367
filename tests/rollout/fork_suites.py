"""Environments for the tests of forks: one that can only be replayed, and one whose state is too large to travel."""

from __future__ import annotations

import itertools
import json
import os
import random

from agentrl_envs.replaying import ReplayingEnvironment

from agentrl_jax.protocol import (
    Action,
    Budget,
    EnvironmentSpec,
    Message,
    Observation,
    Snapshot,
    Status,
    Suite,
    Task,
    Tool,
    ToolCall,
    Verdict,
)

_NONE = {"type": "object", "properties": {}}
_SAY = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
TOOLS = (
    Tool(name="roll", description="Roll a die.", parameters=_NONE, writes=True),
    Tool(name="finish", description="Say the total of three rolls.", parameters=_SAY),
)
_rolls = itertools.count()


def _dice(task: Task, seed: int):
    """A generator: it cannot be copied, pickled or read."""
    rng = random.Random(f"{task.id}/{seed}")
    while True:
        yield rng.randint(1, 10_000)  # of so many faces that no two tasks roll alike


class Dice(ReplayingEnvironment):
    """Roll three times and say the total. `fault`: which part of the replay goes wrong."""

    def __init__(self, spec: EnvironmentSpec, fault: str) -> None:
        self.spec, self.fault = spec, fault
        self.open = 0

    def begin(self, task: Task, seed: int) -> Observation:
        self.open += 1
        self.dice, self.total, self.said = _dice(task, task.data["salt"]), 0, None
        return Observation(content=(Message(role="user", content="roll three times and say the total"),))

    def act(self, action: Action) -> Observation:
        if action.error is not None or not action.calls:
            return _answer(["call a tool"], bad=True)
        answers = [self._perform(call) for call in action.calls]
        return _answer([text for text, _ in answers], any(bad for _, bad in answers), over=self.said is not None)

    def _perform(self, call: ToolCall) -> tuple[str, bool]:
        if self.said is not None:
            return "it is over", True
        if call.name == "roll" and not call.arguments:
            face = next(self.dice) + (next(_rolls) if self.fault == "observation" else 0)
            self.total += face
            return f"a {face}", False
        if call.name == "finish" and set(call.arguments) == {"total"} and type(call.arguments["total"]) is int:
            self.said = call.arguments["total"]
            return "thank you", False
        return "no such call", True

    def end(self) -> None:
        self.open -= 1

    def measured(self):
        return [self.total, self.said, next(_rolls) if self.fault == "measured" else 0]


def _answer(texts: list[str], bad: bool, over: bool = False) -> Observation:
    content = tuple(Message(role="tool", content=text) for text in texts)
    return Observation(content=content, status=Status.INVALID_ACTION if bad else Status.OK, terminated=over)


def _verify(task: Task, initial: Snapshot, actions, final: Snapshot) -> Verdict:
    total, said, _ = json.loads(final.data)["measured"]
    rolls = sum(call.name == "roll" for action in actions for call in action.calls)
    return Verdict(outcome=said == total == _total(task) and rolls == 3)


def _total(task: Task) -> int:
    return sum(itertools.islice(_dice(task, task.data["salt"]), 3))


def _tasks(split: str, count: int, seed: int) -> list[Task]:
    splits = ("train", "validation", "heldout")
    if split not in splits:
        raise ValueError(f"dice: split={split!r} is not known; expected one of {', '.join(splits)}")
    return [
        Task(id=f"{split}-{seed}-{i}", split=split, data={"salt": 3 * i + splits.index(split)}) for i in range(count)
    ]


def dice(fault: str = "", version: str = "1") -> Suite:
    budget = Budget(finishing=("finish",))
    spec = EnvironmentSpec(name="dice", version=version, tools=TOOLS, budget=budget, fork="replay")
    roll = ToolCall(name="roll")
    return Suite(
        spec=spec, make=lambda: Dice(spec, fault), tasks=_tasks, verify=_verify, verifier_version="1",
        solve=lambda task: [roll, roll, roll, ToolCall(name="finish", arguments={"total": _total(task)})],
    )  # fmt: skip


class Large:
    """Its state is as many bytes as it is told."""

    def __init__(self, spec: EnvironmentSpec, size: int) -> None:
        self.spec, self.data = spec, bytes(size)

    def reset(self, task: Task, seed: int) -> Observation:
        return Observation(content=(Message(role="user", content="finish"),))

    def step(self, action: Action) -> Observation:
        return _answer([f"process {os.getpid()}"], False)

    def snapshot(self) -> Snapshot:
        return Snapshot(data=self.data, hash=str(len(self.data)))

    def restore(self, snapshot: Snapshot) -> None:
        self.data = snapshot.data

    def close(self) -> None:
        pass


def large(size: int) -> Suite:
    spec = EnvironmentSpec(name="large", version="1", tools=TOOLS, fork="native")
    return Suite(
        spec=spec, make=lambda: Large(spec, size), tasks=_tasks, verify=lambda *_: Verdict(), verifier_version="1"
    )
