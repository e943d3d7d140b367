"""reasoning-gym data sets: a question, one answer, scored by the data set.

suite("chain_sum")       suite("leg_counting", config={"max_animals": 4})
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
)  # fmt: skip

from ..answering import Reply, answer, shown, tool
from ..replaying import ReplayingEnvironment
from . import common

VERSION = "1"
SIZE = 10_000_000  # of the virtual data set: its entries are made when asked for
MOST_MISSES = 2_000
ANSWER = tool("answer", "Give the answer. Ends the task.", {"text": {"type": "string", "maxLength": 4000}})


def missing() -> str | None:
    if importlib.util.find_spec("reasoning_gym") is None:
        return "reasoning-gym is not installed: pip install 'agentrl-jax[adapters]'"
    return None


def suite(dataset: str = "chain_sum", config: Mapping[str, Any] | None = None) -> Suite:
    """A reasoning-gym data set as a suite; `config` is the data set's own. The outcome is its score from 0 to 1.

    Raises ValueError for a data set that does not exist, and for one whose scorer evaluates the answer as code: that
    would run what a policy wrote in the process that judges it.
    """
    settings = json.dumps(dict(config or {}), sort_keys=True)
    _refuse_evaluation(dataset, _dataset(dataset, settings, 0))
    spec = EnvironmentSpec(
        name=f"reasoning-gym-{dataset}",
        version=VERSION,
        tools=(ANSWER,),
        budget=Budget(steps=4, tool_calls=4, write_actions=0, finishing=("answer",)),
        fork="replay",
        side_effects="none",
    )
    return Suite(
        spec=spec,
        make=partial(ReasoningEnvironment, spec),
        tasks=partial(_tasks, dataset, settings),
        verify=_verify,
        verifier_version=common.JUDGE_VERSION,
        solve=_solve,
    )


@cache
def _dataset(name: str, settings: str, seed: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=SIZE, **json.loads(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym: {name!r} with {settings}: {error}") from error


def _refuse_evaluation(name: str, dataset: Any) -> None:
    source = inspect.getsource(inspect.getmodule(type(dataset)) or type(dataset))
    if re.search(r"\b(parse_expr|sympify|exec)\(|\beval\((?!entry)", source) and "score_answer" in vars(type(dataset)):
        raise ValueError(f"reasoning-gym: the scorer of {name!r} evaluates answers as code, which is not run here")


def _tasks(name: str, settings: str, split: str, count: int, seed: int) -> tuple[Task, ...]:
    common.check_split("reasoning-gym", split)
    return tuple(_drawn(name, settings, split, count, seed))


def _drawn(name: str, settings: str, split: str, count: int, seed: int) -> Iterator[Task]:
    """Entries in their order, those of other splits left out: the split follows from the question."""
    seen: set[str] = set()
    missed = index = 0
    while len(seen) < count:
        if missed > MOST_MISSES:
            raise ValueError(f"reasoning-gym: {name} has no {count} tasks of {split!r}; {len(seen)} were found")
        entry = _dataset(name, settings, seed)[index]
        index, missed = index + 1, missed + 1
        question = str(entry["question"])
        if question in seen or common.split_of(question) != split:
            continue
        seen.add(question)
        missed = 0
        data = {"dataset": name, "config": settings, "seed": seed, "index": index - 1, "question": question}
        yield Task(id=f"{name}-{seed}-{index - 1}", split=split, kind=name, data=data)


def _entry(task: Task) -> tuple[Any, Mapping[str, Any]]:
    made = _dataset(task.data["dataset"], task.data["config"], task.data["seed"])
    return made, made[task.data["index"]]


def _solve(task: Task) -> Sequence[ToolCall]:
    return (ToolCall(name="answer", arguments={"text": str(_entry(task)[1]["answer"])}),)


def _verify(task: Task, initial: Any, actions: Sequence[Action], final: Any, stop: StopReason | None = None) -> Verdict:
    """The data set's own score of the answer in the final state."""
    measured = json.loads(final.data)["measured"]
    score: float | None = 0.0
    if measured["answer"] is not None:
        made, entry = _entry(task)
        score = common.reward_of(made.score_answer(measured["answer"], entry))
    judged = {**json.loads(final.data), "measured": {"rewards": [score], "ended": measured["answer"] is not None}}
    return common.judge(actions, type(final)(data=json.dumps(judged).encode(), hash=final.hash), None, stop)


class ReasoningEnvironment(ReplayingEnvironment):
    """One question. The entry's answer and metadata stay with the verifier."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self.spec = spec
        self._answer: str | None = None

    def begin(self, task: Task, seed: int) -> Observation:
        self._answer = None
        return Observation(content=(Message(role="user", content=shown(task.data["question"], 20_000)),))

    def act(self, action: Action) -> Observation:
        return answer(action, self.spec.tools, self._give, lambda: self._answer is not None)

    def _give(self, call: ToolCall) -> Reply:
        self._answer = shown(str(call.arguments["text"]))
        return Reply("answered", terminated=True)

    def measured(self) -> Json:
        return {"answer": self._answer}
