"""Replicas of Slack, Linear, Calendar and Box: do what is asked through a typed API, and nothing else.

Each episode has a tenant of its own in SQLite. Writes are run dry first. The verifier holds the data set's state-diff
assertions against what differs, in a closed world. Without the data set there is a small generated workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task

from . import api, generated, solve, suites, tenant, verifier
from .env import AgentDiffEnvironment
from .services import SERVICES

__all__ = ["suite"]
VERSION = "1"


def suite(
    source: str = "generated", services: Sequence[str] = ("slack",), solvable: bool = True, max_calls: int = 48
) -> Suite:
    """The agent_diff suite.

    `source`: "generated" or "agent_diff" (raises `data.DataError` where the set is missing). `services`: whose tests;
    one service per suite, since its tools are the suite's. `solvable`: only tests with a reference solution.
    """
    if source not in ("generated", "agent_diff"):
        raise ValueError(f"agent_diff: source={source!r} is not known; expected generated or agent_diff")
    if len(services) != 1 or services[0] not in SERVICES:
        raise ValueError(f"agent_diff: services={list(services)!r}; expected one of {', '.join(SERVICES)}")
    service = services[0]
    if source == "generated" and service != "slack":
        raise ValueError(f"agent_diff: services={list(services)!r} needs source='agent_diff'; generated is slack only")
    if max_calls < 8:
        raise ValueError(f"agent_diff: max_calls={max_calls}; expected at least 8")
    spec = EnvironmentSpec(
        name="agent_diff",
        version=VERSION,
        tools=api.describe(service),
        budget=Budget(
            steps=max_calls,
            tool_calls=max_calls,
            write_actions=max_calls,
            retries=8,
            tokens=8192,
            finishing=("finish",),
        ),
        fork="native",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=lambda: AgentDiffEnvironment(spec, _template),
        tasks=generated.tasks if source == "generated" else partial(suites.tasks, tuple(services), solvable),
        verify=verifier.verify,
        verifier_version=verifier.VERSION,
        solve=solve.solve,
        attacks=partial(solve.attacks, _template),
        hidden=("assertions", "ignored", "reference", "calls"),
    )


def _template(task: Task) -> bytes:
    held = task.data["tenant"]
    return suites.template(held) if isinstance(held, str) else _generated(held[0], held[1])


@lru_cache(maxsize=32)
def _generated(key: int, split: str) -> bytes:
    return tenant.create(generated.rows(key, split))
