"""The `retail` data set as an environment: real requests over 500 users, 1,000 orders and 50 products.

A request is one message; the agent looks up, changes, and says `finish`. The verifier compares the user's rows with
those that the annotated actions lead to. Rules are the data set's policy text as far as a service can check them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task, ToolCall

from .. import data
from ..sets.retail import RETAIL
from . import attacks, service, tools, verifier
from .env import RetailEnvironment

VERSION = "2"
FILES = {"train": "tasks_train.jsonl.gz", "validation": "tasks_dev.jsonl.gz", "heldout": "tasks_test.jsonl.gz"}
# Their annotated actions change no row and name nothing to be told, so that doing nothing cannot be told from solving
# them; test-95 is test-93 once more.
LEFT_OUT = frozenset(
    [
        *(f"train-{n}" for n in (161, 214, 229, 288, 349)), "dev-17",
        *(f"test-{n}" for n in (10, 12, 25, 50, 57, 65, 95, 106)),
    ]
)  # fmt: skip


def suite(system: str = "short", max_actions: int = 16, max_calls: int = 24) -> Suite:
    """The retail suite. `system`: "none", "short" (what to do, in two sentences) or "full" (the whole policy text).

    `max_actions` leaves out tasks with more annotated actions (the longest has 14). Raises `data.DataError` if the
    data set is neither here nor can be fetched, ValueError for an unknown option.
    """
    if system not in ("none", "short", "full"):
        raise ValueError(f"retail: system={system!r} is not known; expected none, short or full")
    if max_actions < 0 or max_calls <= max_actions:
        raise ValueError(f"retail: max_calls={max_calls} must exceed max_actions={max_actions}, which must be >= 0")
    files = _files()
    catalogue = service.Catalogue(files["users.json.gz"], files["orders.json.gz"], files["products.json.gz"])
    text = {"none": "", "short": SHORT, "full": f"{files['policy.md']}\n\n{SHORT}"}[system]
    spec = EnvironmentSpec(
        name="retail",
        version=VERSION,
        tools=tools.TOOLS,
        budget=Budget(steps=max_calls, tool_calls=max_calls, write_actions=12, retries=6, finishing=("finish",)),
        fork="native",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=lambda: RetailEnvironment(spec, catalogue, text),
        tasks=partial(_tasks, files, max_actions),
        verify=partial(verifier.verify, catalogue),
        verifier_version=verifier.VERSION,
        solve=_solve,
        attacks=attacks.attacks,
        hidden=("actions", "outputs"),
        demonstrate=lambda task, seed: _solve(task),
    )


SHORT = (
    "Do what the customer asks for with the tools, one call at a time, each change confirmed already. When nothing is "
    "left to do, call finish with what the customer wants to know."
)


@cache
def _files() -> dict[str, Any]:
    return data.load(RETAIL)


def _tasks(files: dict[str, Any], max_actions: int, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks of the split in an order that depends on `seed`; ValueError if there are fewer."""
    if split not in FILES:
        raise ValueError(f"retail: split={split!r} is not known; expected one of {', '.join(FILES)}")
    rows = [row for row in files[FILES[split]] if row["id"] not in LEFT_OUT and len(row["actions"]) <= max_actions]
    if count > len(rows):
        raise ValueError(f"retail: {count} tasks of {split!r} asked for, but there are {len(rows)}")
    order = random.Random(f"{split}/{seed}").sample(range(len(rows)), count)
    return tuple(_task(rows[i], split) for i in order)


def _task(row: dict[str, Any], split: str) -> Task:
    writes = [action["name"] for action in row["actions"] if action["name"] in tools.WRITES]
    kept = {name: row[name] for name in ("user_id", "instruction", "actions", "outputs")}
    return Task(id=row["id"], split=split, kind=writes[0] if writes else "question", data=kept)


def _solve(task: Task) -> Sequence[ToolCall | str]:
    """The annotated actions, then `finish` with the outputs that the annotation names."""
    calls = [ToolCall(name=action["name"], arguments=action["kwargs"]) for action in task.data["actions"]]
    if not calls or calls[-1].name != tools.TRANSFER:
        calls.append(ToolCall(name="finish", arguments={"answer": ", ".join(task.data["outputs"])}))
    return tuple(calls)
