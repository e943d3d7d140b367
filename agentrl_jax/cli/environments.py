"""`agentrl env list | check | play`: environments found by import name, held to the contract, played by a person."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl_jax.cli.overrides import json_or_text
from agentrl_jax.cli.player import BROKEN, play
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, Suite

HOME = "agentrl_envs"
_MARKS = {"holds": "ok", "broken": "BROKEN", "skipped": "skipped"}


def add_arguments(parser: argparse.ArgumentParser, parser_class: type[argparse.ArgumentParser]) -> None:
    """The actions of `agentrl env` and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=parser_class)
    listing = actions.add_parser("list", help="name the environments that there are", allow_abbrev=False)
    listing.set_defaults(run=run_list)
    check = actions.add_parser("check", help="hold an environment to every property", allow_abbrev=False)
    play = actions.add_parser("play", help="play a task yourself", allow_abbrev=False)
    for sub, run in ((check, run_check), (play, run_play)):
        sub.add_argument("name", metavar="NAME", help="such as workflow, or your own package.module:function")
        sub.add_argument("--seed", type=int, default=0, metavar="K", help="which tasks are drawn (default 0)")
        sub.usage = f"{sub.prog} NAME [option=value ...] [options]"
        sub.epilog = "Options of the environment are given as name=value, JSON or text, such as handles=real."
        sub.set_defaults(run=run, takes_overrides=True)
    check.add_argument("--tasks", type=int, default=3, metavar="N", help="how many tasks are played (default 3)")
    check.add_argument("--only", metavar="PROPERTY", help="hold it to this property alone")
    play.add_argument("--task", type=int, default=0, metavar="N", help="the N-th task of the split, from 0")
    play.add_argument("--split", default="train", metavar="S", help="train (default), validation or heldout")


def run_list(arguments: argparse.Namespace) -> int:
    """Every package of `agentrl_envs` with a `suite`: what it is, its options, what this machine lacks for it."""
    for name, title in found().items():
        try:
            module = importlib.import_module(f"{HOME}.{name}")
            lacks, options = _missing(module), _options(module.suite)
        except Exception as error:  # a package that does not import is to be seen, not to hide the others
            lacks, options = f"{type(error).__name__}: {error}", ""
        print(f"{name:<10} {title}")
        if options:
            print(f"{'':<10} options: {options}")
        if lacks:
            print(f"{'':<10} lacks: {lacks}")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Prints each property, whether it holds and what was found; 1 where one is broken."""
    if arguments.tasks < 1:
        raise UserError(f"--tasks {arguments.tasks}: expected at least 1")
    ref = resolve(arguments.name, arguments.overrides)
    load(ref)
    conformance: Any = importlib.import_module(f"{HOME}.conformance")
    properties = _chosen(conformance.PROPERTIES, arguments.only)
    try:
        case = conformance.case(ref, arguments.tasks, arguments.seed)
    except Exception as error:
        print(f"BROKEN   no tasks to play: {type(error).__name__}: {_one_line(error)}")
        return BROKEN
    counts = dict.fromkeys(_MARKS, 0)
    for held_to in properties:
        finding = conformance.hold(case, held_to)
        counts[finding.result] += 1
        print(f"{_MARKS[finding.result]:<8} {finding.name:<30} {finding.reason}", flush=True)
        if finding.result == "broken":
            print(f"{'':<8} {'':<30} expected: {_claim(held_to)}")
    spec = case.suite.spec
    summary = f"{counts['holds']} hold, {counts['broken']} broken, {counts['skipped']} skipped"
    print(f"\n{spec.name} {spec.version}: {summary}")
    return BROKEN if counts["broken"] else 0


def run_play(arguments: argparse.Namespace) -> int:
    """A person plays one task; the verdict comes at the end of the task or of the input."""
    suite = load(resolve(arguments.name, arguments.overrides))
    if arguments.task < 0:
        raise UserError(f"--task {arguments.task}: expected 0 or more")
    try:
        tasks = suite.tasks(arguments.split, arguments.task + 1, arguments.seed)
    except ValueError as error:
        raise UserError(f"--split {arguments.split} --task {arguments.task}: {error}") from error

    return play(suite, tasks[arguments.task], arguments.seed)


def found() -> dict[str, str]:
    """The packages of `agentrl_envs` that define a `suite`, with their docstring's first lines; none is imported."""
    spec = importlib.util.find_spec(HOME)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    packages = {}
    for entry in pkgutil.iter_modules(folders):
        source = Path(folders[0]) / entry.name / "__init__.py"
        if not entry.ispkg or not source.is_file():
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "suite" for node in tree.body):
            packages[entry.name] = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
    return packages


def resolve(name: str, overrides: Sequence[str]) -> EnvironmentRef:
    """`workflow`, `package.module` (its `suite`) or `package.module:function`, with options `name=value`."""
    options: dict[str, Any] = {}
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UserError(f"{override!r}: expected an option of the environment as name=value")
        if key in options:
            raise UserError(f"{key} is given twice")
        options[key] = json_or_text(text)
    if ":" in name or "." in name:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` has it: a user's own package lies here
        return EnvironmentRef(target=name if ":" in name else f"{name}:suite", options=options)
    known = found()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise UserError(f"environment {name!r}: no such environment; {hint} (your own: package.module:function)")
    return EnvironmentRef(target=f"{HOME}.{name}:suite", options=options)


def load(ref: EnvironmentRef) -> Suite:
    """The suite. What keeps it from loading is a `UserError`: what the machine lacks, an unknown option, a fault."""
    module_name, _, attribute = ref.target.partition(":")
    try:
        module = importlib.import_module(module_name)
        if lacks := _missing(module, ref.options):
            raise UserError(lacks)
        make = getattr(module, attribute)
        known = inspect.signature(make).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in known.values())
        for name in ref.options if not open_ended else ():
            if name not in known:
                raise UserError(f"{name}: {ref.target} has no such option; it has {_options(make) or 'none'}")
        return ref.load()
    except UserError:
        raise
    except Exception as error:  # an environment is the user's code and data: whatever it raises is theirs to see
        raise UserError(f"environment {ref.target!r}: {type(error).__name__}: {_one_line(error)}") from error


def _chosen(properties: Sequence[Any], only: str | None) -> Sequence[Any]:
    chosen = [one for one in properties if only in (None, one.__name__)]
    if not chosen:
        raise UserError(f"--only {only}: expected one of {', '.join(one.__name__ for one in properties)}")
    return chosen


def _missing(module: Any, options: Mapping[str, Any] | None = None) -> str | None:
    """What the machine lacks for the environment with these options, as far as its `missing` asks for them."""
    missing: Callable[..., str | None] = getattr(module, "missing", lambda: None)
    known = inspect.signature(missing).parameters
    return missing(**{name: value for name, value in (options or {}).items() if name in known})


def _options(make: Callable[..., Any]) -> str:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(make).parameters
    shown = [name if one.default is one.empty else f"{name}={one.default}" for name, one in parameters.items()]
    return " ".join(shown)


def _claim(held_to: Any) -> str:
    first = (inspect.getdoc(held_to) or "").partition("\n\n")[0]
    return " ".join(first.split())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
