"""What a turn must be, as a grammar: one call of one of the tools, its arguments by the tool's JSON Schema.

The grammar is text in the dialect of `llguidance` (Lark with `%json`); a sampler turns it into masks of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_jax.protocol import Tool
from agentrl_jax.rollout.calls import BareCalls, CallFormat, JsonCalls

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes


def call_grammar(calls: CallFormat, tools: Sequence[Tool], controls: Mapping[str, int]) -> str:
    """The grammar of a turn that is exactly one call, as `calls.write` writes it, with the schema's order of arguments.

    `controls`: ids of control tokens by name; a tag that is one is that token, never its characters.

    Raises `ValueError` where the format writes no JSON, or there is no tool to call.
    """
    if not tools:
        raise ValueError("a call is asked of every turn, and the environment has no tools")
    if not isinstance(calls, JsonCalls | BareCalls):
        raise ValueError("a call written as a line is no JSON, which a schema can speak of: use json, qwen or llama")
    key, gap = ("arguments", calls.gap) if isinstance(calls, JsonCalls) else ("parameters", "")
    (before, after), rules = calls.tags, [f"start: {' | '.join(f'call{n}' for n in range(len(tools)))}"]
    opening, closing = [_tag(before, controls), _text(gap)], [_text(gap), _tag(after, controls)]
    for n, tool in enumerate(tools):
        rules.append(f"call{n}: {' '.join(filter(None, [*opening, f'body{n}', *closing]))}")
        rules.append(f"body{n}: %json {json.dumps(_body(tool, key))}")
    return "\n".join(rules)


def _body(tool: Tool, key: str) -> dict[str, Any]:
    properties = {"name": {"const": tool.name}, key: closed({"type": "object", **tool.parameters})}
    return {
        "type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False,
        "x-guidance": SPACING,
    }  # fmt: skip


def closed(schema: Any) -> Any:
    """The schema, read as `rollout.schema.check` reads it: an argument that it does not name is refused."""
    if not isinstance(schema, Mapping):
        return schema
    found = {**schema}
    if "properties" in schema:
        found["properties"] = {name: closed(part) for name, part in schema["properties"].items()}
    if "items" in schema:
        found["items"] = closed(schema["items"])
    kinds = schema.get("type", ())
    if "properties" in schema or "object" in ((kinds,) if isinstance(kinds, str) else kinds):
        found["additionalProperties"] = closed(schema.get("additionalProperties", False))
    return found


def _tag(name: str, controls: Mapping[str, int]) -> str:
    return f"<[{controls[name]}]>" if name in controls else _text(name)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
