"""How far rollouts run ahead of the learner, what a step then trains on, and how fast the learner may move."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl_jax.errors import UserError
from agentrl_jax.recipes.guards import refuse_broken, refuse_thin
from agentrl_jax.recipes.shares import groups_together, own
from agentrl_jax.rl.staleness import learning_rate_cap
from agentrl_jax.rollout.collector import Finished
from agentrl_jax.rollout.episode import EpisodePlan
from agentrl_jax.rollout.records import Trajectory

if TYPE_CHECKING:
    from agentrl_jax.recipes.config import Loop
    from agentrl_jax.recipes.run import Run


def admit(run: Run, plans: Sequence[EpisodePlan], finished: Finished) -> None:
    """Have the episodes of a step begin, as slots and workers allow; those that a checkpoint brought back are over.

    A group with branches begins anew as a whole where it was not complete: a branch needs its source under way, and
    with the same keys and params the same members come of it.
    """
    r, mine = run.config.rollout, own(run.hosts, plans)
    for group in {plan.group for plan in mine if plan.branch is not None}:
        if not run.buffer.complete([group]):
            run.buffer.drop(group)
    missing = [plan for plan in mine if not run.buffer.holds(plan.group, plan.member)]
    run.start(missing, finished, temperature=r.temperature, cut=r.cut)


def roll_out(
    run: Run, loop: Loop, plans: Sequence[EpisodePlan], finished: Finished
) -> tuple[list[list[Trajectory]], dict[str, Any]]:
    """Wait for the episodes of a step that was admitted: its groups, whole and in order, and how it was to wait.

    Failures are among them, as data with their causes; trajectories of later steps stay in the buffer. The figures are
    `waited_s`, and `lag_mean` and `lag_max` over the sampled tokens, in steps; with `loop.branching` what
    `branch_figures` gives, too.
    """
    wanted = list(dict.fromkeys(plan.group for plan in own(run.hosts, plans)))
    begun = time.perf_counter()
    with run.clock.phase("rollout"):
        while not run.buffer.complete(wanted):
            take_in(run, finished, wait=True)
    waited = time.perf_counter() - begun
    mine = run.buffer.pop(wanted)
    found = run.taken = [t for group in mine for t in group]
    lags = _lags(found, run.version)
    if lags.size and lags.max() > loop.max_lag:  # the engine here cannot do that; a server can
        old = sum(any(_lags([t], run.version) > loop.max_lag) for t in found)
        raise UserError(
            f"{old} of {len(found)} episodes were sampled by older params than loop.max_lag={loop.max_lag} allows: was "
            "the inference server restarted meanwhile? --resume publishes anew"
        )
    groups = groups_together(run.hosts, mine)
    found = [t for group in groups for t in group]
    refuse_broken(found, run.config.rollout.max_failure_fraction)
    refuse_thin(found, run.config.rollout.min_valid_fraction)
    lag_mean, lag_max = (float(lags.mean()), int(lags.max())) if lags.size else (0.0, 0)
    pace = {"waited_s": round(waited, 3), "lag_mean": lag_mean, "lag_max": lag_max}
    return groups, pace if loop.branching is None else pace | branch_figures(found)


def branch_figures(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """How many of these branched, how many were refused the state (they ran from the reset), and what forks cost.

    `fork_s` and `fork_bytes` are sums over all, the refused ones too: seconds in the workers, and bytes sent to them;
    `forks_replayed` came to their state action by action. `branch_tokens`: what branches took over of their sources,
    prompts included: sampled once, for the source, and read anew by those that were replayed.
    """
    forks = [t.fork for t in trajectories if t.fork is not None]
    return {
        "branches": sum(t.branch is not None for t in trajectories),
        "branch_tokens": sum(fork.tokens for fork in forks),
        "forks_replayed": sum(fork.way == "replayed" and not fork.refused for fork in forks),
        "forks_refused": sum(bool(fork.refused) for fork in forks),
        "fork_s": round(sum(fork.seconds for fork in forks), 4),
        "fork_bytes": sum(fork.bytes for fork in forks),
    }


def take_in(run: Run, finished: Finished, *, wait: bool = False) -> None:
    """Put into the buffer what is over by now, so that a checkpoint keeps it."""
    for trajectory in run.arrived(finished, wait=wait):
        run.buffer.add(trajectory)


def _lags(trajectories: Sequence[Trajectory], version: int) -> np.ndarray:
    """Publications since each of their sampled tokens."""
    versions = np.concatenate([np.asarray(t.policy_versions, np.int64) for t in trajectories] or [np.zeros(0)])
    return version - versions[versions >= 0]


def capped_rate(loop: Loop) -> float:
    """The learning rate, or what is left of it under `loop.rate_cap`.

    Raises `ValueError` for a cap that is no cap; see `rl.staleness`.
    """
    cap = loop.rate_cap
    if cap is None:
        return loop.learning_rate
    if not 0 < cap.margin <= 1:
        raise ValueError(f"margin: expected a number in (0, 1], got {cap.margin}")
    highest = learning_rate_cap(
        loop.oldest, loop.steps * loop.updates_per_batch, batch_radius=cap.batch_radius,
        critical_radius=cap.critical_radius, update_norm=cap.update_norm,
    )  # fmt: skip
    return min(loop.learning_rate, cap.margin * highest)
