"""Messages to token ids and back: `ChatRenderer`, and the frames it can speak (`CHATML`, `TINY`).

Only new messages are ever rendered; what was sampled stays the ids that were sampled. Control tokens are put by id
and message text is encoded with special tokens switched off, so that no text can forge a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import Tokenizer

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Action, Message, Role, Tool, ToolCall
from agentrl_jax.rollout.calls import LINE, CallFormat
from agentrl_jax.rollout.vocabulary import Rendered, Span, Vocabulary

__all__ = [
    "CHATML",
    "FRAMES",
    "SOURCES",
    "TINY",
    "ChatFrame",
    "ChatRenderer",
    "Following",
    "Rendered",
    "Said",
    "spoken",
]

THINK_START, THINK_END = "<think>", "</think>"  # around a turn's reasoning
SOURCES: Mapping[Role, Source] = {
    "system": Source.SYSTEM,
    "user": Source.USER,
    "tool": Source.ENVIRONMENT,
    "assistant": Source.ENVIRONMENT,  # words put into the policy's mouth by the environment
}


class Said(NamedTuple):
    """An assistant turn as it was sampled, its end token included where that was sampled."""

    ids: tuple[int, ...]


class Following(NamedTuple):
    """What is read after a sampled turn: `ids` continue it, or, where there is a `reason`, they are a whole new prompt.

    `reason` says why the rendered history is no extension of what was sampled: `reasoning_stripped`, `rewritten`.
    `retokenized` counts the sampled turns whose words are in the new prompt under other ids.
    """

    ids: tuple[int, ...]
    sources: tuple[int, ...]
    reason: str = ""
    retokenized: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """How turns are framed: `opens[role]` control token, `heads[role]` text, content, `end` token, `separator` text.

    `stops` are further control tokens that end a sampled turn.
    """

    name: str
    opens: Mapping[Role, str]
    end: str
    heads: Mapping[Role, str] = field(default_factory=dict)
    separator: str = ""
    stops: tuple[str, ...] = ()

    @property
    def controls(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.opens.values(), self.end]))

    @property
    def source(self) -> str:
        """The chat template (Jinja) that frames turns so: opening token, head, content, end, separator."""
        opens, heads = (json.dumps(dict(part)) for part in (self.opens, self.heads))
        end = json.dumps(self.end + self.separator)
        return (
            f"{{% set opens = {opens} %}}{{% set heads = {heads} %}}"
            "{% for message in messages %}"
            "{{ opens[message['role']] + heads.get(message['role'], '') + message['content'] + " + end + " }}"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ opens['assistant'] + heads.get('assistant', '') }}{% endif %}"
        )


_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
CHATML = ChatFrame(
    name="chatml",
    opens=dict.fromkeys(_ROLES, "<|im_start|>"),
    heads={role: f"{role}\n" for role in _ROLES},
    end="<|im_end|>",
    separator="\n",
    stops=("<|endoftext|>",),
)
TINY = ChatFrame(name="tiny", opens={role: f"<{role}>" for role in _ROLES}, end="<end>")
FRAMES: Mapping[str, ChatFrame] = {"chatml": CHATML, "tiny": TINY}


class ChatRenderer:
    """Renders a conversation turn by turn, such that the pieces put together are the rendering of the whole.

    `start` gives the prompt, `bridge` what follows a sampled turn, `parse` reads a sampled turn, `turn` writes one as
    a teacher does. `preamble` is a system message put before the environment's own.

    Raises `ValueError` at construction where the tokenizer lacks a control token of the frame.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        frame: ChatFrame = TINY,
        calls: CallFormat = LINE,
        tools: Sequence[Tool] = (),
        *,
        preamble: str | None = None,
    ) -> None:
        self.frame, self.calls, self.preamble = frame, calls, preamble
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.vocabulary = Vocabulary(tokenizer, (*frame.controls, *frame.stops))
        self.tokenizer = self.vocabulary.tokenizer
        self._controls = {name: self._control(name) for name in frame.controls}
        self.end_id = self._controls[frame.end]
        optional = (self.tokenizer.token_to_id(name) for name in frame.stops)
        self.stop_ids: tuple[int, ...] = (self.end_id, *(stop for stop in optional if stop is not None))
        self._separator = self.encode(frame.separator)
        self._header = self._open("assistant", "")

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    @property
    def source(self) -> str:
        """The chat template (Jinja) that it speaks by, for other tools."""
        return self.frame.source

    @property
    def appends(self) -> bool:
        """Whether every conversation continues what was sampled."""
        return True

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text. Text that spells a control token is encoded as the characters it is made of."""
        return self.vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without control tokens, for reading; it is never encoded again."""
        return self.vocabulary.decode(ids)

    def start(self, messages: Sequence[Message]) -> Rendered:
        """The prompt: preamble, messages and the header of the first assistant turn."""
        if self.preamble:
            rest = list(messages)
            system = [rest.pop(0).content] if rest and rest[0].role == "system" else []
            messages = [Message(role="system", content="\n\n".join([self.preamble, *system])), *rest]
        return self._render((), messages)

    def bridge(self, closed: bool, messages: Sequence[Message]) -> Rendered:
        """What follows an assistant turn: its end token unless the policy sampled it (`closed`), the separator, the
        messages and the header of the next assistant turn. None of it was sampled."""
        tail = self._separator if closed else (self.end_id, *self._separator)
        return self._render(tail, messages)

    def follow(self, talk: Sequence[Message | Said], messages: Sequence[Message]) -> Following:
        """What is read after the sampled turn that ends `talk`: the bridge, whatever came before."""
        said = talk[-1]
        assert isinstance(said, Said), "a sampled turn comes last"
        return Following(*self.bridge(self.is_closed(said.ids), messages))

    def turn(self, item: ToolCall | str) -> tuple[int, ...]:
        """The ids a policy would have to sample for this turn, end token included."""
        return (*self.vocabulary.render(written(self.calls, item)).ids, self.end_id)

    def parse(self, ids: Sequence[int]) -> Action:
        """What a sampled turn asks for. Reasoning and control tokens inside the turn are left out of the text."""
        return self.calls.parse(self.words(ids), self.tools)

    def words(self, ids: Sequence[int]) -> str:
        """What a turn says after its reasoning: calls are read from nothing else."""
        return words(self.vocabulary, ids)

    def spoken(self, text: str) -> str:
        """`words` of a turn of which the text alone is there."""
        return spoken(text)

    def is_closed(self, ids: Sequence[int]) -> bool:
        """Whether a sampled turn holds the token that ends it."""
        return tuple(ids[-1:]) == (self.end_id,)

    def _render(self, tail: tuple[int, ...], messages: Sequence[Message]) -> Rendered:
        ids: list[int] = list(tail)
        sources: list[int] = [int(Source.SYSTEM)] * len(tail)
        for message in messages:
            new = (*self._open(message.role, message.content), self.end_id, *self._separator)
            ids.extend(new)
            sources.extend([int(SOURCES[message.role])] * len(new))
        ids.extend(self._header)
        sources.extend([int(Source.SYSTEM)] * len(self._header))
        return Rendered(tuple(ids), tuple(sources))

    def _open(self, role: Role, content: str) -> tuple[int, ...]:
        if role not in self.frame.opens:
            raise ValueError(f"frame {self.frame.name!r} has no role {role!r}; it has: {', '.join(self.frame.opens)}")
        text = self.frame.heads.get(role, "") + content  # together: a template's tokens may cross the border
        return (self._controls[self.frame.opens[role]], *self.encode(text))

    def _control(self, name: str) -> int:
        index = self.tokenizer.token_to_id(name)
        if index is None:
            raise ValueError(f"the tokenizer has no token {name!r}, which the frame {self.frame.name!r} needs")
        return index


def words(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The text after the reasoning. Where `</think>` is a token, it alone ends it, and an argument may spell it; else
    the text does."""
    end, start = (vocabulary.controls.get(name) for name in (THINK_END, THINK_START))
    if end is None:
        return spoken(vocabulary.decode(ids))
    if end not in ids:
        return "" if start in ids else vocabulary.decode(ids)
    last = max(place for place, index in enumerate(ids) if index == end)
    return vocabulary.decode(ids[last + 1 :]).lstrip("\n")


def spoken(text: str) -> str:
    """The text after the reasoning, up to the last `</think>`; nothing where reasoning never came to an end."""
    _, found, after = text.rpartition(THINK_END)
    if not found:
        return "" if THINK_START in text else text
    return after.lstrip("\n")


def written(calls: CallFormat, item: ToolCall | str) -> list[Span]:
    """A teacher's turn: the tags around a call are control tokens where the vocabulary has them."""
    source = int(Source.TEACHER)
    if isinstance(item, str):
        return [Span(item, source)]
    text, (opening, closing) = calls.write(item), calls.tags
    assert text.startswith(opening) and text.endswith(closing)
    body = text[len(opening) : len(text) - len(closing)]
    return [Span(opening, source, True), Span(body, source), Span(closing, source, True)]
