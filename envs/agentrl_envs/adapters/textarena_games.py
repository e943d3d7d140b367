"""TextArena games for one player.

suite("Wordle-v0")       suite("Hangman-v0", goal=1.0)
"""

from __future__ import annotations

import importlib
import importlib.util
import random
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
    StopReason,
    Suite,
    Task,
    ToolCall,
)

from ..answering import Reply, answer, shown, tool
from ..replaying import ReplayingEnvironment
from . import common

VERSION = "1"
MOVE = tool(
    "move", "Say one move, in the form that the game asks for.", {"text": {"type": "string", "maxLength": 2000}}
)


def missing() -> str | None:
    if importlib.util.find_spec("textarena") is None:
        return "textarena is not installed: pip install textarena"
    return None


def suite(
    game: str = "FrozenLake-v0", options: Mapping[str, Any] | None = None, goal: float | None = 1.0, steps: int = 64
) -> Suite:
    """A one-player game as a suite; `options` go to `textarena.make`, a task is a seed.

    The outcome is whether the game's final reward reaches `goal`; `goal=None` makes it the reward itself, cut to 0..1.
    """
    _make(game, options or {})
    spec = EnvironmentSpec(
        name=f"textarena-{game}",
        version=VERSION,
        tools=(MOVE,),
        budget=Budget(steps=steps, tool_calls=steps, write_actions=steps, finishing=("move",)),
        fork="replay",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=partial(GameEnvironment, spec, game, dict(options or {})),
        tasks=partial(common.seeded_tasks, spec.name),
        verify=partial(_verify, goal),
        verifier_version=common.JUDGE_VERSION,
    )


def _make(game: str, options: Mapping[str, Any]) -> Any:
    try:
        return importlib.import_module("textarena").make(env_id=game, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"textarena has no game {game!r} with these options: {error}") from error


def _verify(
    goal: float | None, task: Task, initial: Any, actions: Sequence[Action], final: Any, stop: StopReason | None = None
) -> Any:
    return common.judge(actions, final, goal, stop, last_only=True)


class GameEnvironment(ReplayingEnvironment):
    """One game. Games draw from Python's global generator: its state is the game's own and is put back after each
    move, so that games side by side do not disturb each other."""

    def __init__(self, spec: EnvironmentSpec, name: str, options: dict[str, Any]) -> None:
        self.spec = spec
        self._name, self._options = name, options
        self._inner: Any = None
        self._chance: Any = None
        self._rewards: list[float | None] = []
        self._ended = False

    def begin(self, task: Task, seed: int) -> Observation:
        self._rewards, self._ended = [], False
        self._chance = random.Random(int(task.data["seed"])).getstate()

        def start() -> str:
            self._inner = _make(self._name, self._options)
            self._inner.reset(num_players=1, seed=int(task.data["seed"]))
            return self._observed()

        return Observation(content=(Message(role="user", content=shown(self._drawing(start))),))

    def act(self, action: Action) -> Observation:
        return answer(action, self.spec.tools, self._take, lambda: self._ended)

    def _take(self, call: ToolCall) -> Reply:
        over, _ = self._drawing(lambda: self._inner.step(str(call.arguments["text"])))
        if not over:
            return Reply(self._drawing(self._observed))
        rewards, _ = self._inner.close()
        self._ended = True
        self._rewards = [common.reward_of((rewards or {}).get(0))]
        return Reply("the game is over", terminated=True)

    def _observed(self) -> str:
        _, observed = self._inner.get_observation()
        return observed if isinstance(observed, str) else "\n".join(str(part[1]) for part in observed)

    def _drawing(self, do: Any) -> Any:
        outside = random.getstate()
        random.setstate(self._chance)
        try:
            return do()
        finally:
            self._chance = random.getstate()
            random.setstate(outside)

    def measured(self) -> Json:
        return {"rewards": self._rewards, "ended": self._ended}

    def end(self) -> None:
        self._inner = None
