"""How an action becomes an observation, for environments whose tools are functions of one call.

Each call is checked against the tool's JSON Schema and answered in order with one message; an unknown tool, bad
arguments, an unreadable turn and plain text are invalid actions; after the end every call is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl_jax.protocol import Action, EnvStatus, Message, Observation, Status, Tool, ToolCall

OVER = "the task is over"
NO_CALL = "error: call a tool"
MOST_TEXT = 4_000  # characters of one answer
_WORST = (Status.OK, Status.TRUNCATED, Status.DENIED, Status.INVALID_ACTION, Status.TIMEOUT, Status.ERROR)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": (list, tuple), "object": Mapping,
}  # fmt: skip


class Reply(NamedTuple):
    """What one call led to. `service` names what was down when the status is `error`."""

    text: str
    status: Status = Status.OK
    gain: float | None = None
    terminated: bool = False
    truncated: bool = False
    service: str = ""


def tool(
    name: str,
    description: str,
    properties: Mapping[str, Any],
    *,
    optional: Sequence[str] = (),
    writes: bool = False,
) -> Tool:
    """A tool whose parameters are the properties, all required but those that are `optional`, and no others."""
    schema = {
        "type": "object",
        "properties": dict(properties),
        "required": [key for key in properties if key not in optional],
        "additionalProperties": False,
    }
    return Tool(name=name, description=description, parameters=schema, writes=writes)


def answer(
    action: Action, tools: Sequence[Tool], execute: Callable[[ToolCall], Reply], over: Callable[[], bool]
) -> Observation:
    """The observation that answers the action; `execute` carries out one well-formed call, `over` says whether the task
    has ended."""
    if over():
        return _observation([Reply(OVER, Status.INVALID_ACTION, terminated=True)] * max(1, len(action.calls)))
    if action.error is not None:
        return _observation([Reply(f"error: {action.error[:200]}", Status.INVALID_ACTION)])
    if not action.calls:
        return _observation([Reply(NO_CALL, Status.INVALID_ACTION)])
    known = {one.name: one for one in tools}
    replies: list[Reply] = []
    for call in action.calls:
        if over():
            replies.append(Reply(OVER, Status.INVALID_ACTION, terminated=True))
            continue
        wrong = problem_with(known, call)
        replies.append(Reply(f"error: {wrong}", Status.INVALID_ACTION) if wrong else execute(call))
    return _observation(replies)


def _observation(replies: Sequence[Reply]) -> Observation:
    cut = [len(reply.text) > MOST_TEXT for reply in replies]
    statuses = [
        Status.TRUNCATED if long and reply.status is Status.OK else reply.status
        for reply, long in zip(replies, cut, strict=True)
    ]
    gains = [reply.gain for reply in replies if reply.gain is not None]
    down = [reply.service for reply in replies if reply.service]
    terminated = any(reply.terminated for reply in replies)
    return Observation(
        content=tuple(Message(role="tool", content=shown(reply.text)) for reply in replies),
        status=max(statuses, key=_WORST.index),
        env_status=EnvStatus(service=down[0], retryable=True) if down else EnvStatus(),
        terminated=terminated,
        truncated=not terminated and any(reply.truncated for reply in replies),
        evidence_gain=max(gains) if gains else None,
    )


def shown(text: str, most: int = MOST_TEXT) -> str:
    """The text as a tokenizer can read it, its middle left out when it is too long."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return text.encode("utf-8", "replace").decode("utf-8")


def problem_with(tools: Mapping[str, Tool], call: ToolCall) -> str | None:
    """What is wrong with a call, in words that say what to write; None if nothing is."""
    known = tools.get(call.name)
    if known is None:
        return f"no tool is called {call.name[:40]!r}; the tools are {', '.join(tools)}"
    return _mismatch(call.arguments, {"type": "object", **known.parameters}, call.name)


def _mismatch(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        return f"{where} must be of type {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(str, schema['enum']))}"
    if kind in ("integer", "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{where} must lie between {schema.get('minimum', '-inf')} and {schema.get('maximum', 'inf')}"
    if kind == "string" and len(value) > schema.get("maxLength", len(value)):
        return f"{where} has {len(value)} characters, at most {schema['maxLength']} are allowed"
    if kind == "array":
        if len(value) > schema.get("maxItems", len(value)):
            return f"{where} has {len(value)} items, at most {schema['maxItems']} are allowed"
        found = (_mismatch(item, schema.get("items", {}), f"an item of {where}") for item in value)
        return next((text for text in found if text), None)
    if kind == "object":
        return _object_mismatch(value, schema, where)
    return None


def _object_mismatch(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> str | None:
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in value]
    extra = [name for name in value if name not in properties]
    others = schema.get("additionalProperties", True)
    if missing or (extra and others is False):
        what = f"lacks {missing[0]}" if missing else f"takes no {str(extra[0])[:40]!r}"
        return f"{where} {what}; it takes {', '.join(properties) or 'nothing'}"
    for name, item in value.items():
        inner = properties.get(name, others if isinstance(others, Mapping) else {})
        found = _mismatch(item, inner, str(name)[:40])
        if found:
            return found
    return None


def _is(value: Any, kind: str | Sequence[str]) -> bool:
    if not isinstance(kind, str):
        return any(_is(value, one) for one in kind)
    if kind == "null":
        return value is None
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, _TYPES[kind])
