"""Tasksets of verifiers 0.4 whose tasks are a prompt and a reply: the task's own reward functions judge.

suite("my_tasks", config={"size": 20})        suite("my_package.my_module:MyTaskset")
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from agentrl_jax.protocol import (
    Action,
    Budget,
    EnvironmentSpec,
    Json,
    Message,
    Observation,
    StopReason,
    Suite,
    Task,
    ToolCall,
    Verdict,
)

from ..answering import Reply, answer, shown, tool
from ..replaying import ReplayingEnvironment
from . import common

VERSION = "1"
MOST_TASKS = 10_000  # read of a taskset, which may be endless
REPLY = tool("reply", "Give the final reply. Ends the task.", {"text": {"type": "string", "maxLength": 20_000}})


def missing() -> str | None:
    if importlib.util.find_spec("verifiers") is None:
        return "verifiers is not installed: pip install 'verifiers>=0.4'"
    return None


def suite(taskset: str, config: Mapping[str, Any] | None = None, most: float = 1.0, tasks: int = 1000) -> Suite:
    """A taskset as a suite.

    `taskset`: an id as verifiers resolves it, or `package.module:Class`; `config`: fields of its config; `tasks`: how
    many are read. The outcome is the weighted sum of the task's rewards over `most`, and unscored where a reward could
    not be computed. Splits follow from the prompt. Raises ValueError for tasks that need tools, a container or a user.
    """
    settings = json.dumps(dict(config or {}), sort_keys=True)
    count = min(tasks, MOST_TASKS)
    _check_kind(taskset, _load(taskset, settings, count))
    spec = EnvironmentSpec(
        name="verifiers",
        version=VERSION,
        tools=(REPLY,),
        budget=Budget(steps=4, tool_calls=4, write_actions=0, finishing=("reply",)),
        fork="replay",
        side_effects="none",
    )
    return Suite(
        spec=spec,
        make=partial(ReplyEnvironment, spec),
        tasks=partial(_tasks, taskset, settings, count),
        verify=partial(_verify, most),
        verifier_version=common.JUDGE_VERSION,
    )


@cache
def _load(taskset: str, settings: str, count: int) -> tuple[Any, ...]:
    """The first tasks of the taskset."""
    module, separator, name = taskset.partition(":")
    if separator:
        kind = getattr(importlib.import_module(module), name)
    else:
        kind = importlib.import_module("verifiers.v1.utils.loaders").taskset_class(taskset)
    config_type = (
        importlib.import_module("verifiers.v1.utils.generic").concrete_type(
            kind,
            importlib.import_module("verifiers.v1").TasksetConfig,
            origin=importlib.import_module("verifiers.v1").Taskset,
        )
        or importlib.import_module("verifiers.v1").TasksetConfig
    )
    return tuple(itertools.islice(kind(config_type(**json.loads(settings))), count))


def _check_kind(name: str, found: Sequence[Any]) -> None:
    if not found:
        raise ValueError(f"verifiers: the taskset {name!r} has no tasks")
    first = found[0]
    if first.NEEDS_CONTAINER or type(first).toolsets(first.config):
        raise ValueError(f"verifiers: tasks of {name!r} need tools or a container; expected a prompt and a reply")
    if any(task.data.prompt is None for task in found):
        raise ValueError(f"verifiers: tasks of {name!r} are opened by a user; expected a prompt")


def _tasks(taskset: str, settings: str, count: int, split: str, wanted: int, seed: int) -> tuple[Task, ...]:
    import random

    common.check_split("verifiers", split)
    rows: dict[str, Task] = {}
    for index, one in enumerate(_load(taskset, settings, count)):
        messages = _prompt(one)
        content = json.dumps(messages)
        if common.split_of(content) == split:
            data = {"taskset": taskset, "config": settings, "count": count, "index": index, "messages": messages}
            rows.setdefault(
                content, Task(id=f"verifiers-{one.key[:12]}", split=split, kind=type(one).__name__, data=data)
            )
    if wanted > len(rows):
        raise ValueError(f"verifiers: {wanted} tasks of {split!r} asked for, but {taskset} has {len(rows)}")
    return tuple(random.Random(f"{split}/{seed}").sample(list(rows.values()), wanted))


def _prompt(task: Any) -> list[list[str]]:
    """The messages that open the task: role and text."""
    system = [["system", task.data.system_prompt]] if task.data.system_prompt else []
    if isinstance(task.data.prompt, str):
        return [*system, ["user", task.data.prompt]]
    content_text = importlib.import_module("verifiers.v1.types").content_text
    said = [[message.role, content_text(message.content) or ""] for message in task.data.prompt]
    return [*system, *([role, text] for role, text in said)]


def _verify(
    most: float, task: Task, initial: Any, actions: Sequence[Action], final: Any, stop: StopReason | None = None
) -> Verdict:
    """The taskset's own rewards of the reply in the final state."""
    state = json.loads(final.data)
    said = state["measured"]["reply"]
    rewards: list[float | None] = [0.0] if said is None else _rewards(task, said)
    total = None if None in rewards else sum(reward for reward in rewards if reward is not None)
    state["measured"] = {"rewards": [total], "ended": said is not None}
    return common.judge(actions, type(final)(data=json.dumps(state).encode(), hash=final.hash), None, stop, most=most)


def _rewards(task: Task, said: str) -> list[float | None]:
    """The weighted rewards of a trace that holds the prompt and the reply; [None] where scoring fails."""
    vf = importlib.import_module("verifiers.v1")
    traces = importlib.import_module("verifiers.v1.trace")
    types = importlib.import_module("verifiers.v1.types")
    nodes = importlib.import_module("verifiers.v1.graph").MessageNode
    one = _load(task.data["taskset"], task.data["config"], task.data["count"])[task.data["index"]]
    roles = {"system": types.SystemMessage, "user": types.UserMessage, "assistant": types.AssistantMessage}
    messages = [roles[role](content=text) for role, text in task.data["messages"]]
    path = [nodes(message=message, parent=place - 1 if place else None) for place, message in enumerate(messages)]
    path.append(nodes(message=types.AssistantMessage(content=said), parent=len(path) - 1, sampled=True))
    trace = vf.Trace(
        task=traces.TraceTask(type=type(one).__name__, data=one.data, key=one.key, hash=one.hash),
        agent=traces.AgentInfo(config=vf.AgentConfig()),
        nodes=path,
        is_completed=True,
        ok=True,
    )
    try:
        asyncio.run(one.score(trace))
    except Exception:  # whatever the foreign scorer raises: it could not measure
        return [None]
    found = [None if reward is None else common.reward_of(reward.value) for reward in trace.rewards.values()]
    return found or [None]


class ReplyEnvironment(ReplayingEnvironment):
    """One prompt and one reply. The task's other fields stay with the verifier."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._reply: str | None = None

    def begin(self, task: Task, seed: int) -> Observation:
        self._reply = None
        messages = [Message(role=role, content=shown(text, 20_000)) for role, text in task.data["messages"]]
        return Observation(content=tuple(messages))

    def act(self, action: Action) -> Observation:
        return answer(action, self.spec.tools, self._give, lambda: self._reply is not None)

    def _give(self, call: ToolCall) -> Reply:
        self._reply = shown(str(call.arguments["text"]), 20_000)
        return Reply("received", terminated=True)

    def measured(self) -> Json:
        return {"reply": self._reply}
