"""Independent evaluation: held-out tasks, seeds of their own, no gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl_jax.protocol import StopReason
from agentrl_jax.recipes.guards import refuse_broken
from agentrl_jax.recipes.shares import own, together
from agentrl_jax.rollout.collect import EpisodePlan
from agentrl_jax.rollout.records import Trajectory

if TYPE_CHECKING:
    from agentrl_jax.recipes.run import Run

_OUT_OF_BUDGET = (StopReason.BUDGET, StopReason.TOKEN_CAP)
_EVALUATION = 1  # first element of every request key here; training has 0


def evaluate(run: Run, *, stage: str, split: str, episodes: int, seed: int) -> dict[str, Any]:
    """Play `episodes` distinct tasks of `split` once each with the published policy and measure them.

    Success counts the episodes whose failure the policy could have caused; what the environment or
    the evaluator broke leaves the denominator and is counted under `failures`.
    """
    tasks = run.suite.tasks(split, episodes, seed)
    plans = [
        EpisodePlan(group=i, member=0, task=task, seed=seed + i, key=(_EVALUATION, seed, i, 0))
        for i, task in enumerate(tasks)
    ]
    e = run.config.evaluation
    with run.clock.phase("evaluation"):
        mine = run.collect(own(run.hosts, plans), temperature=e.temperature, cut=e.cut)
        found = together(run.hosts, sorted(mine, key=lambda t: t.group))
    refuse_broken(found, run.config.rollout.max_failure_fraction)
    return {"stage": stage, "step": run.step, "at": run.at, "split": split, **measure(found)}


def measure(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The figures of an evaluation, from its trajectories."""
    scored = [t for t in trajectories if t.valid]
    count = max(1, len(scored))
    kinds: dict[str, list[bool]] = {}
    for t in scored:
        kinds.setdefault(t.task.kind, []).append(t.success)
    return {
        "episodes": len(trajectories),
        "scored": len(scored),
        "success": sum(t.success for t in scored) / count,
        "violation_rate": sum(t.violated for t in scored) / count,
        "mean_tool_calls": sum(t.tool_calls for t in scored) / count,
        "failures": failures(trajectories),
        "premature_stop_rate": sum(t.stop is StopReason.EARLY_STOP for t in scored) / count,
        "unfinished_after_budget": sum(t.stop in _OUT_OF_BUDGET for t in scored) / count,
        "stops": dict(Counter(str(t.stop) for t in trajectories)),
        "segments": sum(t.segments for t in trajectories) / max(1, len(trajectories)),
        "breaks": dict(Counter(cut.reason for t in trajectories for cut in t.breaks)),
        "retokenize_mismatch": sum(t.retokenize_mismatch > 0 for t in trajectories),
        "dropped/token_mismatch": sum(t.token_mismatch for t in trajectories),
        "success_by_kind": {kind: sum(v) / len(v) for kind, v in sorted(kinds.items())},
    }


def failures(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Unsuccessful episodes by cause. Without an attribution a failure is the policy's."""
    causes = ("policy" if t.attribution is None else str(t.attribution.cause) for t in trajectories if not t.success)
    return dict(Counter(causes))
