"""A renderer over any Hugging Face chat template: `TemplateRenderer`.

The template is only ever asked to render; how it frames turns is found by rendering probes. Message text goes in
between marks (private-use characters that no message holds), so that what comes out splits into the template's own
text, where control tokens are control tokens, and messages, where nothing is.

What follows a sampled turn is the difference of two renders. The template is an extension where the history, rendered
again, begins with what was read and sampled; then sampled ids stay as they are and only the difference is encoded.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Action, Message, Role, Tool, ToolCall
from agentrl_jax.rollout.calls import JSON, CallFormat
from agentrl_jax.rollout.renderers import SOURCES, THINK_END, THINK_START, Following, Said, spoken, words, written
from agentrl_jax.rollout.templates import compile_template, tool_schema
from agentrl_jax.rollout.vocabulary import Rendered, Span, Vocabulary, any_of

History = Literal["keep", "template"]
Talk = Sequence[Message | Said]
_PRIVATE = [chr(code) for code in range(0xE000, 0xF900)]
_THINK = (THINK_START, THINK_END)
_END_OF_CALL = "<|eom_id|>"  # ends a turn that calls a tool, in some Llama models


class _Marks(NamedTuple):
    """Characters around each message's text: one opens each role's, one closes any; one stands for a sampled turn, and
    one breaks up names of control tokens, so that a template which looks for `</think>` finds none in plain text."""

    opens: Mapping[str, str]
    close: str
    turn: str
    guard: str

    def put(self, text: str, role: str, names: re.Pattern[str]) -> str:
        """`text` between marks, each of `names` in it broken up. Space at its ends stays outside, where a template may
        trim it; it forges nothing."""
        if role not in self.opens:
            raise ValueError(f"a message has the role {role!r}; expected one of {', '.join(self.opens)}")
        core = text.strip()
        if not core:
            return text
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return f"{before}{self.opens[role]}{names.sub(self._broken, core)}{self.close}{after}"

    def _broken(self, match: re.Match[str]) -> str:
        return match.group(1) + self.guard


class TemplateRenderer:
    """Renders conversations as a chat template does, and finds what follows a sampled turn by differencing renders.

    `variables` are the template's own (`bos_token`, `enable_thinking`). `history` says what to do where the template
    changes what was sampled (reasoning of earlier turns left out): `keep` goes on with the sampled ids, in one
    segment; `template` renders anew as the template wants, and the episode opens a segment. `appends` tells whether
    a new segment can happen at all.

    `extends` is what the probes found: whether the template only ever appends; `reason` says why not. Tool results
    are rendered under `tool_role`: `tool`, or `user` where the template has no such role.

    Raises `ValueError` at construction, in one line, where the template is no jinja, refuses a plain conversation,
    loses or repeats a message, ends turns with no control token, or is not read the same in parts as in whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        calls: CallFormat = JSON,
        tools: Sequence[Tool] = (),
        *,
        variables: Mapping[str, Any] | None = None,
        history: History = "keep",
        show_tools: bool = False,
        stops: Iterable[str] = (),
    ) -> None:
        self.calls, self.history = calls, history
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.vocabulary = Vocabulary(tokenizer)
        self.tokenizer = self.vocabulary.tokenizer
        self._names = re.compile(f"(?={any_of({*self.vocabulary.controls, *_THINK})})(.)", re.DOTALL)
        self.source, self._template = template, compile_template(template)
        self._variables = dict(variables or {})
        self._shown: list[dict[str, Any]] = []
        self._shown_text = self._preamble = ""
        self._system = self._merge = False  # what a template lacks: a system role, two user messages in a row
        self.tool_role: Role = "tool"
        self._learn_roles()
        self.end_id = self._learn_end()
        known = self.vocabulary.controls
        self._closing = {self.end_id, known.get(_END_OF_CALL, self.end_id)}
        self.stop_ids: tuple[int, ...] = tuple(
            dict.fromkeys([self.end_id, *self._closing, *(known[name] for name in stops if name in known)])
        )
        self._check_whole(tokenizer)
        if show_tools:
            self._show(tools)
        self.reason = self._learn_extension()
        self.extends = not self.reason

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    def showing(self, tools: Sequence[Tool]) -> TemplateRenderer:
        """This renderer with other tools, told as with `show_tools`."""
        other = copy.copy(self)
        other.tools = {tool.name: tool for tool in tools}
        other._shown, other._shown_text, other._preamble = [], "", ""
        other._show(tools)
        return other

    @property
    def appends(self) -> bool:
        """Whether every conversation continues what was sampled."""
        return self.history == "keep"

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text. Text that spells a control token is encoded as the characters it is made of."""
        return self.vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens, for reading; it is never encoded again."""
        return self.vocabulary.decode(ids)

    def start(self, messages: Sequence[Message]) -> Rendered:
        """The prompt: the messages and the header of the first assistant turn.

        Raises `ValueError` where the template refuses them, or leaves one out, as Gemma's does a system message alone.
        """
        marks = self._marks(messages)
        text = self._write(messages, marks)
        given = sum(bool(m.content.strip()) for m in messages)
        given += bool(self._preamble) and not (
            messages and messages[0].role == "system" and messages[0].content.strip()
        )
        if sum(map(text.count, marks.opens.values())) < given:
            raise ValueError("the chat template leaves a message out: begin with a user's, and see what it makes of it")
        return self._encode(text, marks)

    def bridge(self, closed: bool, messages: Sequence[Message]) -> Rendered:
        """What follows an assistant turn, as in `follow` with `history="keep"`, whatever stood before it."""
        return self._bridge([Message(role="user", content="x")], closed, messages)

    def follow(self, talk: Talk, messages: Sequence[Message]) -> Following:
        """What is read after the sampled turn that ends `talk`, up to the header of the next assistant turn.

        Raises `ValueError` where the template refuses the conversation.
        """
        said = talk[-1]
        assert isinstance(said, Said), "a sampled turn comes last"
        if self.history == "template":
            with contextlib.suppress(ValueError):  # words that the template cannot take stay as they were sampled
                return self._as_template(talk, said, messages)
        first = [message for message in talk[: _first_said(talk)] if isinstance(message, Message)]
        return Following(*self._bridge(first, self.is_closed(said.ids), messages))

    def turn(self, item: ToolCall | str) -> tuple[int, ...]:
        """The ids a policy would have to sample for this turn, end token included."""
        return (*self.vocabulary.render(written(self.calls, item)).ids, self.end_id)

    def parse(self, ids: Sequence[int]) -> Action:
        """What a sampled turn asks for. Reasoning, up to the last `</think>`, and special tokens are left out."""
        return self.calls.parse(self.words(ids), self.tools)

    def words(self, ids: Sequence[int]) -> str:
        """What a turn says after its reasoning: calls are read from nothing else."""
        return words(self.vocabulary, ids)

    def spoken(self, text: str) -> str:
        """`words` of a turn of which the text alone is there."""
        return spoken(text)

    def is_closed(self, ids: Sequence[int]) -> bool:
        """Whether a sampled turn holds a token that ends it: the template's own, or `<|eom_id|>` after a call."""
        return bool(ids) and ids[-1] in self._closing

    # -- differencing ------------------------------------------------------------------------------------------

    def _bridge(self, first: Sequence[Message], closed: bool, messages: Sequence[Message]) -> Rendered:
        marks = self._marks([*first, *messages])
        text = self._write([*first, marks.turn, *messages], marks)
        _, found, rest = text.partition(marks.turn + marks.close)
        if not found or marks.turn in rest:
            raise ValueError("the chat template loses or repeats an assistant turn")
        return self._encode(self._after_end(rest, closed), marks)

    def _as_template(self, talk: Talk, said: Said, messages: Sequence[Message]) -> Following:
        marks = self._marks(talk, messages)
        before = self._write(talk[:-1], marks) + self._say(said, marks)
        after = self._write([*talk, *messages], marks)
        if after.startswith(before):
            return Following(*self._encode(self._after_end(after[len(before) :], self.is_closed(said.ids)), marks))
        spoken = [item for item in talk if isinstance(item, Said)]
        thought = any(THINK_END in self._say(item, marks) and self._say(item, marks) not in after for item in spoken)
        reason = "reasoning_stripped" if thought else "rewritten"
        return Following(*self._encode(after, marks), reason, sum(self._changes(s, marks, after) for s in spoken))

    def _changes(self, said: Said, marks: _Marks, text: str) -> bool:
        """Whether words of this turn that are in `text` have other ids there than the policy sampled."""
        for part in self._runs(said.ids):
            words = self.tokenizer.decode(part, skip_special_tokens=False)
            put = marks.put(words, "assistant", self._names).strip()
            if put and put in text and self.encode(words) != part:
                return True
        return False

    def _runs(self, ids: Sequence[int]) -> list[tuple[int, ...]]:
        """The stretches of ids between control tokens."""
        runs: list[list[int]] = [[]]
        controls = set(self.vocabulary.controls.values())
        for index in ids:
            if index in controls:
                runs.append([])
            else:
                runs[-1].append(index)
        return [tuple(run) for run in runs if run]

    def _after_end(self, rest: str, closed: bool) -> str:
        """What follows the assistant's words, less the end token where it was sampled."""
        name = self._end_name
        if not rest.startswith(name):
            raise ValueError(f"the chat template ends an assistant turn with {rest[:20]!r}, expected {name!r}")
        return rest[len(name) :] if closed else rest

    def _show(self, tools: Sequence[Tool]) -> None:
        """Give the tools to the template; where it does not write them, they become the head of the system message."""
        self._shown = [tool_schema(tool.name, tool.description, tool.parameters) for tool in tools]
        self._shown_text = json.dumps(self._shown, ensure_ascii=False)
        talk = [_message("user")]
        text = self._write(talk, self._marks(talk))
        if not all(tool.name in text for tool in tools):
            self._shown, self._preamble = [], self.calls.describe(tools)
            self._shown_text = self._preamble

    def _introduced(self, talk: Sequence[Message | Said | str]) -> Sequence[Message | Said | str]:
        first = talk[0] if talk else None
        if isinstance(first, Message) and first.role == "system":
            return [Message(role="system", content=f"{self._preamble}\n\n{first.content}"), *talk[1:]]
        return [Message(role="system", content=self._preamble), *talk]

    # -- writing -----------------------------------------------------------------------------------------------

    def _write(self, talk: Sequence[Message | Said | str], marks: _Marks) -> str:
        """The template's text of a conversation, marks and all. A `str` is an assistant turn already marked."""
        turns: list[dict[str, Any]] = []
        held = ""  # system text that waits for the user message which it is put before
        for item in self._introduced(talk) if self._preamble else talk:
            turn = self._as_dict(item, marks)
            if turn["role"] == "system" and self._system:
                held += turn["content"] + "\n\n"
                continue
            if held and turn["role"] == "user":
                turn["content"], held = held + turn["content"], ""
            if self._merge and turns and turn["role"] == turns[-1]["role"] == "user":
                turns[-1]["content"] += "\n\n" + turn["content"]
            else:
                turns.append(turn)
        if held:
            turns.append({"role": "user", "content": held.removesuffix("\n\n")})
        # None where there are none, as transformers gives it: templates ask `tools is not none`.
        tools = self._guard(self._shown, marks) if self._shown else None
        given = {"messages": turns, "tools": tools, "documents": None, "add_generation_prompt": True}
        return self._template(given | self._variables)

    def _guard(self, value: Any, marks: _Marks) -> Any:
        """A value, such as the tools, with marks around the texts that spell a control token."""
        if isinstance(value, Mapping):
            return {key: self._guard(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item, marks) for item in value]
        spells = isinstance(value, str) and any(
            part in self.vocabulary.controls for part in self.vocabulary.split(value)
        )
        return marks.put(value, "system", self._names) if spells else value

    def _as_dict(self, item: Message | Said | str, marks: _Marks) -> dict[str, Any]:
        if isinstance(item, Said):
            return {"role": "assistant", "content": self._say(item, marks)}
        if isinstance(item, str):
            return {"role": "assistant", "content": marks.opens["assistant"] + item + marks.close}
        role = self.tool_role if item.role == "tool" else item.role
        known: dict[str, Any] = {}
        if role == "tool" and item.name:  # a name may be one that the policy made up
            known["name"] = marks.put(item.name, item.role, self._names)
        if role == "tool" and item.call_id:
            known["tool_call_id"] = self._guard(item.call_id, marks)
        return {"role": role, "content": marks.put(item.content, item.role, self._names), **known}

    def _say(self, said: Said, marks: _Marks) -> str:
        """The words of a sampled turn: its control tokens by name, its end left out. Space at the ends of the turn
        is kept from being trimmed; space beside reasoning is not, since templates put it there themselves."""
        ids = said.ids[:-1] if self.is_closed(said.ids) else said.ids
        parts = [piece for part in self.vocabulary.parts(ids) for piece in self._at_thoughts(part)]
        names = {index: name for name, index in self.vocabulary.controls.items()}
        words = [
            names[part]
            if isinstance(part, int)
            else part
            if part in _THINK
            else marks.put(part, "assistant", self._names)
            for part in parts
        ]
        if parts and isinstance(parts[-1], str) and marks.close in words[-1]:
            words[-1] = words[-1][: words[-1].rindex(marks.close)] + _tail(parts[-1]) + marks.close
        if parts and isinstance(parts[0], str) and marks.close in words[0]:
            opening = marks.opens["assistant"]
            words[0] = opening + _head(parts[0]) + words[0].partition(opening)[2]
        return "".join(words)

    def _at_thoughts(self, part: str | int) -> list[str | int]:
        """Text cut at the tags of reasoning where they are no tokens of their own: templates look for them."""
        if isinstance(part, int) or THINK_END in self.vocabulary.controls:
            return [part]
        return [piece for piece in re.split("(</?think>)", part) if piece]

    def _marks(self, talk: Talk, more: Sequence[Message] = ()) -> _Marks:
        """Seven private-use characters that nothing in the conversation holds."""
        used = set(self._shown_text)
        for item in (*talk, *more):
            if isinstance(item, Said):
                used |= set(self.tokenizer.decode(item.ids, skip_special_tokens=False))
            else:
                used |= {*item.content, *(item.name or ""), *(item.call_id or "")}
        free = [mark for mark in _PRIVATE if mark not in used][:7]
        if len(free) < 7:
            raise ValueError("the conversation holds every character of Unicode's private use area")
        return _Marks(dict(zip(SOURCES, free, strict=False)), *free[4:])

    def _spans(self, text: str, marks: _Marks) -> list[Span]:
        """The template's text as trusted spans, messages as plain ones with their role's source."""
        roles = {opening: role for role, opening in marks.opens.items()}
        pattern = re.compile(f"([{''.join(roles)}])([^{marks.close}]*){marks.close}")
        spans, place = [], 0
        for match in pattern.finditer(text):
            spans.append(Span(text[place : match.start()], int(Source.SYSTEM), True))
            spans.append(Span(match.group(2).replace(marks.guard, ""), int(SOURCES[roles[match.group(1)]])))  # type: ignore[index]
            place = match.end()
        spans.append(Span(text[place:], int(Source.SYSTEM), True))
        if any(mark in span.text for span in spans for mark in (*roles, marks.close, marks.guard)):
            raise ValueError("the chat template cuts a message in the middle")
        return [span for span in spans if span.text]

    def _encode(self, text: str, marks: _Marks) -> Rendered:
        return self.vocabulary.render(self._spans(text, marks))

    # -- probing -----------------------------------------------------------------------------------------------

    def _learn_roles(self) -> None:
        user, reply = _message("user"), _message("assistant")
        if not self._shows([user, reply, user], strict=True):
            raise ValueError("the chat template does not render the turns of a plain conversation")
        self._system = not self._shows([_message("system"), user])
        self._merge = not self._shows([user, user])
        if not self._shows([user, reply, _message("tool"), _message("tool"), reply, user]):
            self.tool_role = "user"
        if not self._shows([_message("system"), user, reply, _message("tool"), _message("tool"), reply, user]):
            raise ValueError("the chat template renders no conversation of system, user, assistant and tool messages")

    def _shows(self, talk: Sequence[Message], *, strict: bool = False) -> bool:
        """Whether every message comes out once, in order. `strict`: a refusal is raised, in the template's words."""
        marks = self._marks(talk)
        numbered = [Message(role=message.role, content=f"a{index}z") for index, message in enumerate(talk)]
        try:
            text = self._write(numbered, marks)
        except ValueError:
            if strict:
                raise
            return False
        found = re.findall(f"[{''.join(marks.opens.values())}]a([0-9]+)z{marks.close}", text)
        return found == [str(index) for index in range(len(talk))]

    def _learn_end(self) -> int:
        marks = self._marks([])
        text = self._write([_message("user"), marks.turn, _message("user")], marks)
        rest = text.partition(marks.turn + marks.close)[2]
        self._end_name = next(iter(self.vocabulary.split(rest)), "")
        if self._end_name not in self.vocabulary.controls:
            raise ValueError(f"the chat template ends an assistant turn with {rest[:20]!r}, which is no control token")
        return self.vocabulary.controls[self._end_name]

    def _check_whole(self, tokenizer: Tokenizer) -> None:
        """A second route: the tokenizer as it came, over the whole text, gives what our parts give."""
        talk = [_message("system"), _message("user"), _message("assistant"), _message("tool"), _message("user")]
        marks = self._marks(talk)
        text = self._write(talk, marks)
        plain = re.sub(f"[{''.join(marks.opens.values())}{marks.close}{marks.guard}]", "", text)
        whole = tuple(tokenizer.encode(plain, add_special_tokens=False).ids)
        if whole != self._encode(text, marks).ids:
            raise ValueError("the tokenizer reads a conversation in whole otherwise than between its control tokens")

    def _learn_extension(self) -> str:
        """Why the template is no extension, or nothing: a talk of every kind of message, with reasoning where the
        template knows of it, rendered turn by turn."""
        thinks = THINK_END in self.source
        said = Said((*self._spell("<think>\nr\n</think>\n\na" if thinks else "a"), self.end_id))
        talk: list[Message | Said] = [_message("user")]
        for role in ("tool", "user", "tool", "user"):
            talk.append(said)
            found = self._as_template(talk, said, [_message(role)])
            if found.reason:
                return f"{found.reason} before a {role} message"
            talk.append(_message(role))
        return ""

    def _spell(self, text: str) -> tuple[int, ...]:
        return self.vocabulary.render([Span(text, int(Source.POLICY), True)]).ids


def _message(role: str) -> Message:
    return Message(role=role, content="a")  # type: ignore[arg-type]


def _head(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _tail(text: str) -> str:
    return text[len(text.rstrip()) :]


def _first_said(talk: Talk) -> int:
    return next(index for index, item in enumerate(talk) if isinstance(item, Said))
