"""Surrogates: what is maximised, from ratio and advantage, elementwise.

Each is positively homogeneous in the advantage, so a detached correction c >= 0 multiplies
the advantages before the gradient step and no surrogate needs to know of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

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


def cispo(low: float = 1.0, high: float = 4.0) -> Surrogate:
    """The clipped ratio as a detached weight on the log-probability: a clipped token still learns.

    `w * A * r / stop_gradient(r)` with `w = stop_gradient(clip(r, 1 - low, 1 + high))`. Its gradient is the paper's,
    `w * A * d log pi`; its value is `w * A`, where the paper's `w * A * log pi` has a value of no meaning either.

    Args:
      low: clip range below 1; from 1 on, as in the paper, there is no lower bound.
      high: clip range above 1, so that the weight is at most `1 + high`. Some code bases name the cap itself:
        their 5.0 is 4.0 here, the default. The paper names no value, and trainers cap anywhere from 1.28 to 6.

    Raises:
      ValueError: a range that clips everything.

    MiniMax 2025, MiniMax-M1 (https://arxiv.org/abs/2506.13585).
    """
    if not low > 0:
        raise ValueError(f"cispo: low: expected a range above 0 (1 or more for no lower bound), got {low}")
    if not high > 0:
        raise ValueError(f"cispo: high: expected a range above 0 (the largest weight less 1), got {high}")

    def surrogate(ratio: Array, advantages: Array) -> Array:
        weight = lax.stop_gradient(jnp.clip(ratio, 1.0 - low, 1.0 + high))
        # Off actions the ratio is 0, and 0 / 0 would reach the gradient.
        own = lax.stop_gradient(jnp.where(ratio > 0, ratio, 1.0))
        return weight * advantages * (ratio / own)

    return surrogate


def sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> Surrogate:
    """A soft gate in place of the clip: `4 / tau * sigmoid(tau * (r - 1)) * A`.

    The slope in r is `4 s (1 - s) * A` with `s = sigmoid(tau * (r - 1))`: A at r = 1, less on either side, never 0.
    The value at r = 1 is `2 / tau * A`, so losses are offset and only gradients compare with PPO's.

    Args:
      tau_pos: temperature where A > 0; larger is a narrower gate.
      tau_neg: temperature elsewhere.

    Raises:
      ValueError: a temperature is not positive.

    Gao et al. 2025, SAPO (https://arxiv.org/abs/2511.20347).
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise ValueError(f"sapo: {name}: expected a temperature above 0, got {tau}")

    def surrogate(ratio: Array, advantages: Array) -> Array:
        tau = jnp.where(advantages > 0, jnp.float32(tau_pos), jnp.float32(tau_neg))
        return 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages

    return surrogate
