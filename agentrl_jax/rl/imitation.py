"""Imitation: masked cross-entropy on what a teacher, or the policy at its best, wrote."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl.types import Metrics


def imitation_loss(logprobs: Array, entropy: Array | None, batch: TokenBatch) -> tuple[Array, Metrics]:
    """`-sum(weights * logprobs)`: with `token_mean` weights the mean cross-entropy over action tokens.

    Observation tokens are read and never learned from. Advantages are not used.

    Args:
      logprobs: f32[B, T] under the params being trained, 0 off actions.
      entropy: f32[B, T] to report, or None.
      batch: with `weights` assigned over the whole step.

    Returns:
      The loss f32[], and metrics `mean_logprob` (and `entropy`) summed over action tokens with a weight.

    Zeng et al. 2023, AgentTuning (https://arxiv.org/abs/2310.12823).
    """
    counted = batch.action_mask & (batch.weights > 0)
    count = jnp.sum(counted.astype(jnp.float32))

    def total(value: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(counted, lax.stop_gradient(value), 0.0)), count

    sums = {"mean_logprob": total(logprobs)}
    if entropy is not None:
        sums["entropy"] = total(entropy)
    return -jnp.sum(batch.weights * jnp.where(batch.action_mask, logprobs, 0.0)), Metrics(sums, {})
