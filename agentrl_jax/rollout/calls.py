"""How a tool call is written in a turn, and how a turn is read back: `LineCalls`, `JsonCalls` and `BareCalls`.

Reading checks every call against the JSON Schema of its tool. What looks like a call and cannot be read is an
`Action` with `error`, which names what was given and what was expected; the environment answers it as `invalid_action`.
A call of an unknown tool beside calls of known ones stays in its place among them: the episode answers it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from agentrl_jax.protocol import Action, Tool, ToolCall
from agentrl_jax.rollout.schema import SchemaError, check, coerce, read_json

_WORD = re.compile(r"\s*([A-Za-z_][\w\-]*)")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_QUOTED = re.compile(r'"((?:[^"\\]|\\\s*["\\])*)"')
_ESCAPE = re.compile(r'\\\s*(["\\])')
_BARE = re.compile(r"(.*?)(?=\s+[A-Za-z_]\w*\s*=|\s*$)", re.DOTALL)
_PLAIN_VALUE = re.compile(r"-?[\w#][\w.\-:@]*")
_BUILT_IN = re.compile(r"\s*([A-Za-z_][\w\-]*)\.call\((.*)\)\s*", re.DOTALL)
_COMMA = re.compile(r"\s*(?:,|$)")
# Up to the first closing tag that is not inside a JSON string: an argument may hold the tag's text.
BLOCK = re.compile(r'<tool_call>((?:[^"]|"(?:[^"\\]|\\.)*")*?)</tool_call>', re.DOTALL)


class CallFormat(Protocol):
    """Writes a call as text, reads a turn's text, and tells the policy which tools there are.

    `tags`: what `write` puts before and after a call, control tokens where the vocabulary has them.
    """

    tags: ClassVar[tuple[str, str]]

    def write(self, call: ToolCall) -> str: ...
    def parse(self, text: str, tools: Mapping[str, Tool]) -> Action: ...
    def describe(self, tools: Sequence[Tool]) -> str: ...


class LineCalls:
    """One call a turn: `name key=value key=value`.

    Values that hold anything but word characters and `. - : @ #` are quoted; objects and lists are JSON in quotes.
    Space around `=` and just inside the quotes means nothing, so that the text of a word-level tokenizer, which puts
    a space between any two words, reads the same. A turn whose first word is no tool and that holds no `key=` is
    plain text.
    """

    tags: ClassVar[tuple[str, str]] = ("", "")

    def write(self, call: ToolCall) -> str:
        return " ".join([call.name, *(f"{key}={self._value(value)}" for key, value in call.arguments.items())])

    def parse(self, text: str, tools: Mapping[str, Tool]) -> Action:
        word = _WORD.match(text)
        name = word.group(1) if word else ""
        if word is None or (name not in tools and not _ARGUMENT.match(text, word.end())):
            return Action(text=text)
        try:
            if name not in tools:
                raise SchemaError(unknown_tool(name, tools))
            arguments = self._arguments(text, word.end())
            schema = tools[name].parameters
            properties = schema.get("properties", {})
            typed = {key: coerce(value, properties.get(key, {}), key) for key, value in arguments.items()}
            check(typed, schema, f"{name}")
        except SchemaError as error:
            return Action(text=text, error=str(error))
        return Action(text=text, calls=(ToolCall(name=name, arguments=typed),))

    def describe(self, tools: Sequence[Tool]) -> str:
        lines = [f"{tool.name} {_usage(tool)}".rstrip() + f": {tool.description}" for tool in tools]
        return "\n".join(["Call one tool a turn as: name key=value key=value", *lines])

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            text = value
        else:
            text = json.dumps(value)
        if _PLAIN_VALUE.fullmatch(text):
            return text
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def _arguments(self, text: str, start: int) -> dict[str, str]:
        arguments: dict[str, str] = {}
        end = len(text.rstrip())
        while start < end:
            key = _ARGUMENT.match(text, start)
            if key is None:
                raise SchemaError(f"expected key=value, got {text[start:end].strip()!r:.60}")
            name = key.group(1)
            if name in arguments:
                raise SchemaError(f"argument {name!r} is given twice")
            value = _QUOTED.match(text, key.end())
            if value is not None:
                arguments[name] = _ESCAPE.sub(r"\1", value.group(1)).strip()
            elif text[key.end() : key.end() + 1] == '"':
                raise SchemaError(f"argument {name!r}: the quote is not closed")
            else:
                value = _BARE.match(text, key.end())
                assert value is not None  # the pattern matches the empty text
                arguments[name] = value.group(1).strip()
            start = value.end()
        return arguments


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Any number of calls a turn, each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, text around them.

    Text outside the blocks stays in `Action.text`; one unreadable block makes the whole turn an error, so that no
    half of a turn is ever performed. `gap` stands inside the tags: Qwen's models put the object on a line of its own.
    """

    gap: str = ""
    tags: ClassVar[tuple[str, str]] = ("<tool_call>", "</tool_call>")

    def write(self, call: ToolCall) -> str:
        body = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
        return f"<tool_call>{self.gap}{body}{self.gap}</tool_call>"

    def parse(self, text: str, tools: Mapping[str, Tool]) -> Action:
        blocks = BLOCK.findall(text)
        if "<tool_call>" in BLOCK.sub("", text):
            return Action(text=text, error="a <tool_call> is not closed by </tool_call>")
        return _read_calls(text, (_json(block) for block in blocks), "arguments", tools)

    def describe(self, tools: Sequence[Tool]) -> str:
        head = 'Call a tool as: <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
        return "\n".join([head, *_signatures(tools)])


