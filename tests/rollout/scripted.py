"""A sampler that says what it is told to: the rollout side is tested without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agentrl_jax.protocol import ToolCall
from agentrl_jax.rollout.renderers import ChatRenderer
from agentrl_jax.rollout.sampling import Sample, SampleRequest

Script = Callable[[SampleRequest], ToolCall | str]


class ScriptedSampler:
    """Answers a request with the ids of `script(request)`, a few requests at a time in a shuffled order."""

    def __init__(self, renderer: ChatRenderer, script: Script, *, slots: int, shuffle: int | None = None) -> None:
        self.slots, self.context = slots, 4096
        self._renderer, self._script = renderer, script
        self._pending: list[SampleRequest] = []
        self._random = None if shuffle is None else random.Random(shuffle)
        self.requests: list[SampleRequest] = []

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def submit(self, request: SampleRequest) -> None:
        assert all(request.slot != other.slot for other in self._pending), "the slot is busy"
        assert 0 <= request.slot < self.slots
        self._pending.append(request)
        self.requests.append(request)

    def advance(self) -> list[Sample]:
        if self._random is not None:
            self._random.shuffle(self._pending)
        count = len(self._pending) if self._random is None else self._random.randint(0, len(self._pending))
        taken, self._pending = self._pending[:count], self._pending[count:]
        return [self._sample(request) for request in taken]

    def _sample(self, request: SampleRequest) -> Sample:
        ids = self._renderer.turn(self._script(request))
        stop = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        logprobs = tuple(-0.5 - 0.001 * index for index in range(len(ids)))
        return Sample(slot=request.slot, ids=ids, logprobs=logprobs, versions=(7,) * len(ids), stop=stop)  # type: ignore[arg-type]


def by_turn(scripts: dict[int, Sequence[ToolCall | str]]) -> Script:
    """The script of the member named in the request's key (group, member, turn)."""
    return lambda request: scripts[request.key[1]][request.key[2]]
