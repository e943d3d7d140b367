"""What a critic is trained on, and what it says of an action."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl.types import Metrics


def clipped_value_loss(values: Array, batch: TokenBatch, *, clip: float | None = 0.2) -> tuple[Array, Metrics]:
    """Squared error of the critic, pessimistic about steps far from its old prediction; a sum over tokens.

    `sum(weights * 0.5 * max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2))`. Its weights are those
    of the policy loss, so micro-batches, packing and devices add up.

    Args:
      values: f32[B, T] under the params being trained; not read off actions.
      batch: with `weights` assigned, `values` (the old predictions) and `returns`.
      clip: range around the old prediction, above 0; None for the plain squared error.

    Returns:
      The loss f32[], and metrics over action tokens with a weight: sums `value_error`, the squared error
      without clipping, and `value_clip_fraction`, the share of tokens whose loss ignores the value.

    Raises:
      ValueError: `clip` is not above 0, shapes disagree, or the batch lacks `values` or `returns`.

    Schulman et al. 2017, PPO (https://arxiv.org/abs/1707.06347), as in its released code.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clipped_value_loss: clip: expected a range above 0, or None for none, got {clip}")
    if batch.values is None or batch.returns is None:
        raise ValueError("clipped_value_loss: batch: needs values and returns: estimate them first (credit.gae)")
    mask = jnp.asarray(batch.action_mask)
    if values.shape != mask.shape:
        raise ValueError(f"clipped_value_loss: values: expected [B, T] = {mask.shape}, got {values.shape}")
    # Masked before the square: garbage off actions or in an excluded trajectory must not reach the gradient.
    counted = mask & (batch.weights > 0)
    new, old, returns = (jnp.where(counted, x, 0.0) for x in (values, batch.values, batch.returns))
    error = jnp.square(new - returns)
    worst = error
    if clip is not None:
        worst = jnp.maximum(error, jnp.square(jnp.clip(new, old - clip, old + clip) - returns))
    loss = jnp.sum(0.5 * batch.weights * worst)
    count = jnp.sum(counted.astype(jnp.float32))
    clipped = (worst > error).astype(jnp.float32)
    figures = {"value_error": error, "value_clip_fraction": clipped}
    sums = {name: (jnp.sum(jnp.where(counted, lax.stop_gradient(x), 0.0)), count) for name, x in figures.items()}
    return loss, Metrics(sums, {})


def archer_q_target(rewards: Array, next_values: Array, terminated: Array, *, gamma: float = 0.9) -> Array:
    """`y = r + gamma * V_target(o')`, and `y = r` where the episode terminated: one target a turn for both Q heads.

    V_target is the slow copy (Polyak, rate 0.1). A truncated episode is not terminated and keeps its V.
    V's own target is Q_target at actions *sampled anew* from the policy, not those of the buffer; each of
    the twin heads regresses to its own.

    Args:
      rewards: f32, any shape.
      next_values: f32 of that shape; not read where terminated.
      terminated: bool of that shape.
      gamma: discount per turn, in [0, 1].

    Returns:
      f32 of that shape, detached.

    Raises:
      ValueError: shapes disagree, `terminated` is not bool, or `gamma` is outside [0, 1].

    Zhou et al. 2024, ArCHer (https://arxiv.org/abs/2402.19446).
    """
    if not rewards.shape == next_values.shape == terminated.shape:
        shapes = f"{rewards.shape}, {next_values.shape}, {terminated.shape}"
        raise ValueError(f"archer_q_target: expected rewards, next_values and terminated of one shape, got {shapes}")
    if terminated.dtype != jnp.bool_:
        raise ValueError(f"archer_q_target: terminated: expected bool, got {terminated.dtype}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"archer_q_target: gamma: expected a number in [0, 1], got {gamma}")
    ahead = jnp.where(terminated, 0.0, jnp.asarray(next_values, jnp.float32))
    return lax.stop_gradient(jnp.asarray(rewards, jnp.float32) + gamma * ahead)


def archer_advantage(q_values: Array, values: Array) -> Array:
    """`min(Q_1, Q_2) - min(V_1, V_2)`: the advantage of a whole turn, for each of its tokens.

    Args:
      q_values: f32[2, ...] of the twin heads.
      values: f32[2, ...] of the twin heads.

    Returns:
      f32[...], detached.

    Raises:
      ValueError: shapes disagree, or the first axis is not 2.

    Zhou et al. 2024, ArCHer (https://arxiv.org/abs/2402.19446).
    """
    if q_values.shape != values.shape or q_values.ndim < 1 or q_values.shape[0] != 2:
        raise ValueError(f"archer_advantage: expected twin heads [2, ...], got {q_values.shape} and {values.shape}")
    twins = (jnp.asarray(q_values, jnp.float32), jnp.asarray(values, jnp.float32))
    return lax.stop_gradient(jnp.min(twins[0], axis=0) - jnp.min(twins[1], axis=0))
