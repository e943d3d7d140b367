"""From verdicts to rewards. What nobody scored stays unscored: it is neither 0 nor part of any mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from agentrl_jax.rl.ratios import check_shapes


def lexicographic(
    violated: Array,
    outcome: Array,
    quality: Array,
    cost: Array | None = None,
    *,
    quality_scale: float = 0.05,
    broken: float = 0.0,
    quality_levels: int | None = None,
) -> Array:
    """Constraints first, then the outcome, then quality, then cost: no amount of the later makes up for the earlier.

    `R = broken` where a constraint is violated; `outcome` where the task failed (outcome < 1);
    `outcome + quality_scale * quality` where it was solved. Elementwise over one shape.

    With `cost`, quality is rounded to `quality_levels` equal steps, and being cheap adds
    `(1 - cost) * half a step`: it decides between successes of one level and buys no level back. The cost of a failure
    counts nothing, or giving up early would pay.

    Args:
      violated: bool, a constraint was broken.
      outcome: f32 in [0, 1]; solved from 1.
      quality: f32 in [0, 1], ranks successes among themselves; limited to that range.
      cost: f32 in [0, 1], or None; limited to that range. What a success spent, as a share of its budget.
      quality_scale: what the best quality adds; small beside 1.
      broken: reward of a violation; at most 0, or breaking a rule would pay better than failing.
      quality_levels: steps of quality that cost must not buy back; with `cost` only, None is 10.

    Returns:
      f32 rewards of that shape.

    Raises:
      ValueError: `violated` is not bool, shapes differ, `quality_scale` is negative, `broken` is above 0,
        `quality_levels` is below 1 or without `cost`, or `cost` is given and `quality_scale` leaves no room for it.

    No paper: a definition of this library, in place of a weighted sum.
    """
    if jnp.result_type(violated) != jnp.bool_:  # a share of broken constraints, or NaN, would count as a violation
        raise ValueError(f"lexicographic: violated: expected bool, got {jnp.result_type(violated)}: compare with 0")
    costs = {} if cost is None else {"cost": cost}
    check_shapes("lexicographic", "violated", violated, outcome=outcome, quality=quality, **costs)
    if not quality_scale >= 0:
        raise ValueError(f"lexicographic: quality_scale: expected 0 or more, got {quality_scale}")
    if not broken <= 0:
        raise ValueError(f"lexicographic: broken: expected 0 or less, got {broken}")
    rank = jnp.clip(quality, 0.0, 1.0)
    if cost is not None:
        levels = 10 if quality_levels is None else quality_levels
        _check_levels(levels, quality_scale)
        rank = jnp.round(rank * levels) / levels + (1.0 - jnp.clip(cost, 0.0, 1.0)) / (2 * levels)
    elif quality_levels is not None:
        raise ValueError("lexicographic: quality_levels: has no effect without cost: pass cost, or leave it out")
    scored = outcome + jnp.where(outcome >= 1.0, quality_scale * rank, 0.0)
    return jnp.where(violated, broken, scored).astype(jnp.float32)


def decided(violated: Array, outcome: Array, valid: Array) -> Array:
    """True where the valid members of a group differ in constraints or in outcome.

    Where they agree only quality and cost tell them apart, and a division by the group's std would blow those up to
    unit size: give such a group rewards of 0. A group of one, or of none, is not decided.

    Args:
      violated: bool[G].
      outcome: f32[G].
      valid: bool[G]; what stands at invalid members is never read.

    Returns:
      bool[].

    Raises:
      ValueError: the shapes are not those of one group.

    No paper: a definition of this library, for `lexicographic` before `advantages.group_centered`.
    """
    if valid.ndim != 1 or not violated.shape == outcome.shape == valid.shape:
        shapes = f"{violated.shape}, {outcome.shape}, {valid.shape}"
        raise ValueError(f"decided: expected violated, outcome and valid of one group [G], got {shapes}: vmap")
    verdicts = jnp.stack([violated.astype(jnp.float32), outcome.astype(jnp.float32)])
    low = jnp.min(jnp.where(valid[None], verdicts, jnp.inf), axis=1)
    high = jnp.max(jnp.where(valid[None], verdicts, -jnp.inf), axis=1)
    return jnp.any(low < high)


def soft_overlong(lengths: Array, *, max_length: int, buffer: int) -> Array:
    """A penalty that grows over the last `buffer` tokens below the limit, to be added to the reward.

    `min(0, max(-1, (max_length - buffer - n) / buffer))`: 0 up to `max_length - buffer`, -1 from `max_length` on.
    Added to the reward, it breaks ties: `dynamic_sampling` therefore looks at the task metric.

    Args:
      lengths: i32 of any shape, action tokens of each trajectory.
      max_length: most action tokens of a trajectory.
      buffer: tokens below the limit over which the penalty grows.

    Returns:
      f32 of that shape, in [-1, 0].

    Raises:
      ValueError: `buffer` is not between 1 and `max_length`.

    Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476).
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"soft_overlong: buffer: expected 1 to max_length={max_length}, got {buffer}")
    room = (max_length - buffer - lengths).astype(jnp.float32)
    return jnp.clip(room / buffer, -1.0, 0.0)


