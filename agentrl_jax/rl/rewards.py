"""From verdicts to rewards."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def lexicographic(
    violated: Array, outcome: Array, quality: Array, *, quality_scale: float = 0.05, broken: float = 0.0
) -> Array:
    """Constraints first, then the outcome, then quality: no amount of the later makes up for the earlier.

    `R = broken` where a constraint is violated; `outcome` where the task failed (outcome < 1);
    `outcome + quality_scale * quality` where it was solved. Elementwise over one shape.

    Args:
      violated: bool, a constraint was broken.
      outcome: f32 in [0, 1]; solved from 1.
      quality: f32 in [0, 1], ranks successes among themselves.
      quality_scale: what the best quality adds; small beside 1.
      broken: reward of a violation; at most 0, or breaking a rule would pay better than failing.

    Returns:
      f32 rewards of that shape.

    Raises:
      ValueError: `quality_scale` is negative, or `broken` is above 0.
    """
    if quality_scale < 0:
        raise ValueError(f"lexicographic: quality_scale: expected 0 or more, got {quality_scale}")
    if broken > 0:
        raise ValueError(f"lexicographic: broken: expected 0 or less, got {broken}")
    scored = outcome + jnp.where(outcome >= 1.0, quality_scale * quality, 0.0)
    return jnp.where(violated, broken, scored).astype(jnp.float32)
