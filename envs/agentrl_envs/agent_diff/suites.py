"""The data set's seeds as tenants and its tests as tasks."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from agentrl_jax.protocol import Task

from .. import data
from ..sets.agent_diff import AGENT_DIFF
from . import api, assertions, env, solve, tenant
from .generated import SPLITS
from .services import SERVICES, key_of

FILES = {
    "slack": ("slack_bench_v2", "slack_bench_v2"),
    "linear": ("linear_bench", "linear_expanded"),
    "calendar": ("calendar_bench", "calendar_default"),
    "box": ("box_bench", "box_default"),
}
NEAR = ("train", "train", "train", "validation", "heldout")  # the split of a test, by the hash of its prompt


@cache
def _files() -> dict[str, Any]:
    return data.load(AGENT_DIFF)


@cache
def template(service: str) -> bytes:
    """The seed as a database."""
    seed = _files()[f"seeds/{FILES[service][1]}.json"]
    return tenant.create((e.table, key_of(e, row), row) for e in SERVICES[service] for row in seed.get(e.table, ()))


@cache
def _tables(service: str) -> tenant.Tables:
    connection = tenant.open_bytes(template(service))
    try:
        return tenant.dump(connection)
    finally:
        connection.close()


def tasks(services: Sequence[str], solvable: bool, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` tests of these services in an order that depends on `seed`; ValueError if there are fewer.

    `solvable`: only those whose reference solution follows from their assertions.
    """
    if split not in SPLITS:
        raise ValueError(f"agent_diff: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    rows = [(s, i) for s in services for i, test in enumerate(_tests(s)) if _split(test["prompt"]) == split]
    found: list[Task] = []
    for service, index in random.Random(f"{split}/{seed}").sample(rows, len(rows)):
        if len(found) == count:
            break
        task = _task(service, index, split)
        if task is not None and (task.data["reference"] is not None or not solvable):
            found.append(task)
    if len(found) < count:
        raise ValueError(f"agent_diff: {count} tasks of {split!r} asked for, but there are {len(found)}")
    return tuple(found)


def _tests(service: str) -> list[dict[str, Any]]:
    return _files()[f"testsuites/{FILES[service][0]}.json"]["tests"]


def _split(prompt: str) -> str:
    return NEAR[hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % len(NEAR)]


@cache
def _task(service: str, index: int, split: str) -> Task | None:
    """The task; None where nothing has to change."""
    test = _tests(service)[index]
    made = {
        "service": service, "me": test["impersonate_user_id"], "prompt": test["prompt"], "tenant": service,
        "assertions": test["assertions"], "reference": None, "calls": 2 * len(test["assertions"]) + 1,
        "ignored": _files()[f"testsuites/{FILES[service][0]}.json"]["ignore_fields"]["global"],
    }  # fmt: skip
    if not assertions.judge(SERVICES[service], made["assertions"], made["ignored"], ())[0]:
        return None
    for merged in (False, True):
        with contextlib.suppress(solve.Underivable, KeyError, StopIteration, api.Refused):
            writes = solve.writes(_tables(service), made, merged=merged)
            if _works(service, made, writes):
                made |= {"reference": [list(write) for write in writes], "calls": 2 * len(writes) + 1}
                break
    return Task(id=f"{service}-{test['id']}", split=split, kind=service, data=made)


def _works(service: str, made: dict[str, Any], writes: list[tuple[str, dict[str, Any]]]) -> bool:
    connection = tenant.open_bytes(template(service))
    try:
        for key, value in (("me", made["me"]), ("service", service)):
            tenant.put(connection, "episode", key, {"value": value})
        for call in solve.script(writes):
            if not isinstance(call, str):
                env.carry_out(connection, call)
        found = assertions.differences(_tables(service), tenant.dump(connection))
        return not any(assertions.judge(SERVICES[service], made["assertions"], made["ignored"], found))
    finally:
        connection.close()
