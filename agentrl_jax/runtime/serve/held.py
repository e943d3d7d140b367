"""What a request holds its turn to: `response_format` and `tool_choice`, as a grammar that the sampler keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl_jax.protocol import Tool
from agentrl_jax.rollout.grammar import SPACING, call_grammar
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.fields import Body, Refusal, given, refuse


def grammar_of(body: Body, chat: Chat, tools: Mapping[str, Tool]) -> str | None:
    """The grammar of the answer; None where the body asks for none.

    `tool_choice` "required", or one that names a function, is exactly one call of the tools, or of that one, with
    arguments by its JSON Schema. `response_format` of type "json_object" or "json_schema" is a JSON text. Raises
    `Refusal` for both at once, or for what neither describes.
    """
    called, answered = _called(body, chat, tools), _answered(body)
    if called and answered:
        raise Refusal("response_format: a turn that must call a tool has no other form; leave one of the two out",
                      param="response_format", code="invalid_value")  # fmt: skip
    return called or answered


def _called(body: Body, chat: Chat, tools: Mapping[str, Tool]) -> str | None:
    name, choice = given(body, "tool_choice")
    if choice in (None, "none", "auto"):
        return None
    wanted = tools
    if choice != "required":
        function = choice.get("function") if isinstance(choice, Mapping) else None
        chosen = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(chosen, str) or chosen not in tools:
            named = ", ".join(tools) or "no tools were given"
            raise refuse(name, choice, f"auto, none, required, or a function of the tools ({named})")
        wanted = {chosen: tools[chosen]}
    try:
        return call_grammar(chat.renderer.calls, list(wanted.values()), chat.renderer.vocabulary.controls)
    except ValueError as error:
        raise Refusal(f"{name}: {error}", param=name, code="invalid_value") from error


def _answered(body: Body) -> str | None:
    name, wanted = given(body, "response_format")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if wanted is None or kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        described = wanted.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, Mapping):
        form = '{"type": "json_schema", "json_schema": {"name", "schema"}}'
        raise refuse(name, wanted, f'{{"type": "text"}}, {{"type": "json_object"}} or {form}')
    return f"start: body\nbody: %json {json.dumps({**schema, 'x-guidance': SPACING})}"
