"""An objective is a choice on each axis; `assign` computes credit and weights, `policy_loss` is one weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl.types import Advantage, Correction, Kl, Metrics, Ratio, Surrogate, Weights


@dataclass(frozen=True)
class Objective:
    """`loss = sum(weights * (-surrogate(ratio, advantages) + beta * kl - entropy_coef * entropy))`.

    Raises `ValueError` for a term without its coefficient, or a coefficient without its term.
    """

    advantage: Advantage
    ratio: Ratio
    surrogate: Surrogate
    weights: Weights
    kl: Kl | None = None
    beta: float = 0.0
    entropy_coef: float = 0.0
    correction: Correction | None = None

    def __post_init__(self) -> None:
        if self.kl is None and self.beta != 0:
            raise ValueError(f"Objective: beta={self.beta} without a KL estimator: set kl (rl.kl.k3) or beta=0")
        if self.kl is not None and self.beta == 0:
            raise ValueError("Objective: kl is set but beta=0, so it has no effect: set beta, or kl=None")


def assign(objective: Objective, batch: TokenBatch, rewards: Array, valid: Array, keep: Array) -> TokenBatch:
    """Fill in advantages and weights: who deserves what, and how much each token counts.

    `advantages[b, t] = A[trajectory_ids[b, t]]` with A from `objective.advantage`, group by group, times the
    correction where one is set; 0 off actions. Trajectory p * G + g is member g of group p.

    Args:
      objective: names the advantage, the weights and the correction.
      batch: every row of the step, [B, T].
      rewards: f32[P, G]; not read where invalid.
      valid: bool[P, G] counts in its group's baseline.
      keep: bool[P, G] is trained on. An invalid trajectory is never kept.

    Returns:
      The batch with `advantages` and `weights`.

    Raises:
      ValueError: shapes disagree, or the correction lacks `old_logprobs`.
    """
    if rewards.ndim != 2 or not rewards.shape == valid.shape == keep.shape:
        shapes = f"{rewards.shape}, {valid.shape}, {keep.shape}"
        raise ValueError(f"assign: expected rewards, valid and keep of one shape [P, G], got {shapes}")
    trajectories = rewards.size
    action_mask, ids = jnp.asarray(batch.action_mask), jnp.asarray(batch.trajectory_ids)
    per_group = jax.vmap(objective.advantage)(jnp.asarray(rewards), jnp.asarray(valid))
    per_trajectory = jnp.append(per_group.reshape(-1), jnp.float32(0.0))
    advantages = jnp.where(action_mask, per_trajectory[jnp.clip(ids, 0, trajectories)], 0.0)
    if objective.correction is not None:
        if batch.old_logprobs is None:
            raise ValueError(
                "assign: a correction needs old_logprobs, rescored by the learner: without them the ratio already "
                "runs from the behavior policy. Rescore the batch, or set correction=None"
            )
        behavior = jnp.asarray(batch.behavior_logprobs)
        advantages = advantages * objective.correction(jnp.asarray(batch.old_logprobs), behavior, action_mask, ids)
    kept = (jnp.asarray(keep) & jnp.asarray(valid)).reshape(-1)
    weights = objective.weights(action_mask, ids, jnp.asarray(batch.turn_ids), num_trajectories=trajectories, keep=kept)
    return batch._replace(advantages=advantages, weights=weights)


def policy_loss(
    objective: Objective, logprobs: Array, entropy: Array | None, batch: TokenBatch
) -> tuple[Array, Metrics]:
    """The loss of any rows of a step: a sum, so the losses of its micro-batches add up to the step's.

    `sum(weights * (-surrogate(ratio, advantages) + beta * kl - entropy_coef * entropy))`.

    Where `batch.old_logprobs` is None the behavior policy takes its place ("bypass"): right for a single
    update per batch, and one forward pass cheaper.

    Args:
      objective: the composition.
      logprobs: f32[B, T] under the params being trained, 0 off actions.
      entropy: f32[B, T], or None where `entropy_coef` is 0.
      batch: with `advantages` and `weights` assigned; `ref_logprobs` where there is a KL term.

    Returns:
      The loss f32[], and metrics over action tokens with a weight: sums `mean_logprob`, `clip_fraction` (the share of
      tokens whose surrogate ignores the ratio), `approx_kl` (k3 of behavior and current policy), `kl` and
      `entropy` where they are computed; the maximum `ratio_deviation_max` of |ratio - 1|.

    Raises:
      ValueError: the objective needs what `batch` or `entropy` does not hold.
    """
    _check(objective, entropy, batch)
    mask = batch.action_mask
    old = batch.behavior_logprobs if batch.old_logprobs is None else batch.old_logprobs
    ratio = objective.ratio(logprobs, old, mask, batch.trajectory_ids)
    per_token = -objective.surrogate(ratio, batch.advantages)
    kl = None
    if objective.kl is not None:
        kl = jnp.where(mask, objective.kl(logprobs, batch.ref_logprobs), 0.0)
        per_token = per_token + objective.beta * kl
    if entropy is not None:
        per_token = per_token - objective.entropy_coef * entropy
    loss = jnp.sum(batch.weights * jnp.where(mask, per_token, 0.0))
    return loss, _measure(objective, lax.stop_gradient((logprobs, ratio, entropy, kl)), batch)


def _measure(
    objective: Objective, values: tuple[Array, Array, Array | None, Array | None], batch: TokenBatch
) -> Metrics:
    logprobs, ratio, entropy, kl = values
    counted = batch.action_mask & (batch.weights > 0)
    count = jnp.sum(counted.astype(jnp.float32))

    def total(value: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(counted, value, 0.0)), count

    _, slope = jax.jvp(lambda r: objective.surrogate(r, batch.advantages), (ratio,), (jnp.ones_like(ratio),))
    clipped = (slope == 0) & (batch.advantages != 0)
    drift = jnp.clip(jnp.where(counted, logprobs - batch.behavior_logprobs, 0.0), -20.0, 20.0)
    sums = {
        "mean_logprob": total(logprobs),
        "clip_fraction": total(clipped.astype(jnp.float32)),
        "approx_kl": total(jnp.exp(drift) - drift - 1.0),
    }
    if entropy is not None:
        sums["entropy"] = total(entropy)
    if kl is not None:
        sums["kl"] = total(kl)
    return Metrics(sums, {"ratio_deviation_max": jnp.max(jnp.where(counted, jnp.abs(ratio - 1.0), 0.0))})


def _check(objective: Objective, entropy: Array | None, batch: TokenBatch) -> None:
    if objective.entropy_coef != 0 and entropy is None:
        raise ValueError(f"policy_loss: entropy_coef={objective.entropy_coef} needs entropies: needs_entropy=True")
    if objective.kl is not None and batch.ref_logprobs is None:
        raise ValueError(f"policy_loss: beta={objective.beta} needs ref_logprobs: score the batch under the reference")
