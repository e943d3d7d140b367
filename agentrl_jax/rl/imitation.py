"""Imitation: masked cross-entropy on what a teacher, or the policy at its best, wrote."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl.types import Metrics
from agentrl_jax.rl.weights import sequence_mean


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
    return -jnp.sum(batch.weights * jnp.where(counted, logprobs, 0.0)), Metrics(sums, {})


def mixture_weights(
    action_mask: Array,
    trajectory_ids: Array,
    data_sets: Array,
    *,
    shares: Sequence[float],
    num_trajectories: int,
    axis_name: str | None = None,
) -> Array:
    """Loss weights that mix data sets by samples: each set's share of the loss is given, however long its samples are.

    `w = shares[d] / (samples of set d * action tokens of this sample)`: the loss is the sum over sets of share times
    the mean over samples of their mean cross-entropy, with shares (eta, 1 - eta) AgentTuning's
    `eta * E_agent + (1 - eta) * E_general`. A mean over tokens would let long agent trajectories crowd out the rest.
    A set without a sample in the step leaves its share unused; the others' stay what they are.

    Args:
      action_mask: bool[B, T].
      trajectory_ids: i32[B, T] 0..N-1, one sample each; N where shared or padding.
      data_sets: i32[N] which set each sample is from, an index into `shares`.
      shares: fraction of the loss of each set; they add up to 1.
      num_trajectories: N.
      axis_name: mapped axis over which the rows are spread; `data_sets` is that of the whole step.

    Returns:
      f32[B, T], 0 off actions.

    Raises:
      ValueError: shares are negative or do not add up to 1, or `data_sets` is not [N].

    Zeng et al. 2023, AgentTuning (https://arxiv.org/abs/2310.12823); its eta is 0.2.
    """
    if min(shares, default=-1.0) < 0 or abs(sum(shares) - 1.0) > 1e-6:
        raise ValueError(f"mixture_weights: shares: expected numbers of 0 or more that add up to 1, got {shares}")
    if data_sets.shape != (num_trajectories,):
        raise ValueError(f"mixture_weights: data_sets: expected [N] = ({num_trajectories},), got {data_sets.shape}")
    weights = jnp.zeros(action_mask.shape, jnp.float32)
    for index, share in enumerate(shares):
        samples = partial(sequence_mean, num_trajectories=num_trajectories, keep=data_sets == index)
        weights += share * samples(action_mask, trajectory_ids, trajectory_ids, axis_name=axis_name)
    return weights
