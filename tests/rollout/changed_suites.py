"""The workflow environment with one thing changed after receipts were written: what a replay must find out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl_envs import workflow

from agentrl_jax.protocol import Action, Environment, Observation, Snapshot, StopReason, Suite, Task

_count = itertools.count()


class Changed:
    """Answers of calls of `tool` (of every call, where it is empty) get some words more."""

    def __init__(self, inner: Environment, tool: str | None, flaky: bool) -> None:
        self.spec, self._inner, self._tool, self._flaky = inner.spec, inner, tool, flaky

    def reset(self, task: Task, seed: int) -> Observation:
        return self._inner.reset(task, seed)

    def step(self, action: Action) -> Observation:
        observation = self._inner.step(action)
        if self._tool is None or (self._tool and self._tool not in {call.name for call in action.calls}):
            return observation
        words = f" {next(_count)}" if self._flaky else " indeed"
        content = [replace(message, content=message.content + words) for message in observation.content]
        return replace(observation, content=tuple(content))

    def snapshot(self) -> Snapshot:
        return self._inner.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._inner.restore(snapshot)

    def close(self) -> None:
        self._inner.close()


def changed(
    tool: str | None = None, version: str = "1", environment: str = "1", verifier: str = "2", flaky: str = "",
    judged: float = 1.0,
) -> Suite:  # fmt: skip
    """`tool`: whose answers differ ("": all of them), with `version` as its version; `environment`, `verifier`: their
    versions; `flaky`: "answers" or "verdicts"; `judged`: the quality is multiplied by it."""
    suite = workflow.suite()
    tools = [replace(one, version=version) if one.name == tool else one for one in suite.spec.tools]
    spec = replace(suite.spec, tools=tuple(tools), version=environment)

    def verify(
        task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot, stop: StopReason | None = None
    ) -> Any:
        verdict = suite.judge(task, initial, actions, final, stop)
        scale = 1.0 / (2 + next(_count)) if flaky == "verdicts" else judged
        return replace(verdict, quality=(verdict.quality or 0.0) * scale)

    return replace(
        suite, spec=spec, make=lambda: Changed(suite.make(), tool, flaky == "answers"), verify=verify,
        verifier_version=verifier,
    )  # fmt: skip
