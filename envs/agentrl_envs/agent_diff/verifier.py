"""The verifier: the task's assertions over what differs between the tenant before and after, in a closed world."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from ..endings import unfinished
from . import api, assertions, tenant
from .env import carry_out, finished
from .services import SERVICES

VERSION = "2"


def verify(
    task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot, stop: StopReason | None = None
) -> Verdict:
    """Measures one episode.

    Constraints: `no_undeclared_change` - every difference is one that an assertion names; `actions_explain` - the
    actions, repeated on the initial tenant, lead to the final one. Outcome: every assertion holds and the policy
    finished. Quality: 1 - (calls beyond the reference's) / (the reference's), at least 0.
    """
    data = task.data
    before, after, again = (tenant.open_bytes(snapshot.data) for snapshot in (initial, final, initial))
    try:
        calls = refused = 0
        for action in actions:
            for call in action.calls:
                calls += 1
                with contextlib.suppress(api.Refused):
                    carry_out(again, call)
                    refused -= 1
                refused += 1
        explained = tenant.audit(again) == tenant.audit(after)
        over = finished(after)
        found = assertions.differences(tenant.dump(before), tenant.dump(after))
    finally:
        for connection in (before, after, again):
            connection.close()
    missing, undeclared = assertions.judge(SERVICES[data["service"]], data["assertions"], data["ignored"], found)
    return Verdict(
        constraints=(
            Check(name="no_undeclared_change", passed=not undeclared, evidence="; ".join(undeclared)[:600]),
            Check(name="actions_explain", passed=explained, evidence="" if explained else "another final state"),
        ),
        outcome=not missing and over,
        quality=max(0.0, 1.0 - max(0, calls - data["calls"]) / data["calls"]),
        diagnostics={
            "calls": calls, "refused": refused, "changes": len(found), "assertions": len(data["assertions"]),
            "unmet": len(missing), "finished": over,
            "unfinished": unfinished(over, stop),
        },
        evidence=tuple(missing),
    )  # fmt: skip
