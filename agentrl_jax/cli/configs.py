"""A config is a program: load one, override its settings from the command line, describe it as JSON."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import importlib.util
import sys
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.cli.overrides import coerce
from agentrl_jax.errors import UserError
from agentrl_jax.recipes.describe import describe


def load(path: str | Path, kind: type | None = None) -> Any:
    """Runs the file at `path` and returns what its `config()` returns: a frozen dataclass (a `kind`, if given).

    Whatever the file raises becomes a `UserError` that names the file, the line and the reason.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory, not a config file" if path.is_dir() else "no such config file"
        raise UserError(f"{path}: {what}; expected a Python file with `def config()`{_near_files(path)}")
    name = f"agentrl_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: expected a Python file whose name ends in .py")
    run, module = spec.loader.exec_module, importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses defined in a config resolve their annotations through here
    _guarded(path, lambda: run(module))
    if not callable(getattr(module, "config", None)):
        raise UserError(f"{path}: defines no function `config`; expected `def config() -> RunConfig`")
    config = _guarded(path, module.config)
    if not _is_record(config) or (kind is not None and not isinstance(config, kind)):
        wanted = kind.__name__ if kind else "a frozen dataclass"
        raise UserError(f"{path}: config() returned {type(config).__name__}, expected {wanted}")
    return config


def apply_overrides(config: Any, overrides: Sequence[str]) -> Any:
    """Returns `config` with each `dotted.name=value` set, typed by the field's annotation.

    A path walks through nested dataclasses, mappings, and tuples of dataclasses (by index or by the element's
    `name`). All are applied before any record is rebuilt, so that checks in `__post_init__` see the final values.
    Raises `UserError`: an unknown setting (with near matches), a wrong type, a setting given twice, a contradiction.
    """
    tree: dict[str, Any] = {}
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator or not name:
            raise UserError(f"override {override!r}: expected name=value, such as loop.steps=3")
        _insert(tree, name, text)
    return _rebuild(config, tree, "")


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _guarded(path: Path, run: Any) -> Any:
    """Runs code of the config file; an exception becomes one line that names the file's own line."""
    try:
        return run()
    except SyntaxError as error:
        raise UserError(f"{error.filename or path}:{error.lineno}: SyntaxError: {error.msg}") from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.absolute()]
        frames = frames or [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        where = f"{path}:{frames[-1].lineno}" if frames else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"


def _near_files(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    names = [p.name for p in folder.glob("*.py")]
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(str(folder / n) for n in near)}?" if near else ""


def _insert(tree: dict[str, Any], name: str, text: str) -> None:
    *parents, leaf = name.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"{name}={text}: {part} is set as a whole as well; keep one of the two")
    if leaf in node:
        raise UserError(f"{name}={text}: {name} is set twice; keep one of the two")
    node[leaf] = text


def _rebuild(value: Any, tree: dict[str, Any], path: str) -> Any:
    """`value` with the changes of `tree`, whose leaves are texts and whose inner nodes are dicts."""
    if not tree:
        return value
    if _is_record(value):
        return _rebuild_record(value, tree, path)
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, tree, path)
    if isinstance(value, tuple) and value and all(_is_record(item) for item in value):
        return _rebuild_tuple(value, tree, path)
    typed = _words(tree, path)
    if value is None:
        raise UserError(
            f"{typed}: {path} is none in this config, so that it has no settings; give it in the config file"
        )
    raise UserError(f"{typed}: {path} is {describe(value)!r} and has no settings of its own")


def _rebuild_record(record: Any, tree: dict[str, Any], path: str) -> Any:
    fields = {f.name: f for f in dataclasses.fields(record) if f.init}
    hints = _hints(record)
    changes = {}
    for name, change in tree.items():
        full = f"{path}.{name}" if path else name
        if name not in fields:
            raise _unknown(full, name, list(fields), path, type(record).__name__)
        current = getattr(record, name)
        if isinstance(change, dict):
            changes[name] = _rebuild(current, change, full)
        else:
            changes[name] = coerce(change, hints.get(name, type(current)), full)
    try:
        return dataclasses.replace(record, **changes)
    except (ValueError, TypeError) as error:
        raise UserError(f"{_words(tree, path)}: {one_line(error)}") from error


def _rebuild_mapping(mapping: Mapping[str, Any], tree: dict[str, Any], path: str) -> dict[str, Any]:
    """A mapping's keys are open (an environment checks its own options), so that a new key is no error here."""
    result = dict(mapping)
    for name, change in tree.items():
        full, current = f"{path}.{name}", result.get(name)
        if isinstance(change, dict):
            result[name] = _rebuild({} if current is None else current, change, full)
        else:
            known = isinstance(current, bool | int | float | str)
            result[name] = coerce(change, type(current) if known else Any, full)
    return result


def _rebuild_tuple(items: tuple[Any, ...], tree: dict[str, Any], path: str) -> tuple[Any, ...]:
    names = [str(getattr(item, "name", index)) for index, item in enumerate(items)]
    result = list(items)
    for name, change in tree.items():
        full = f"{path}.{name}"
        if name in names:
            index = names.index(name)
        elif name.isdigit() and int(name) < len(items):
            index = int(name)
        else:
            raise _unknown(full, name, names, path, "list")
        if not isinstance(change, dict):
            raise UserError(f"{full}={change}: {full} is a group of settings; set one of its fields")
        result[index] = _rebuild(result[index], change, full)
    return tuple(result)


def _unknown(full: str, name: str, known: Sequence[str], path: str, owner: str) -> UserError:
    prefix = f"{path}." if path else ""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(prefix + n for n in near)}?" if near else f"it has {', '.join(known)}"
    return UserError(f"unknown setting {full!r}: {path or 'the config'} ({owner}) has no {name!r}; {hint}")


def _hints(record: Any) -> dict[str, Any]:
    """Annotations by field name. One that names what only type checkers import is left out, not all of them."""
    hints: dict[str, Any] = {}
    for owner in reversed(type(record).__mro__):
        scope = vars(sys.modules.get(owner.__module__, object))
        for name, annotation in vars(owner).get("__annotations__", {}).items():
            try:
                hints |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: annotation}), dict(scope))
            except NameError:
                hints[name] = (
                    collections.abc.Callable
                    if callable(getattr(record, name, None))
                    else type(getattr(record, name, None))
                )
    return hints


def _words(tree: dict[str, Any], path: str) -> str:
    """The overrides of a sub-tree as the user typed them."""
    words = []
    for name, change in tree.items():
        full = f"{path}.{name}" if path else name
        words.append(_words(change, full) if isinstance(change, dict) else f"{full}={change}")
    return " ".join(words)