def scored_mean(values: Array, scored: Array) -> tuple[Array, Array]:
    """The sum of the scored values and how many they are: a mean in two parts, which add up over devices and steps.

    Divided only at the very end, as `types.Metrics` are; a count of 0 then means unknown, not 0.

    Args:
      values: f32 of any shape; what stands where nothing was scored is never read.
      scored: bool of the same shape.

    Returns:
      f32[] sum, f32[] count.

    Raises:
      ValueError: shapes disagree, or `scored` is not bool.
    """
    if values.shape != scored.shape or scored.dtype != jnp.bool_:
        found = f"{scored.dtype}{list(scored.shape)}"
        raise ValueError(f"scored_mean: scored: expected bool{list(values.shape)}, got {found}")
    total = jnp.sum(jnp.where(scored, jnp.asarray(values, jnp.float32), 0.0))
    return total, jnp.sum(scored.astype(jnp.float32))


def read_scores(scores: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Scores as arrays: their values, 0 where there is none, and which ones there are. Host-side.

    `scored` is to be part of `valid`, so that an unscored member leaves the baseline and the loss. A NaN is a score,
    and a wrong one: `check_rewards` refuses it.

    Args:
      scores: a number each, or None where nothing was scored.

    Returns:
      f32[N] values, bool[N] scored.
    """
    values = np.asarray([0.0 if score is None else score for score in scores], np.float32)
    return values, np.asarray([score is not None for score in scores], np.bool_)


def check_rewards(rewards: Any, valid: Any, names: Sequence[str]) -> None:
    """Refuse a reward that is no finite number where it counts, and say whose it is. Host-side, in numpy.

    Args:
      rewards: numbers of any shape.
      valid: bool of the same shape; what stands at invalid members is not looked at.
      names: one per reward, in row-major order: what identifies a trajectory to a person.

    Raises:
      ValueError: a valid reward is NaN or infinite (in f32); shapes disagree.
    """
    rewards, valid = np.asarray(rewards, np.float64), np.asarray(valid, np.bool_)
    if rewards.shape != valid.shape or rewards.size != len(names):
        found = f"{rewards.shape}, {valid.shape} and {len(names)} names"
        raise ValueError(f"check_rewards: expected rewards and valid of one shape and a name for each, got {found}")
    largest = np.finfo(np.float32).max
    wrong = np.flatnonzero(valid & ~(np.abs(rewards) <= largest))
    if wrong.size:
        shown = ", ".join(f"{names[i]}: {rewards.flat[i]}" for i in wrong[:5])
        more = f" and {wrong.size - 5} more" if wrong.size > 5 else ""
        raise ValueError(
            f"check_rewards: rewards: expected finite numbers, got {shown}{more}: correct the verifier or the reward "
            "function, or leave the trajectory unscored (None, not valid)"
        )


def _check_levels(levels: int, quality_scale: float) -> None:
    if levels < 1:
        raise ValueError(f"lexicographic: quality_levels: expected 1 or more, got {levels}")
    # Half a step is what cost moves: beside a reward of 1 it must be more than rounding in f32.
    if quality_scale / (2 * levels) < 1e-5:
        raise ValueError(
            f"lexicographic: quality_scale: expected at least {2e-5 * levels:g} to rank {levels} levels and cost, "
            f"got {quality_scale}"
        )