class BareCalls:
    """A turn that is nothing but `{"name": ..., "parameters": {...}}` is a call, as Llama 3 writes it.

    Several objects may follow one another, with space, commas or semicolons between them. `name.call(key="value")`, as
    Llama 3 calls the tools that it was made with, is a call where there is such a tool. Any other turn is text.
    """

    tags: ClassVar[tuple[str, str]] = ("", "")

    def write(self, call: ToolCall) -> str:
        return json.dumps({"name": call.name, "parameters": dict(call.arguments)}, ensure_ascii=False)

    def parse(self, text: str, tools: Mapping[str, Tool]) -> Action:
        built_in = _BUILT_IN.fullmatch(text)
        if built_in and built_in.group(1) in tools:
            return _read_calls(text, _built_in(*built_in.groups()), "parameters", tools)
        if not re.match(r'\s*\{\s*"(?:name|type|function)"', text):
            return Action(text=text)
        return _read_calls(text, _objects(text), "parameters", tools)

    def describe(self, tools: Sequence[Tool]) -> str:
        head = 'Call a tool with nothing but: {"name": ..., "parameters": {...}}'
        return "\n".join([head, *_signatures(tools)])


def _read_calls(text: str, bodies: Iterator[Any], key: str, tools: Mapping[str, Tool]) -> Action:
    try:
        calls = tuple(_call(body, key, tools) for body in bodies)
        if calls and not any(call.name in tools for call in calls):
            raise SchemaError(unknown_tool(calls[0].name, tools))
    except SchemaError as error:
        return Action(text=text, error=str(error))
    return Action(text=text, calls=calls)


def _built_in(name: str, inside: str) -> Iterator[Any]:
    """The call `name.call(inside)`: `key=JSON`, with commas between them."""
    arguments, place, decoder = {}, 0, json.JSONDecoder()
    while inside[place:].strip():
        key = _ARGUMENT.match(inside, place)
        try:
            if key is None or key.group(1) in arguments:
                raise ValueError
            _, end = decoder.raw_decode(inside, key.end())
            arguments[key.group(1)] = read_json(inside[key.end() : end])
            comma = _COMMA.match(inside, end)
            if comma is None:
                raise ValueError
            place = comma.end()
        except (ValueError, RecursionError):
            raise SchemaError(f"{name}: a call must be {name}.call(key=JSON, key=JSON)") from None
    yield {"name": name, "parameters": arguments}


def _call(body: Any, key: str, tools: Mapping[str, Tool]) -> ToolCall:
    """Models mix `arguments` up with `parameters`; nothing that is given under either is lost."""
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise SchemaError(f'a call must be {{"name": text, "{key}": object}}')
    key = next((k for k in (key, "arguments", "parameters") if k in body), key)
    name, arguments = body["name"], body.get(key, {})
    if not isinstance(arguments, dict):
        raise SchemaError(f"{name}: {key} must be an object, got {type(arguments).__name__}")
    if name in tools:
        check(arguments, tools[name].parameters, name)
    return ToolCall(name=name, arguments=arguments)


def unknown_tool(name: str, tools: Mapping[str, Tool]) -> str:
    return f"unknown tool {name[:60]!r}; there are: {', '.join(sorted(tools))}"


def _json(block: str) -> Any:
    try:
        return read_json(block)
    except ValueError as error:
        raise SchemaError(f"a call must be JSON: {error}") from None


def _objects(text: str) -> Iterator[Any]:
    """JSON objects one after another."""
    decoder, place = json.JSONDecoder(), 0
    while place < len(text):
        if text[place].isspace() or text[place] in ",;":
            place += 1
            continue
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"a call must be JSON: {error}") from None
        yield _json(text[place:end])
        place = end


def _signatures(tools: Sequence[Tool]) -> list[str]:
    return [
        json.dumps({"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)})
        for tool in tools
    ]


def _usage(tool: Tool) -> str:
    properties = tool.parameters.get("properties", {})
    required = set(tool.parameters.get("required", ()))
    parts = [f"{key}=..." if key in required else f"[{key}=...]" for key in properties]
    return " ".join(parts)


LINE = LineCalls()
JSON = JsonCalls()
QWEN = JsonCalls(gap="\n")
LLAMA = BareCalls()
CALL_FORMATS: Mapping[str, CallFormat] = {"line": LINE, "json": JSON, "qwen": QWEN, "llama": LLAMA}
