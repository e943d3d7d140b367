"""Tasks: what is tested is not trained on, and what is hidden stays hidden."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_jax.protocol import Action, Task, ToolCall

from ..transcripts import action_of, observation_hash, texts
from . import agents
from .cases import Case, Inapplicable, Violation, require, scripts

MARK, NUMBER = "canary7q3x", 918273645


def splits_are_disjoint(case: Case) -> str:
    """Tasks are distinct and splits share none, by id and by content (what is asked, how it is solved, what it shows);
    the same seed draws the same tasks; an unknown split is an error that names the known ones."""
    where: dict[tuple[str, str], str] = {}
    for split, tasks in case.splits.items():
        for task in tasks:
            require(task.split == split, task, f"a task of {split!r} says that it is of {task.split!r}")
            for key in (("id", task.id), ("content", _content(case, task))):
                require(key not in where, task, f"a second task with this {key[0]}: one is in {where.get(key)!r}")
                where[key] = split
        again = case.suite.tasks(split, len(tasks), case.seed)
        require(tuple(again) == tuple(tasks), None, f"the tasks of {split!r} differ when drawn twice with one seed")
    try:
        case.suite.tasks("no_such_split", 1, 0)
    except ValueError as error:
        require("heldout" in str(error), None, f"an unknown split's error names no known one: {error}")
    else:
        raise Violation("an unknown split is no error")
    return ", ".join(f"{len(tasks)} {split}" for split, tasks in case.splits.items())


def hidden_data_stays_hidden(case: Case) -> str:
    """What the policy must not see is replaced by a canary, the episode is played as before, and nothing shows it.

    Hidden are the fields of `task.data` that `Suite.hidden` names. Where it names none: the values that the reference
    solution's finishing calls consist of, which tools may show, but neither the first messages nor errors.
    """
    watched = 0
    for task, (_, script) in itertools.product(case.tasks, scripts(case)[:1]):
        turns = list(script(task))
        spoken = [_plain(value) for item in turns if _finishes(case, item) for value in _leaves(item.arguments)]
        for path in _hidden(case, task, spoken):
            marked, shown = _with_canary(task, path)
            try:
                seen = _watch(case, marked, turns if case.suite.hidden else [])
            except Exception:
                continue  # the environment cannot live with the canary: this place tells nothing
            watched += 1
            name = ".".join(map(str, path))
            require(shown not in seen, task, f"task.data[{name}] is hidden, yet the policy is shown it")
    if not watched:
        raise Inapplicable("no value of task.data is the answer as it stands, and Suite.hidden names none")
    return f"{watched} hidden values"


def _content(case: Case, task: Task) -> str:
    """What a task asks, how it is solved and what that shows: two tasks that share it all are one task."""
    if case.suite.solve is None:
        (opening,) = agents.watch(case.suite, task, [], case.seed)
        return observation_hash(opening) + json.dumps(dict(task.data), sort_keys=True, default=repr)
    script = list(case.suite.solve(task))
    seen = agents.watch(case.suite, task, script, case.seed)
    return "".join(map(observation_hash, seen)) + repr(script)


def _finishes(case: Case, item: ToolCall | str) -> bool:
    return isinstance(item, ToolCall) and item.name in case.suite.spec.budget.finishing


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _paths(item, (*path, key))]
    if isinstance(value, list | tuple):
        return [found for index, item in enumerate(value) for found in _paths(item, (*path, index))]
    return [path] if isinstance(value, str | int | float) and not isinstance(value, bool) else []


def _plain(value: Any) -> str:
    return " ".join(str(value).split()).lower()


def _hidden(case: Case, task: Task, spoken: Sequence[str]) -> list[tuple]:
    """Where in `task.data` the canaries go."""
    if case.suite.hidden:
        return [path for path in _paths(task.data) if path[0] in case.suite.hidden][:16]
    answers = {part for text in spoken for part in (text, *text.split(", ")) if len(part) > 2}
    return [path for path in _paths(task.data) if _plain(_at(task.data, path)) in answers][:16]


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _with_canary(task: Task, path: tuple) -> tuple[Task, str]:
    """The task with another value at `path`, and the text by which it would be known."""
    canary: Any = MARK if isinstance(_at(task.data, path), str) else NUMBER

    def put(value: Any, rest: tuple) -> Any:
        if not rest:
            return canary
        if isinstance(value, Mapping):
            return {key: put(item, rest[1:]) if key == rest[0] else item for key, item in value.items()}
        return [put(item, rest[1:]) if index == rest[0] else item for index, item in enumerate(value)]

    return replace(task, data=put(task.data, path)), str(canary)


def _watch(case: Case, task: Task, turns: list) -> str:
    """All that a policy is shown: the first messages, answers to bad calls, and the episode."""
    environment = case.suite.make()
    try:
        seen = [environment.reset(task, case.seed)]
        for probe in (
            Action(text="?", error="unreadable"),
            action_of(ToolCall(name="no_such_tool")),
            *map(action_of, turns),
        ):
            seen.append(environment.step(probe))
            if seen[-1].terminated or seen[-1].truncated:
                break
    finally:
        environment.close()
    return texts(seen)
