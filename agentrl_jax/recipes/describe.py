"""A config as plain JSON, for `config.json`, `agentrl config` and the comparison on resume. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any


def describe(value: Any) -> Any:
    """`value` as plain JSON: records as objects, functions by qualified name with the settings they closed over."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return describe(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: describe(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return {name: describe(item) for name, item in zip(names, value, strict=True)}
    if isinstance(value, list | tuple | set | frozenset):
        return [describe(item) for item in value]
    if isinstance(value, functools.partial):
        arguments = {**dict(enumerate(value.args)), **value.keywords}
        return {"function": _qualified(value.func), **({"with": describe(arguments)} if arguments else {})}
    if isinstance(value, type):
        return _qualified(value)
    if inspect.isroutine(value):
        return _describe_function(value)
    return _describe_object(value)


def _describe_function(function: Any) -> Any:
    settings = dict(inspect.getclosurevars(function).nonlocals) if inspect.isfunction(function) else {}
    if not settings:
        return _qualified(function)
    return {"function": _qualified(function), "with": {key: describe(item) for key, item in settings.items()}}


def _describe_object(value: Any) -> Any:
    """Any other object by its type and what it holds; never by its address, which no second run would meet again."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return describe(value.tolist())
    held = getattr(value, "__dict__", None)
    if held is None:
        return str(value)
    return {"object": _qualified(type(value)), **({"with": describe(held)} if held else {})}


def _qualified(thing: Any) -> str:
    name = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    return f"{getattr(thing, '__module__', None) or type(thing).__module__}.{name}"
