"""Which groups are worth training on, and when to stop looking for more.

Everything here looks at the task metric (solved or not), never at a shaped reward: a length penalty breaks the
ties of a group that is all failures and would keep it, without a signal in it. What is filtered is not free of
bias: hard and easy tasks drop out, and with them their share of the domains.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

Action = Literal["generate", "train", "stop"]
Shortfall = Literal["train", "stop"]


class Balanced(NamedTuple):
    """How far a stream of rollouts had to be read."""

    used: Array  # i32[] rollouts read
    ok: Array  # bool[] both quotas were met


class Refill(NamedTuple):
    """What a loop that fills its batch does next, and why."""

    action: Action
    reason: str


def keep_mixed(solved: Array, valid: Array) -> Array:
    """True where a group has a success and a failure among its valid members: only then does it carry a signal.

    `0 < successes < valid members`. A group of one, or of none, is not kept.

    Args:
      solved: bool[G], the task metric.
      valid: bool[G]; what stands at invalid members is never read.

    Returns:
      bool[].

    Raises:
      ValueError: shapes disagree, or `solved` is not bool.

    Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476).
    """
    _check("keep_mixed", solved, valid)
    return jnp.any(solved & valid) & jnp.any(~solved & valid)


def keep_probability(pass_rate: Array | float, group: int) -> Array:
    """The chance that `keep_mixed` keeps a group: `1 - p^G - (1 - p)^G`. Elementwise.

    Its inverse is how many groups must be generated for one that trains.

    Args:
      pass_rate: p in [0, 1] of one rollout; a number or f32 of any shape.
      group: G, rollouts per task.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: `group` is below 1.
    """
    if group < 1:
        raise ValueError(f"keep_probability: group: expected 1 or more, got {group}")
    pass_rate = jnp.asarray(pass_rate, jnp.float32)
    # Symmetric in p and 1 - p. From the smaller of the two, no digit of a rare success is lost to the 1.
    rarer = jnp.minimum(pass_rate, 1.0 - pass_rate)
    return jnp.maximum(-jnp.expm1(group * jnp.log1p(-rarer)) - rarer**group, 0.0)


def balanced_rollouts(
    solved: Array, valid: Array, *, positives: int = 2, negatives: int = 2, cap: int = 16
) -> Balanced:
    """How many rollouts of one task to read until both outcomes have their quota: Balanced Adaptive Rollout.

    `used = min {n : successes(n) >= positives and failures(n) >= negatives}`, at most `cap`. The published
    description has no quotas and no cap; the rule and the numbers here are a reconstruction.

    Stopping when the rare outcome appears shifts the group's mean towards it: take the baseline from a pass rate that
    was measured without stopping, or report the shift.

    Args:
      solved: bool[S], outcomes in the order in which they came.
      valid: bool[S]; an invalid rollout is read and counts for neither quota.
      positives: successes wanted.
      negatives: failures wanted.
      cap: most rollouts of one task.

    Returns:
      `Balanced`. Where a quota is missed, `used` is all that was read: `cap`, or S if that is less.

    Raises:
      ValueError: shapes disagree, `solved` is not bool, or the quotas do not fit under the cap.

    After Orchard, 2026 (https://arxiv.org/abs/2605.15040).
    """
    _check("balanced_rollouts", solved, valid)
    if min(positives, negatives) < 0 or positives + negatives < 1 or positives + negatives > cap:
        raise ValueError(
            f"balanced_rollouts: cap: expected quotas of 0 or more that fit under it, got positives={positives}, "
            f"negatives={negatives}, cap={cap}"
        )
    solved, valid = solved[:cap], valid[:cap]
    met = (jnp.cumsum(solved & valid) >= positives) & (jnp.cumsum(~solved & valid) >= negatives)
    ok = jnp.any(met)
    first = jnp.sum(~met, dtype=jnp.int32) + 1
    return Balanced(jnp.where(ok, first, solved.shape[0]), ok)


def refill_decision(
    kept: int, wanted: int, generated_batches: int, max_batches: int, *, on_shortfall: Shortfall
) -> Refill:
    """What a loop does after it filtered a generated batch: generate again, train, or stop; never forever.

    A full batch trains. A short one asks for another batch until `max_batches` were generated; then `on_shortfall`
    decides, and with nothing kept there is nothing to train on, so it stops. Host-side.

    Args:
      kept: groups kept so far for this step.
      wanted: groups a step trains on.
      generated_batches: batches generated so far for this step.
      max_batches: most batches for one step.
      on_shortfall: "train" on the groups that exist, or "stop".

    Returns:
      `Refill`, whose `reason` is a sentence for the log, or for the error that ends the run.

    Raises:
      ValueError: a count is out of range, or `on_shortfall` is neither word.

    Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476).
    """
    for argument, value, least in (
        ("kept", kept, 0),
        ("wanted", wanted, 1),
        ("generated_batches", generated_batches, 0),
        ("max_batches", max_batches, 1),
    ):
        if value < least:
            raise ValueError(f"refill_decision: {argument}: expected {least} or more, got {value}")
    if on_shortfall not in ("train", "stop"):
        raise ValueError(f"refill_decision: on_shortfall: expected 'train' or 'stop', got {on_shortfall!r}")
    found = f"{kept} of {wanted} groups have both outcomes after {generated_batches} of at most {max_batches} batches"
    if kept >= wanted:
        return Refill("train", found)
    if generated_batches < max_batches:
        return Refill("generate", found)
    if on_shortfall == "train" and kept > 0:
        return Refill("train", f"{found}: training on those")
    return Refill("stop", f"{found}: choose tasks of other difficulty, a larger group, or more batches")


def _check(name: str, solved: Array, valid: Array) -> None:
    if solved.dtype != jnp.bool_:
        raise ValueError(
            f"{name}: solved: expected bool, the task metric, got {solved.dtype}: a shaped reward differs between "
            "failures and hides that a group has no signal. Compare the metric with its threshold first"
        )
    if solved.ndim != 1 or solved.shape != valid.shape or valid.dtype != jnp.bool_:
        found = f"{solved.dtype}{list(solved.shape)} and {valid.dtype}{list(valid.shape)}"
        raise ValueError(f"{name}: expected solved and valid of one group, bool[G] each, got {found}: vmap over groups")
