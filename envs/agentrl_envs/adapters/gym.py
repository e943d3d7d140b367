"""Gymnasium environments with discrete or text actions.

suite("Taxi-v4", goal=1.0)       suite("my_package:MyEnv-v0", options={"size": 4}, actions=["left", "right"])
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl_jax.protocol import (
    Action,
    Budget,
    EnvironmentSpec,
    Json,
    Message,
    Observation,
    Status,
    Suite,
    Task,
    ToolCall,
)

from ..answering import Reply, answer, shown, tool
from ..replaying import ReplayingEnvironment
from . import common

VERSION = "1"


def missing() -> str | None:
    if importlib.util.find_spec("gymnasium") is None:
        return "gymnasium is not installed: pip install 'agentrl-jax[adapters]'"
    return None


def suite(
    environment: str = "Taxi-v4",
    options: Mapping[str, Any] | None = None,
    actions: Sequence[str] = (),
    instructions: str = "",
    goal: float | None = 1.0,
    most: float = 1.0,
    steps: int = 64,
) -> Suite:
    """A registered Gymnasium environment as a suite.

    `options` go to `gymnasium.make`. `actions` names the discrete actions, in order; `instructions` is shown before
    the first observation. The outcome is whether the return reaches `goal`; `goal=None` makes it return / `most`. A
    task is a seed. Raises ValueError for an action space that is neither Discrete nor Text.
    """
    made = _make(environment, options or {})
    try:
        schema = _action_schema(environment, made.action_space, actions)
    finally:
        made.close()
    act = tool("act", "Take one action.", {"action": schema})
    spec = EnvironmentSpec(
        name=f"gym-{environment}",
        version=VERSION,
        tools=(act,),
        budget=Budget(steps=steps, tool_calls=steps, write_actions=steps, finishing=("act",)),
        fork="replay",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=partial(GymEnvironment, spec, environment, dict(options or {}), tuple(actions), instructions),
        tasks=partial(common.seeded_tasks, spec.name),
        verify=partial(common.verify, goal, most),
        verifier_version=common.JUDGE_VERSION,
    )


def _make(environment: str, options: Mapping[str, Any]) -> Any:
    import gymnasium

    try:
        return gymnasium.make(environment, **options)
    except gymnasium.error.Error as error:
        raise ValueError(f"gymnasium has no environment {environment!r}: {error}") from error


def _action_schema(environment: str, space: Any, actions: Sequence[str]) -> dict[str, Any]:
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return {"type": "string", "maxLength": int(space.max_length)}
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"{environment}: actions of {type(space).__name__}; expected Discrete or Text")
    count = int(space.n)
    if not actions:
        return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start) + count - 1}
    if len(actions) != count or len(set(actions)) != count:
        raise ValueError(f"{environment} has {count} actions; actions={list(actions)!r} must name each once")
    return {"type": "string", "enum": list(actions)}


class GymEnvironment(ReplayingEnvironment):
    """One Gymnasium environment. Its info dict and its rewards never reach the policy."""

    def __init__(
        self, spec: EnvironmentSpec, name: str, options: dict[str, Any], actions: tuple[str, ...], instructions: str
    ) -> None:
        self.spec = spec
        self._name, self._options, self._named, self._instructions = name, options, actions, instructions
        self._inner: Any = None
        self._rewards: list[float | None] = []
        self._ended = False

    def begin(self, task: Task, seed: int) -> Observation:
        self._inner = _make(self._name, self._options)
        self._rewards, self._ended = [], False
        first, _ = self._inner.reset(seed=int(task.data["seed"]))
        text = f"{self._instructions}\n{common.say(first)}".strip()
        return Observation(content=(Message(role="user", content=shown(text) or "."),))

    def act(self, action: Action) -> Observation:
        return answer(action, self.spec.tools, self._take, lambda: self._ended)

    def _take(self, call: ToolCall) -> Reply:
        chosen: Any = call.arguments["action"]
        if self._named:
            chosen = self._named.index(chosen) + int(self._inner.action_space.start)
        if not self._inner.action_space.contains(chosen):
            return Reply("error: this is not an action of the environment", Status.INVALID_ACTION)
        observed, reward, terminated, truncated, _ = self._inner.step(chosen)
        self._rewards.append(common.reward_of(reward))
        self._ended = bool(terminated or truncated)
        return Reply(common.say(observed), terminated=bool(terminated), truncated=bool(truncated))

    def measured(self) -> Json:
        return {"rewards": self._rewards, "ended": self._ended}

    def end(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.close()
