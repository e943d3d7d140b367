"""OpenAI's messages and tools to token ids, and a sampled turn back to a message: the renderer of the rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Message, Role, Tool, ToolCall
from agentrl_jax.rollout.calls import BLOCK, CALL_FORMATS
from agentrl_jax.rollout.families import own_calls
from agentrl_jax.rollout.renderers import ChatRenderer, written
from agentrl_jax.rollout.template_renderer import TemplateRenderer
from agentrl_jax.rollout.vocabulary import Span
from agentrl_jax.runtime.serve.fields import Body, Refusal, refuse, token_ids

_ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip


class Prompt(NamedTuple):
    """The ids to continue, and the tools that may be called in the turn."""

    ids: tuple[int, ...]
    tools: Mapping[str, Tool]


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Speaks for one policy. `describe_tools` tells it of the tools of a request, as its template does, else in the
    system message; a run's renderer tells of them itself where the policy was trained so, and else it knows them."""

    renderer: ChatRenderer | TemplateRenderer
    vocab_size: int
    describe_tools: bool = True

    def prompt(self, body: Body) -> Prompt:
        """The rendering of `messages` and `tools`, with the header of the next assistant turn.

        An assistant message that carries `token_ids`, as the answers of this server do on request, is those ids: what
        was sampled is not encoded again. One with `tool_calls` is the turn that the policy would have to sample for
        them, tags as tokens. Text of any other message is encoded with control tokens switched off.

        Raises `Refusal` where a field is wrong, or the chat template takes no such conversation.
        """
        tools = _tools(body)
        pieces: list[Message | tuple[int, ...]] = [self._read(m, i) for i, m in enumerate(_messages(body))]
        voice = self.renderer
        if tools and self.describe_tools and isinstance(voice, TemplateRenderer) and _tells(voice):
            voice = voice.showing(tools)
        elif tools and self.describe_tools:
            pieces = self._described(pieces, tools)
        try:
            return Prompt(_render(voice, pieces), {tool.name: tool for tool in tools})
        except ValueError as error:
            raise Refusal(f"messages: {error}", param="messages", code="invalid_value") from error

    def message(self, ids: Sequence[int], text: str, tools: Mapping[str, Tool]) -> dict[str, Any]:
        """The assistant message of a sampled turn. A call that cannot be read stays text, as the policy wrote it, and
        so does reasoning, whatever is in it."""
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        whole = text == self.renderer.decode(ids)  # and not cut before a stop string
        said = self.renderer.words(ids) if whole else self.renderer.spoken(text)
        action = self.renderer.calls.parse(said, tools) if tools else None
        if action is not None and action.calls:
            reasoning = text[: len(text) - len(said)]
            around = BLOCK.sub("", said).strip() if BLOCK.search(said) else ""
            answer["content"] = reasoning + around or None
            answer["tool_calls"] = [_call(call, f"call_{index}") for index, call in enumerate(action.calls)]
        return answer

    def token(self, index: int) -> str:
        """The text of one token; a control token's name."""
        return self.renderer.decode([index]) or self.renderer.tokenizer.id_to_token(index) or ""

    def _described(self, pieces: list[Any], tools: Sequence[Tool]) -> list[Any]:
        rest = list(pieces)
        first = rest[0] if rest and isinstance(rest[0], Message) and rest[0].role == "system" else None
        told = [self.renderer.calls.describe(tools), *([rest.pop(0).content] if first else [])]
        return [Message(role="system", content="\n\n".join(told)), *rest]

    def _read(self, raw: Any, index: int) -> Message | tuple[int, ...]:
        where = f"messages[{index}]"
        if not isinstance(raw, Mapping) or raw.get("role") not in _ROLES:
            got = raw.get("role") if isinstance(raw, Mapping) else raw
            raise refuse(f"{where}.role", got, f"one of {', '.join(_ROLES)}")
        if raw["role"] == "assistant" and raw.get("token_ids") is not None:
            return token_ids(raw["token_ids"], f"{where}.token_ids", self.vocab_size)
        content, calls = _content(raw.get("content"), f"{where}.content"), _past_calls(raw, where)
        return self._turn(content, calls) if calls else Message(role=_ROLES[raw["role"]], content=content)

    def _turn(self, content: str, calls: Sequence[ToolCall]) -> tuple[int, ...]:
        source = int(Source.ENVIRONMENT)
        spans = [Span(content, source)] if content else []
        for call in calls:
            spans += [*([Span("\n", source)] if spans else []), *written(self.renderer.calls, call)]
        return (*self.renderer.vocabulary.render(spans).ids, self.renderer.end_id)


def _render(voice: ChatRenderer | TemplateRenderer, pieces: Sequence[Message | tuple[int, ...]]) -> tuple[int, ...]:
    ids: list[int] = []
    sampled: tuple[int, ...] = ()
    at = 0
    while True:
        end = next((i for i in range(at, len(pieces)) if isinstance(pieces[i], tuple)), len(pieces))
        between = [piece for piece in pieces[at:end] if isinstance(piece, Message)]
        if at == 0:
            ids += voice.start(between).ids
        else:
            ids += voice.bridge(voice.is_closed(sampled), between).ids
        if end == len(pieces):
            return tuple(ids)
        turn = pieces[end]
        assert isinstance(turn, tuple)
        sampled = turn
        ids += sampled
        at = end + 1


def _tells(voice: TemplateRenderer) -> bool:
    """Whether the template, where it tells of tools, asks for calls in the format that is read."""
    return type(CALL_FORMATS[own_calls(voice.source)]) is type(voice.calls)


def _messages(body: Body) -> Sequence[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", messages, "a list of at least one message")
    return messages


def _content(value: Any, where: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise refuse(where, value, "text, or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refuse(f"{where}[{index}]", part, 'a part {"type": "text", "text": ...}; this policy reads text only')
        texts.append(part["text"])
    return "".join(texts)


def _past_calls(raw: Body, where: str) -> list[ToolCall]:
    calls = []
    for index, item in enumerate(raw.get("tool_calls") or []):
        param = f"{where}.tool_calls[{index}].function"
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise refuse(param, function, 'an object {"name": ..., "arguments": JSON text}')
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):
            arguments = None
        if not isinstance(arguments, dict):
            raise refuse(f"{param}.arguments", function.get("arguments"), "the JSON text of an object")
        calls.append(ToolCall(name=function["name"], arguments=arguments))
    return calls


def _tools(body: Body) -> list[Tool]:
    """The tools of a request; none where `tool_choice` is "none"."""
    raw = body.get("tools") or []
    if not isinstance(raw, list):
        raise refuse("tools", raw, "a list of tools")
    tools = [_tool(item, f"tools[{index}]") for index, item in enumerate(raw)]
    return [] if body.get("tool_choice") == "none" else tools


def _tool(item: Any, where: str) -> Tool:
    function = item.get("function") if isinstance(item, Mapping) and item.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refuse(where, item, '{"type": "function", "function": {"name", "description", "parameters"}}')
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
        raise refuse(f"{where}.function.parameters", parameters, "a JSON Schema of type object")
    return Tool(name=function["name"], description=str(function.get("description") or ""), parameters=parameters)


def _call(call: ToolCall, name: str) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}
