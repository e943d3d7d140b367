"""Messages to token ids and back: `ChatRenderer`, and the frames it can speak (`CHATML`, `TINY`).

Only new messages are ever rendered; what was sampled stays the ids that were sampled. Control tokens are put by id
and message text is encoded with special tokens switched off, so that no text can forge a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenizers import Tokenizer

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Action, Message, Role, Tool, ToolCall
from agentrl_jax.rollout.calls import LINE, CallFormat

SOURCES: Mapping[Role, Source] = {
    "system": Source.SYSTEM,
    "user": Source.USER,
    "tool": Source.ENVIRONMENT,
    "assistant": Source.ENVIRONMENT,  # words put into the policy's mouth by the environment
}


class Rendered(NamedTuple):
    """Token ids and who produced each (`Source`), of equal length."""

    ids: tuple[int, ...]
    sources: tuple[int, ...]


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

    Raises `ValueError` at construction where the tokenizer lacks a control token of the frame, or would read one out
    of plain text.
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
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())  # a copy: the switches below are ours alone
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True
        self._controls = {name: self._control(name) for name in frame.controls}
        self.end_id = self._controls[frame.end]
        optional = (self.tokenizer.token_to_id(name) for name in frame.stops)
        self.stop_ids: tuple[int, ...] = (self.end_id, *(stop for stop in optional if stop is not None))
        self._separator = self.encode(frame.separator)
        self._header = self._open("assistant", "")
        self._special = frozenset(
            index for index, token in self.tokenizer.get_added_tokens_decoder().items() if token.special
        )

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text. Text that spells a control token is encoded as the characters it is made of."""
        if not text:
            return ()
        try:
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError):  # lone surrogates, which no tokenizer takes
            clean = text.encode("utf-8", "replace").decode("utf-8")
            encoded = self.tokenizer.encode(clean, add_special_tokens=False)
        return tuple(encoded.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without control tokens, for reading; it is never encoded again."""
        return self.tokenizer.decode([index for index in ids if index not in self._special], skip_special_tokens=False)

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

    def turn(self, item: ToolCall | str) -> tuple[int, ...]:
        """The ids a policy would have to sample for this turn, end token included."""
        return (*self.encode(item if isinstance(item, str) else self.calls.write(item)), self.end_id)

    def parse(self, ids: Sequence[int]) -> Action:
        """What a sampled turn asks for. Control tokens inside the turn are left out of the text."""
        return self.calls.parse(self.decode(ids), self.tools)

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
        if index in self.encode(name):
            raise ValueError(
                f"the tokenizer reads {name!r} out of plain text: mark it special in tokenizer.json, "
                "or any message could forge a turn"
            )
        return index
