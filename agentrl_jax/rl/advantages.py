"""Advantages of one group: G rewards for the same task, some of which may not count."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


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
      eps: added to the standard deviation.

    Returns:
      f32[G].

    Shao et al. 2024, GRPO (https://arxiv.org/abs/2402.03300); Liu et al. 2025, Dr. GRPO
    (https://arxiv.org/abs/2503.20783).
    """
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

    Kool et al. 2019; Ahmadian et al. 2024, RLOO (https://arxiv.org/abs/2402.14740).
    """
    centered, count = _center(rewards, valid)
    return centered * (count / jnp.maximum(count - 1.0, 1.0))


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
