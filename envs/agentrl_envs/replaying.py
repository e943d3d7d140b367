"""A base for environments whose state cannot be copied: their snapshot is their history, and restoring plays it again.

A subclass gives `begin`, `act` and `end`, and keeps what it likes in processes, pages and sockets. Every observation of
the replay is compared with the recorded one, so that a restored state is the recorded one or is refused.
"""

from __future__ import annotations

import hashlib
import json

from agentrl_jax.protocol import (
    Action,
    EnvironmentSpec,
    Json,
    Message,
    Observation,
    Snapshot,
    Status,
    Task,
)

from .transcripts import action_from_json, action_to_json, observation_hash

OVER = "the task is over"


class ForkRefused(RuntimeError):
    """A state was not copied, or the copy is not the state."""


class ReplayingEnvironment:
    """`reset`, `step`, `snapshot`, `restore` and `close` over a subclass's `begin`, `act`, `end` and `measured`.

    After `terminated` or `truncated` nothing reaches the subclass any more. `close` may be called at any time; `end`
    is called once for each `begin`, also one that raised.
    """

    spec: EnvironmentSpec
    _task: Task | None = None
    _open = False
    _seed: int
    _last: Observation
    _actions: list[Action]
    _hashes: list[str]

    def begin(self, task: Task, seed: int) -> Observation:
        """Start the episode from nothing."""
        raise TypeError(f"{type(self).__name__} has no begin")

    def act(self, action: Action) -> Observation:
        """Perform an action: what `Environment.step` says, while the task goes on."""
        raise TypeError(f"{type(self).__name__} has no act")

    def end(self) -> None:
        """Let go of whatever `begin` and `act` opened."""

    def measured(self) -> Json:
        """What the verifier is to find in a snapshot beside the history, such as the page's own score."""
        return None

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        self._open = True
        first = self.begin(task, seed)
        self._task, self._seed, self._last = task, seed, first
        self._actions = []
        self._hashes = [observation_hash(first)]
        return first

    def step(self, action: Action) -> Observation:
        self._running()
        if self._last.terminated or self._last.truncated:
            said = (Message(role="tool", content=OVER),) * max(len(action.calls), 1)
            return Observation(
                content=said, status=Status.INVALID_ACTION,
                terminated=self._last.terminated, truncated=self._last.truncated,
            )  # fmt: skip
        observation = self.act(action)
        self._last = observation
        self._actions.append(action)
        self._hashes.append(observation_hash(observation))
        return observation

    def snapshot(self) -> Snapshot:
        task = self._running()
        history = {
            "environment": [self.spec.name, self.spec.version],
            "task": [task.id, task.split, task.kind, dict(task.data)],
            "seed": self._seed,
            "actions": [action_to_json(action) for action in self._actions],
            "observations": self._hashes,
            "measured": self.measured(),
        }
        data = json.dumps(history, sort_keys=True, default=list).encode()
        return Snapshot(data=data, hash=hashlib.sha256(data).hexdigest())

    def restore(self, snapshot: Snapshot) -> None:
        """Plays the history again. Raises `ForkRefused` at the first observation that is not the recorded one."""
        history = json.loads(snapshot.data)
        if history["environment"] != [self.spec.name, self.spec.version]:
            recorded, present = " ".join(history["environment"]), f"{self.spec.name} {self.spec.version}"
            raise ForkRefused(f"the snapshot is of {recorded}, this is {present}")
        name, split, kind, data = history["task"]
        self.reset(Task(id=name, split=split, kind=kind, data=data), history["seed"])
        actions = [action_from_json(action) for action in history["actions"]]
        for turn, recorded in enumerate(history["observations"]):
            if turn:
                self.step(actions[turn - 1])
            if self._hashes[turn] != recorded:
                where = "reset" if turn == 0 else f"turn {turn} of {len(actions)}"
                self.close()
                raise ForkRefused(f"the replay gave another observation at {where}")

    def close(self) -> None:
        self._task = None
        if self._open:
            self._open = False
            self.end()

    def _running(self) -> Task:
        if self._task is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._task
