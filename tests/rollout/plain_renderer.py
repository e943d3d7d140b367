"""A renderer without a vocabulary: a turn is one token that stands for an item of a script. For tests of any suite."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_envs.transcripts import action_of

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Action, Message, ToolCall
from agentrl_jax.rollout.renderers import Following, Rendered, Said


class PlainRenderer:
    """What `episode.Renderer` asks for. Messages are one token, whatever they say."""

    end_id, stop_ids = 0, (0,)

    def __init__(self) -> None:
        self._items: list[ToolCall | str] = []

    def start(self, messages: tuple[Message, ...]) -> Rendered:
        return Rendered((1,), (int(Source.USER),))

    def follow(self, talk: Sequence[Message | Said], messages: tuple[Message, ...]) -> Following:
        return Following((1,), (int(Source.ENVIRONMENT),))

    def turn(self, item: ToolCall | str) -> tuple[int, ...]:
        self._items.append(item)
        return (len(self._items) + 1,)

    def parse(self, ids: tuple[int, ...]) -> Action:
        return action_of(self._items[ids[0] - 2])
