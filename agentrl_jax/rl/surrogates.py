"""Surrogates: what is maximised, from ratio and advantage, elementwise.

Each is positively homogeneous in the advantage, so a detached correction c >= 0 multiplies
the advantages before the gradient step and no surrogate needs to know of it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from agentrl_jax.rl.types import Surrogate


def linear(ratio: Array, advantages: Array) -> Array:
    """`r * A`: the policy gradient with importance sampling and no trust region. Any one shape.

    Williams 1992; Sutton et al. 2000.
    """
    return ratio * advantages


def ppo_clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Surrogate:
    """The pessimistic minimum of the clipped and the unclipped objective.

    `min(r * A, clip(r, 1 - low, 1 + high) * A)`; with `dual` also `max(that, dual * A)` where A < 0,
    which bounds what one badly off-policy token with a negative advantage can do.

    Args:
      low: clip range below 1, in (0, 1].
      high: clip range above 1; larger than `low` leaves room for exploration (clip-higher).
      dual: bound of the ratio on negative advantages, above 1; None for no bound.

    Raises:
      ValueError: a range that clips nothing or everything.

    Schulman et al. 2017, PPO (https://arxiv.org/abs/1707.06347); dual clip: Ye et al. 2020
    (https://arxiv.org/abs/1912.09729); clip-higher: Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476).
    """
    if not 0 < low <= 1:
        raise ValueError(f"ppo_clip: low: expected a range in (0, 1], got {low}")
    if not high > 0:
        raise ValueError(f"ppo_clip: high: expected a range above 0, got {high}")
    if dual is not None and not dual > 1:
        raise ValueError(f"ppo_clip: dual: expected a bound above 1, or None for no bound, got {dual}")

    def surrogate(ratio: Array, advantages: Array) -> Array:
        clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
        value = jnp.minimum(ratio * advantages, clipped * advantages)
        if dual is None:
            return value
        return jnp.where(advantages < 0, jnp.maximum(value, dual * advantages), value)

    return surrogate
