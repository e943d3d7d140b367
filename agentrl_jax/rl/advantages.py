"""Advantages of one group: G rewards for the same task, some of which may not count; and of a whole batch.

A member that does not count (`valid` or `mask` False) leaves every mean, every standard deviation and every
denominator; it gets 0, and what stands at it is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.rl.types import Advantage

AxisName = str | tuple[str, ...]


def group_centered(
    rewards: Array, valid: Array, *, scale_by_std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> Array:
    """Distance from the mean of the group, in standard deviations.

    `A_i = (R_i - mean R) / (std R + eps)` with mean and std over the valid members. A constant group
    gives exactly 0, whatever its rewards, and so does a group of one; an invalid member gets 0 and
    touches no one else's advantage.

    Args:
      rewards: f32[G]; what stands at invalid members is never read, NaN included.
      valid: bool[G] members that count in the baseline.
      scale_by_std: divide by the standard deviation; without it, easy and hard tasks weigh the same
        (Dr. GRPO).
      ddof: 1 for the sample standard deviation (torch.std), 0 for the population's (jnp.std).
      eps: added to the standard deviation, above 0.

    Returns:
      f32[G].

    Raises:
      ValueError: not the arrays of one group, or a setting outside the range above.

    Shao et al. 2024, GRPO (https://arxiv.org/abs/2402.03300); Liu et al. 2025, Dr. GRPO
    (https://arxiv.org/abs/2503.20783).
    """
    _check_group("group_centered", rewards, valid)
    if scale_by_std:
        _check_scaling("group_centered", ddof, eps)
    centered, count = _center(rewards, valid)
    if not scale_by_std:
        return centered
    variance = jnp.sum(jnp.square(centered)) / jnp.maximum(count - ddof, 1.0)
    return centered / (jnp.sqrt(variance) + eps)


def leave_one_out(rewards: Array, valid: Array) -> Array:
    """Distance from the mean of the *other* members: a baseline that does not depend on the member itself.

    `A_i = R_i - mean_{j != i} R_j = n / (n - 1) * (R_i - mean R)` over the n valid members; 0 for an
    invalid member, and for a group of one, which has no others.

    Args:
      rewards: f32[G].
      valid: bool[G].

    Returns:
      f32[G].

    Raises:
      ValueError: not the arrays of one group.

    Kool et al. 2019; Ahmadian et al. 2024, RLOO (https://arxiv.org/abs/2402.14740).
    """
    _check_group("leave_one_out", rewards, valid)
    centered, count = _center(rewards, valid)
    return centered * (count / jnp.maximum(count - 1.0, 1.0))


def componentwise(
    rewards: Array,
    valid: Array,
    *,
    coefficients: Sequence[float] | None = None,
    advantage: Advantage | None = None,
) -> Array:
    """Every component of the reward against the group on its own, then a weighted sum: no range drowns another.

    `A_i = sum_c coefficient_c * advantage(R[:, c])_i`. A component on which the group agrees adds exactly 0.
    The paper then normalises over the batch: `batch_scaled` of the advantages of all groups.

    Args:
      rewards: f32[G, C], one column per component.
      valid: bool[G], or bool[G, C] where some members lack the score of a component: it adds 0 for them
        and compares the others among themselves.
      coefficients: C numbers, how much each normalised component counts; None is 1 for all.
      advantage: of one component in one group; None is `group_centered`.

    Returns:
      f32[G].

    Raises:
      ValueError: shapes disagree, or there is not one coefficient per component.

    Liu et al. 2026, GDPO (https://arxiv.org/abs/2601.05242).
    """
    if rewards.ndim != 2:
        raise ValueError(f"componentwise: rewards: expected [G, C], got shape {rewards.shape}: vmap over groups")
    if valid.ndim == 1 and valid.shape[0] == rewards.shape[0]:
        valid = jnp.broadcast_to(valid[:, None], rewards.shape)
    _check_mask("componentwise", "valid", valid, rewards.shape)
    components = rewards.shape[1]
    coefficients = (1.0,) * components if coefficients is None else tuple(coefficients)
    if len(coefficients) != components:
        raise ValueError(f"componentwise: coefficients: expected {components}, one a component, got {coefficients}")
    per_component = jax.vmap(advantage or group_centered, in_axes=1, out_axes=1)(rewards, valid)
    return jnp.sum(per_component * jnp.asarray(coefficients, jnp.float32)[None, :], axis=1)


def turn_discounted(advantage: Array, turn_mask: Array, *, gamma: float) -> Array:
    """The trajectory's advantage on each of its turns, less of it the earlier the turn.

    `A_k = gamma^(turns after k) * A`: the last turn gets A, and every turn its sign; with `gamma=1` all turns get A.
    This is plain discounting of a group's verdict. It is not the advantage of a discounted return, which compares
    the returns of a group with each other (GTPO, https://arxiv.org/abs/2511.14846): there a late success is
    worth less than an early one, here all successes are worth the same at their last turn.

    Args:
      advantage: f32[], of the trajectory within its group.
      turn_mask: bool[K], True on the turns that were taken; padding, and turns without an action, are passed over.
      gamma: discount per turn, in [0, 1].

    Returns:
      f32[K], 0 off the mask. `credit.to_tokens` lays it on the tokens.

    Raises:
      ValueError: shapes are not [] and bool[K], or `gamma` is outside [0, 1].
    """
    if jnp.ndim(advantage) != 0 or turn_mask.ndim != 1:
        shapes = f"{jnp.shape(advantage)}, {turn_mask.shape}"
        raise ValueError(f"turn_discounted: expected advantage [] and turn_mask [K], got {shapes}: vmap")
    if not 0 <= gamma <= 1:
        raise ValueError(f"turn_discounted: gamma: expected a number in [0, 1], got {gamma}")
    _check_mask("turn_discounted", "turn_mask", turn_mask, turn_mask.shape)
    taken = turn_mask.astype(jnp.int32)
    later = jnp.sum(taken) - jnp.cumsum(taken)
    powers = jnp.asarray([gamma**k for k in range(turn_mask.shape[0])], jnp.float32)
    return jnp.where(turn_mask, jnp.asarray(advantage, jnp.float32) * powers[later], 0.0)


def global_whitened(
    values: Array, mask: Array, *, ddof: int = 0, eps: float = 1e-8, axis_name: AxisName | None = None
) -> Array:
    """Distance from the mean of the whole batch, in its standard deviations; exactly 0 off the mask.

    `A = (x - mean x) / sqrt(var x + eps)` with mean and variance over everything under the mask: rewards of
    trajectories count once each, returns of tokens once per token. A constant batch gives exactly 0.

    Args:
      values: f32 of any shape, the whole batch or this device's part of it.
      mask: bool of the same shape.
      ddof: 0 for the population's variance (OpenRLHF), 1 for the sample's (verl).
      eps: added to the variance.
      axis_name: mapped axis over which the batch is spread (`pmap`, `shard_map`): its statistics are those of all
        devices. Under `jit`, with inputs sharded or not, leave it out.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: shapes disagree, the mask is not bool, `ddof` is neither 0 nor 1, or `eps` is not above 0.

    Hu et al. 2025, REINFORCE++ (https://arxiv.org/abs/2501.03262).
    """
    _check_mask("global_whitened", "mask", mask, values.shape)
    _check_scaling("global_whitened", ddof, eps)
    values = jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)
    # As in `_center`: equal values become exact zeros. The smallest is the one that all devices can agree on.
    smallest = jnp.min(jnp.where(mask, lax.stop_gradient(values), jnp.inf), initial=jnp.inf)
    if axis_name is not None:
        smallest = lax.pmin(smallest, axis_name)
    shifted = jnp.where(mask, values - smallest, 0.0)
    mean = _total(shifted, axis_name) / jnp.maximum(_total(mask, axis_name), 1.0)
    return batch_scaled(jnp.where(mask, shifted - mean, 0.0), mask, ddof=ddof, eps=eps, axis_name=axis_name)


def batch_scaled(
    advantages: Array, mask: Array, *, ddof: int = 0, eps: float = 1e-8, axis_name: AxisName | None = None
) -> Array:
    """Whitening of what is centered already, group by group: only the scale is the batch's; zeros stay exactly 0.

    `A / sqrt(sum A^2 / (n - ddof) + eps)` over the n values under the mask. A group without a signal keeps its
    exact zeros, where `global_whitened` would move them by the rounding error of a mean that is 0, or by a mean over
    tokens, which is not 0 where lengths differ.

    Args:
      advantages: f32 of any shape, of mean 0.
      mask: bool of the same shape.

    The other arguments, the result and the errors are those of `global_whitened`.
    """
    _check_mask("batch_scaled", "mask", mask, advantages.shape)
    _check_scaling("batch_scaled", ddof, eps)
    centered = jnp.where(mask, jnp.asarray(advantages, jnp.float32), 0.0)
    count = _total(mask, axis_name)
    variance = _total(jnp.square(centered), axis_name) / jnp.maximum(count - ddof, 1.0)
    return centered * lax.rsqrt(variance + eps)


def group_baseline_whitened(
    rewards: Array, valid: Array, *, ddof: int = 0, eps: float = 1e-8, axis_name: AxisName | None = None
) -> Array:
    """Distance from the mean of the group, in standard deviations of the whole batch: REINFORCE++-baseline.

    `A = (R - mean of its group) / sqrt(var over all groups + eps)`: hard and easy tasks share one scale, so a nearly
    solved one is not blown up. Every trajectory counts once. Released trainers whiten tokens instead, as
    `Objective(advantage=group_centered without std, whiten=global_whitened)` does: long trajectories then
    weigh more, and a constant group is pushed by the mean over tokens.

    Args:
      rewards: f32[P, G], every group of the step, or this device's share of the groups.
      valid: bool[P, G].

    The other arguments and the errors are those of `global_whitened`; a group lies on one device.

    Returns:
      f32[P, G]; exactly 0 for a constant group and for a group of one.

    Hu et al. 2025, REINFORCE++ (https://arxiv.org/abs/2501.03262).
    """
    if rewards.ndim != 2:
        raise ValueError(f"group_baseline_whitened: rewards: expected [P, G], got shape {rewards.shape}")
    _check_mask("group_baseline_whitened", "valid", valid, rewards.shape)
    centered = jax.vmap(partial(group_centered, scale_by_std=False))(rewards, valid)
    return batch_scaled(centered, valid, ddof=ddof, eps=eps, axis_name=axis_name)


def _center(rewards: Array, valid: Array) -> tuple[Array, Array]:
    """(R - mean R) over the valid members, 0 elsewhere, and how many are valid.

    Rewards are first shifted by one of their own, which changes nothing but the rounding: equal
    rewards become exact zeros (the f32 mean of seven 0.1 is not 0.1, and eps would not hide it).
    """
    rewards = jnp.where(valid, rewards.astype(jnp.float32), 0.0)
    count = jnp.sum(valid.astype(jnp.float32))
    shifted = jnp.where(valid, rewards - rewards[jnp.argmax(valid)], 0.0)
    mean = jnp.sum(shifted) / jnp.maximum(count, 1.0)
    return jnp.where(valid, shifted - mean, 0.0), count


def _total(values: Array, axis_name: AxisName | None) -> Array:
    """The sum over the batch, f32[]."""
    total = jnp.sum(values.astype(jnp.float32))
    return total if axis_name is None else lax.psum(total, axis_name)


def _check_group(name: str, rewards: Array, valid: Array) -> None:
    if rewards.ndim != 1:
        raise ValueError(f"{name}: rewards: expected f32[G] of one group, got shape {rewards.shape}: vmap over groups")
    _check_mask(name, "valid", valid, rewards.shape)


def _check_mask(name: str, argument: str, mask: Array, shape: tuple[int, ...]) -> None:
    if mask.shape != shape or mask.dtype != jnp.bool_:
        found = f"{mask.dtype}{list(mask.shape)}"
        raise ValueError(f"{name}: {argument}: expected bool{list(shape)}, got {found}")


def _check_scaling(name: str, ddof: int, eps: float) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"{name}: ddof: expected 0 (population) or 1 (sample), got {ddof}")
    if not eps > 0:
        raise ValueError(f"{name}: eps: expected a number above 0, or a constant batch gives NaN; got {eps}")
