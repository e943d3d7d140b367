"""The part of JSON Schema that tool parameters use, checked strictly.

Handled: type (one or several), properties, required, additionalProperties, enum, const, minimum, maximum,
exclusiveMinimum, exclusiveMaximum, minLength, maxLength, pattern, items, minItems, maxItems. One difference from
the standard, on purpose: an argument the schema does not name is refused unless `additionalProperties` allows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any


class SchemaError(ValueError):
    """Arguments that a schema refuses; the message names the argument, what was given and what was expected."""


_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: (isinstance(v, int) and not isinstance(v, bool)) or (isinstance(v, float) and v.is_integer()),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "object": lambda v: isinstance(v, Mapping),
    "array": lambda v: isinstance(v, (list, tuple)),
    "null": lambda v: v is None,
}
_BOUNDS: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    ("minimum", lambda v, bound: v >= bound, "at least"),
    ("maximum", lambda v, bound: v <= bound, "at most"),
    ("exclusiveMinimum", lambda v, bound: v > bound, "more than"),
    ("exclusiveMaximum", lambda v, bound: v < bound, "less than"),
)
_LENGTHS = (("minLength", str), ("maxLength", str), ("minItems", list), ("maxItems", list))


def check(value: Any, schema: Mapping[str, Any], where: str) -> None:
    """Raise `SchemaError` at the first part of `value` that `schema` refuses; `where` names it in the message."""
    kinds = _kinds(schema)
    if kinds and not any(_TYPES[kind](value) for kind in kinds if kind in _TYPES):
        raise SchemaError(f"{where}: expected {' or '.join(kinds)}, got {value!r:.60}")
    if "enum" in schema and value not in schema["enum"]:
        raise SchemaError(f"{where}: expected one of {', '.join(map(str, schema['enum']))}, got {value!r:.60}")
    if "const" in schema and value != schema["const"]:
        raise SchemaError(f"{where}: expected {schema['const']!r}, got {value!r:.60}")
    if isinstance(value, Mapping):
        _check_object(value, schema, where)
    elif isinstance(value, (list, tuple)):
        _check_length(value, schema, where, list)
        if "items" in schema:
            for index, item in enumerate(value):
                check(item, schema["items"], f"{where}[{index}]")
    elif isinstance(value, str):
        _check_length(value, schema, where, str)
        if "pattern" in schema and not re.search(schema["pattern"], value):
            raise SchemaError(f"{where}: expected text that matches {schema['pattern']!r}, got {value!r:.60}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        for name, holds, words in _BOUNDS:
            if name in schema and not holds(value, schema[name]):
                raise SchemaError(f"{where}: expected {words} {schema[name]}, got {value!r:.60}")


def coerce(text: str, schema: Mapping[str, Any], where: str) -> Any:
    """Read `text` as the first of the schema's types that fits; without a type it stays text.

    Raises `SchemaError` when none fits.
    """
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return text
    for kind in kinds:
        try:
            value = read_json(text.lower() if kind in ("boolean", "null") else text)
        except ValueError:
            continue
        if _TYPES.get(kind, lambda _: False)(value):
            return int(value) if kind == "integer" else value
    raise SchemaError(f"{where}: expected {' or '.join(kinds)}, got {text!r:.60}")


def read_json(text: str) -> Any:
    """`json.loads`, where every way to fail (deep nesting, NaN, half a character too) is a `ValueError`: policies write
    this text. Half a character would come back in an answer that no tokenizer can read."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a surrogate without its other half is no text") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> None:
    properties = schema.get("properties", {})
    missing = [key for key in schema.get("required", ()) if key not in value]
    if missing:
        raise SchemaError(f"{where}: missing {', '.join(missing)}")
    extra = schema.get("additionalProperties", not properties and "type" not in schema)
    for key, item in value.items():
        if key in properties:
            check(item, properties[key], f"{where}.{key}")
        elif isinstance(extra, Mapping):
            check(item, extra, f"{where}.{key}")
        elif not extra:
            known = ", ".join(properties) or "none"
            raise SchemaError(f"{where}: unknown argument {key!r}; there are: {known}")


def _check_length(value: Any, schema: Mapping[str, Any], where: str, kind: type) -> None:
    for name, applies in _LENGTHS:
        if applies is kind and name in schema:
            short = name.startswith("min") and len(value) < schema[name]
            if short or (name.startswith("max") and len(value) > schema[name]):
                words = "at least" if name.startswith("min") else "at most"
                raise SchemaError(f"{where}: expected length {words} {schema[name]}, got {len(value)}")
