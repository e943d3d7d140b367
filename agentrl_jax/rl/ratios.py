"""Probability ratios between the current and the old policy, per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

_LOG_LIMIT = 20.0  # exp(20) is far outside every clip range, and far inside f32


def token(logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
    """`r_t = pi(a_t) / pi_old(a_t)` for every action token on its own; 0 off actions.

    The log-ratio is limited to [-20, 20]. All arguments are [B, T]; returns f32[B, T].

    Schulman et al. 2017, PPO (https://arxiv.org/abs/1707.06347).
    """
    del trajectory_ids
    return _exp(_log_ratio(logprobs, old_logprobs, action_mask), action_mask)


def sequence(logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
    """One ratio per trajectory, on each of its action tokens; 0 off actions.

    `s = exp(mean_t log(pi(a_t) / pi_old(a_t)))`, the geometric mean over the trajectory's action tokens;
    the gradient flows through all of them. A trajectory lies in one row, as the packer promises, so
    rows are pooled apart from each other and micro-batches change nothing.

    All arguments are [B, T]; returns f32[B, T]. Use with weights that count trajectories
    (`sequence_mean`); clip ranges are about a thousand times narrower than a token ratio's.

    Zheng et al. 2025, GSPO (https://arxiv.org/abs/2507.18071).
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, action_mask)
    pooled = jax.vmap(_mean_by_trajectory)(log_ratio, action_mask, trajectory_ids)
    return _exp(pooled, action_mask)


def on_policy(logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
    """Exactly 1, with the gradient of the log-probability: `r_t = pi / stop_gradient(pi)`; 0 off actions.

    With `surrogates.linear` this is REINFORCE. The old policy is ignored: right only where the batch
    was sampled by the params being updated. All arguments are [B, T]; returns f32[B, T].

    Williams 1992.
    """
    del old_logprobs, trajectory_ids
    return _exp(_log_ratio(logprobs, lax.stop_gradient(logprobs), action_mask), action_mask)


def _log_ratio(logprobs: Array, old_logprobs: Array, action_mask: Array) -> Array:
    # Masked before the exponential: garbage off actions must not reach the gradient.
    return jnp.where(action_mask, logprobs - old_logprobs, 0.0)


def _exp(log_ratio: Array, action_mask: Array) -> Array:
    return jnp.where(action_mask, jnp.exp(jnp.clip(log_ratio, -_LOG_LIMIT, _LOG_LIMIT)), 0.0)


def _mean_by_trajectory(values: Array, mask: Array, ids: Array) -> Array:
    """Mean of `values` over the masked tokens that share an id, at every token: one row, f32[T]."""
    order = jnp.argsort(ids)
    changes = jnp.diff(ids[order], prepend=ids[order][:1]) != 0
    segments = jnp.zeros_like(ids).at[order].set(jnp.cumsum(changes.astype(ids.dtype)))
    totals = jax.ops.segment_sum(values, segments, ids.shape[0])
    counts = jax.ops.segment_sum(mask.astype(values.dtype), segments, ids.shape[0])
    return (totals / jnp.maximum(counts, 1.0))[segments]
