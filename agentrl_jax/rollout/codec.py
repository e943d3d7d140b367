"""One JSON form for every frozen record: fields by name, enums by value, tuples as lists, bytes in base 64.
Standard library only.

The record types are their own schema: decoding follows the annotations, so that a field added to a
record needs no second list kept in step with it.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Self, TypeVar

T = TypeVar("T")
Decoder = Callable[[Any], Any]


class Record:
    """Mixin of the records that are written to disk: `to_json` and its inverse `from_json`."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return from_json(cls, data)


def to_json(value: Any) -> Any:
    """The JSON-ready form of a record: dicts, lists, strings, numbers, booleans and None.

    Raises `TypeError` naming the type of anything that has no JSON form.
    """
    kind = type(value)
    if kind in (str, int, float, bool) or value is None:
        return value
    if isinstance(value, Enum):
        return value.value
    if kind is bytes:
        return base64.b64encode(value).decode("ascii")
    if dataclasses.is_dataclass(value):
        return {name: to_json(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and all(type(item) in (int, float) for item in value):
            return list(value)
        return [to_json(item) for item in value]
    if isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{kind.__name__} has no JSON form: {value!r:.80}")


def from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """Build the record `kind` from what `to_json` gave.

    Raises `ValueError` that names the record and the field which is missing, unknown or of another type.
    """
    return _decoder(kind)(data)


def digest(*values: Any) -> str:
    """A 32-digit hash of JSON-ready values; equal values give equal digests on every machine."""
    return fingerprint(canonical(values))


def canonical(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no spaces."""
    return _CANONICAL.encode(value)


def fingerprint(*texts: str) -> str:
    """A 32-digit hash of texts, each with its length, so that no two lists of texts run together. Cheaper than
    `digest` by the JSON that it does without."""
    joined = "".join([f"{len(text)}:{text}" for text in texts])
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=to_json)


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _decoder(kind: Any) -> Decoder:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _record_decoder(typing.cast(type, kind))
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(arguments)
    if origin is tuple:
        return _tuple_decoder(arguments)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind in (int, float, str, bool):
        return _plain_decoder(kind)
    if kind is bytes:
        return _bytes_decoder
    return lambda data: data  # Any, Mapping, Json and Literal stay as JSON gives them


def _record_decoder(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    names = set(_names(kind))

    def decode(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError(f"{kind.__name__}: expected an object, got {data!r:.80}")
        if missing := required - data.keys():
            raise ValueError(f"{kind.__name__}: fields missing: {', '.join(sorted(missing))}")
        if unknown := data.keys() - names:
            raise ValueError(f"{kind.__name__}: unknown fields: {', '.join(sorted(unknown))}")
        values = {}
        for name, item in data.items():
            try:
                values[name] = _decoder(hints[name])(item)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from None
        return kind(**values)

    return decode


def _union_decoder(arguments: Sequence[Any]) -> Decoder:
    rest = [argument for argument in arguments if argument is not types.NoneType]
    if len(rest) != 1:  # bool | float | None and the like: JSON already tells them apart
        return lambda data: data
    inner = _decoder(rest[0])
    return lambda data: None if data is None else inner(data)


def _tuple_decoder(arguments: Sequence[Any]) -> Decoder:
    if len(arguments) == 2 and arguments[1] is Ellipsis and arguments[0] in (int, float, str, bool):
        return tuple
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _decoder(arguments[0])
        return lambda data: tuple(inner(item) for item in data)
    parts = [_decoder(argument) for argument in arguments]
    return lambda data: tuple(part(item) for part, item in zip(parts, data, strict=True))


def _bytes_decoder(data: Any) -> bytes:
    if isinstance(data, str):
        return base64.b64decode(data, validate=True)
    raise ValueError(f"expected text in base 64, got {data!r:.80}")


def _plain_decoder(kind: type) -> Decoder:
    def decode(data: Any) -> Any:
        if type(data) is kind:
            return data
        if kind is float and type(data) is int:
            return float(data)
        raise ValueError(f"expected {kind.__name__}, got {data!r:.80}")

    return decode
