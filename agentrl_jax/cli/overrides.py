"""Text to typed values: what `loop.steps=3` means for a field annotated `int`."""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import math
import types
import typing
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from agentrl_jax.errors import UserError

_NONE_WORDS = ("none", "null")


class _Mismatch(Exception):
    """The text does not read as the type; the caller knows the setting's name and words the error."""


def coerce(text: str, annotation: Any, name: str) -> Any:
    """Reads `text` as a value of type `annotation`; `name` is the dotted setting, for the error.

    Understands int, float, bool, str, Path, Enum, Literal, Optional and unions, tuple and list
    (`1,2,3` or `[1, 2, 3]`), mappings (JSON) and Any (JSON, else the text itself).
    Raises `UserError` that names the setting, the text and the type expected.
    """
    try:
        return _read(text, annotation, name)
    except _Mismatch:
        raise UserError(f"{name}={text}: expected {type_name(annotation)}, got {text!r}") from None


def type_name(annotation: Any) -> str:
    """A type as a person would say it: `int`, `one of 'a', 'b'`, `float or none`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin in (tuple, list):
        inner = [type_name(a) for a in args if a is not Ellipsis]
        many = origin is list or Ellipsis in args
        return f"a list of {inner[0]}, such as 1,2,3" if many and inner else f"a list ({', '.join(inner)})"
    if annotation is type(None):
        return "none"
    if annotation is bool:
        return "true or false"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(repr(str(member.value)) for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def _read(text: str, annotation: Any, name: str) -> Any:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return json_or_text(text)
    if origin is typing.Annotated:
        return _read(text, args[0], name)
    if origin in (Union, types.UnionType):
        return _read_union(text, args, name)
    if origin is Literal:
        return _read_choice(text, {str(a): a for a in args})
    if origin in (tuple, list) or annotation in (tuple, list):
        return _read_sequence(text, origin or annotation, args, name)
    if origin is collections.abc.Sequence:
        return _read_sequence(text, tuple, (*args, ...), name)
    if origin in (dict, collections.abc.Mapping) or annotation in (dict, collections.abc.Mapping):
        return _read_mapping(text)
    if annotation is collections.abc.Callable or origin is collections.abc.Callable:
        raise UserError(f"{name}={text}: {name} is a function; set it in the config file, not on the command line")
    if dataclasses.is_dataclass(annotation):
        fields = ", ".join(f"{name}.{f.name}" for f in dataclasses.fields(annotation))
        raise UserError(f"{name}={text}: {name} is a group of settings; set one of {fields}")
    return _read_scalar(text, annotation, name)


def _read_scalar(text: str, annotation: Any, name: str) -> Any:
    if annotation is str:
        return text
    if annotation is bool:
        return _read_choice(text.lower(), {"true": True, "false": False})
    if annotation is type(None):
        return _read_choice(text.lower(), dict.fromkeys(_NONE_WORDS))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _read_choice(text, {str(member.value): member for member in annotation})
    if annotation in (int, float):
        return _read_number(text, annotation)
    if annotation is Path:
        return Path(text)
    raise UserError(f"{name}={text}: {name} is {type_name(annotation)}; set it in the config file")


def _read_number(text: str, annotation: type) -> int | float:
    try:
        value = annotation(text)
    except ValueError:
        raise _Mismatch from None
    if isinstance(value, float) and math.isnan(value):
        raise _Mismatch
    return value


def _read_choice(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise _Mismatch
    return choices[text]


def _read_union(text: str, members: Sequence[Any], name: str) -> Any:
    if type(None) in members and text.lower() in _NONE_WORDS:
        return None
    refusal: UserError | None = None
    # str reads anything, so that it must come last whatever the order in the annotation.
    for member in sorted((m for m in members if m is not type(None)), key=lambda m: m is str):
        try:
            return _read(text, member, name)
        except _Mismatch:
            continue
        except UserError as error:
            refusal = error
    raise refusal or _Mismatch()


def _read_sequence(text: str, kind: Any, args: Sequence[Any], name: str) -> Any:
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("[]", "()"):
        inner = inner[1:-1]
    items = [item.strip().strip("'\"") for item in inner.split(",")] if inner.strip() else []
    if items and not items[-1]:  # the trailing comma of a Python tuple
        items.pop()
    many = kind is list or not args or Ellipsis in args
    if not many and len(items) != len(args):
        raise _Mismatch
    types_of = [args[0] if args else Any] * len(items) if many else list(args)
    return kind(_read(item, of, name) for item, of in zip(items, types_of, strict=True))


def _read_mapping(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        raise _Mismatch from None
    if not isinstance(value, dict):
        raise _Mismatch
    return value


def json_or_text(text: str) -> Any:
    """The JSON value that the text is, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
