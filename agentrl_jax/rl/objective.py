"""An objective is a choice on each axis; `assign` computes credit and weights, `policy_loss` is one weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl.kl import off_policy
from agentrl_jax.rl.types import Advantage, Correction, Kl, Metrics, Ratio, Surrogate, Weights, Whitening


@dataclass(frozen=True)
class Objective:
    """`loss = sum(weights * (-surrogate(ratio, advantages) + beta * kl - entropy_coef * entropy))`.

    `whiten` normalises the advantages of the whole step, tokens of all groups together. `kl_ratio` weighs the KL
    term with a ratio of its own (see `rl.kl.off_policy`).

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
    whiten: Whitening | None = None
    kl_ratio: Ratio | None = None

    def __post_init__(self) -> None:
        if self.kl is None and self.beta != 0:
            raise ValueError(f"Objective: beta={self.beta} without a KL estimator: set kl (rl.kl.k3) or beta=0")
        if self.kl is not None and self.beta == 0:
            raise ValueError("Objective: kl is set but beta=0, so it has no effect: set beta, or kl=None")
        if self.kl_ratio is not None and self.kl is None:
            raise ValueError("Objective: kl_ratio is set without a KL estimator, so it has no effect: set kl and beta")


def outcome(rewards: Array, valid: Array) -> Array:
    """`A_i = R_i`: the reward itself, without a baseline; 0 where not valid. f32[G], bool[G] -> f32[G]."""
    return jnp.where(valid, rewards.astype(jnp.float32), 0.0)


def credit_only(rewards: Array, valid: Array) -> Array:
    """`A_i = 0`: trajectories as wholes earn nothing; `assign` is given `credit` per token, from a critic say."""
    del valid
    return jnp.zeros(rewards.shape, jnp.float32)


def check_bounded(objective: Objective, lag: int) -> None:
    """Refuses an objective whose loss has no bound on stale samples of actions that turned out bad.

    At `A < 0` the PPO surrogate `min(r A, clip(r) A)` is `r A` however large r grows, and on a stale sample r may be
    anything: one token then outweighs the batch. A dual clip bounds it, and a correction keeps such samples small.

    Args:
      objective: the composition that will train.
      lag: the largest lag, in optimiser steps, at which samples are admitted; 0 is on-policy and always passes.

    Raises:
      ValueError: `lag` is above 0 and nothing bounds the loss; it says what to set.

    Ye et al. 2020, dual-clip PPO (https://arxiv.org/abs/1912.09729).
    """
    if lag <= 0 or objective.correction is not None:
        return
    near, far = (-objective.surrogate(jnp.float32(r), jnp.float32(-1.0)) for r in (1e3, 1e6))
    if far > near:
        raise ValueError(
            f"objective: at lag {lag} its loss has no bound where a bad action has become likely: set "
            "surrogate=ppo_clip(dual=3.0), or a correction (rl.corrections.truncated), or lag 0"
        )


def assign(
    objective: Objective,
    batch: TokenBatch,
    rewards: Array,
    valid: Array,
    keep: Array,
    *,
    credit: Array | None = None,
    axis_name: str | None = None,
) -> TokenBatch:
    """Fill in advantages and weights: who deserves what, and how much each token counts.

    `advantages[b, t] = A[trajectory_ids[b, t]] + credit[b, t]` with A from `objective.advantage`, group by group;
    whitened over the kept tokens of the step, then times the correction, where those are set; 0 off actions and where
    not kept. Trajectory p * G + g is member g of group p.

    Args:
      objective: names the advantage, the whitening, the weights and the correction.
      batch: every row of the step, [B, T]; under a mapped axis, every row of this device.
      rewards: f32[P, G]; not read where invalid.
      valid: bool[P, G] counts in its group's baseline.
      keep: bool[P, G] is trained on. An invalid trajectory is never kept.
      credit: f32[B, T] per token, from a critic, turns or a tree; not read off actions or where invalid.
      axis_name: mapped axis over which the rows are spread. `rewards`, `valid` and `keep` are those of the whole
        step on every device; statistics and denominators become those of all devices.

    Returns:
      The batch with `advantages` and `weights`.

    Raises:
      ValueError: shapes disagree, the correction lacks `old_logprobs`, or an objective without an advantage for
        whole trajectories (PPO) is given no credit.
    """
    _check_assign(objective, batch, rewards, valid, keep, credit)
    rewards, valid = jnp.asarray(rewards), jnp.asarray(valid)
    action_mask, ids = jnp.asarray(batch.action_mask), jnp.asarray(batch.trajectory_ids)
    kept = jnp.asarray(keep) & valid

    def spread(values: Array) -> Array:
        """[P, G] -> [B, T], 0 for shared tokens and padding."""
        return jnp.append(values.reshape(-1), jnp.zeros((), values.dtype))[jnp.clip(ids, 0, rewards.size)]

    advantages = jnp.where(action_mask, spread(jax.vmap(objective.advantage)(rewards, valid)), 0.0)
    if credit is not None:
        advantages = advantages + jnp.where(action_mask & spread(valid), jnp.asarray(credit), 0.0)
    if objective.whiten is not None:
        advantages = objective.whiten(advantages, action_mask & spread(kept), axis_name=axis_name)
    if objective.correction is not None:
        old, behavior = jnp.asarray(batch.old_logprobs), jnp.asarray(batch.behavior_logprobs)
        advantages = advantages * objective.correction(old, behavior, action_mask, ids)
    advantages = jnp.where(
        action_mask & spread(kept), advantages, 0.0
    )  # nothing of an excluded trajectory, NaN neither
    counted = {"num_trajectories": rewards.size, "keep": kept.reshape(-1), "axis_name": axis_name}
    weights = objective.weights(action_mask, ids, jnp.asarray(batch.turn_ids), **counted)
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
    # What has no weight is not read: garbage off actions or in an excluded trajectory must not reach the gradient.
    mask = batch.action_mask & (batch.weights > 0)
    old = batch.behavior_logprobs if batch.old_logprobs is None else batch.old_logprobs
    ratio = objective.ratio(logprobs, old, mask, batch.trajectory_ids)
    per_token = -objective.surrogate(ratio, batch.advantages)
    kl = None
    if objective.kl is not None:
        kl = objective.kl(jnp.where(mask, logprobs, 0.0), jnp.where(mask, batch.ref_logprobs, 0.0))
        if objective.kl_ratio is not None:
            kl = off_policy(kl, objective.kl_ratio(logprobs, old, mask, batch.trajectory_ids))
        per_token = per_token + objective.beta * kl
    if entropy is not None:
        per_token = per_token - objective.entropy_coef * entropy
    loss = jnp.sum(batch.weights * jnp.where(mask, per_token, 0.0))
    return loss, _measure(objective, lax.stop_gradient((logprobs, ratio, entropy, kl)), mask, batch)


def _measure(
    objective: Objective, values: tuple[Array, Array, Array | None, Array | None], counted: Array, batch: TokenBatch
) -> Metrics:
    logprobs, ratio, entropy, kl = values
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


def _check_assign(
    objective: Objective, batch: TokenBatch, rewards: Array, valid: Array, keep: Array, credit: Array | None
) -> None:
    if rewards.ndim != 2 or not rewards.shape == valid.shape == keep.shape:
        shapes = f"{rewards.shape}, {valid.shape}, {keep.shape}"
        raise ValueError(f"assign: expected rewards, valid and keep of one shape [P, G], got {shapes}")
    if credit is None and objective.advantage is credit_only:
        raise ValueError("assign: credit: this objective gives whole trajectories no advantage: pass one per token")
    if credit is not None and credit.shape != batch.action_mask.shape:
        raise ValueError(f"assign: credit: expected {batch.action_mask.shape}, as the batch, got {credit.shape}")
    if objective.correction is not None and batch.old_logprobs is None:
        raise ValueError(
            "assign: a correction needs old_logprobs, rescored by the learner: without them the ratio already "
            "runs from the behavior policy. Rescore the batch, or set correction=None"
        )


def _check(objective: Objective, entropy: Array | None, batch: TokenBatch) -> None:
    if objective.entropy_coef != 0 and entropy is None:
        raise ValueError(f"policy_loss: entropy_coef={objective.entropy_coef} needs entropies: needs_entropy=True")
    if objective.kl is not None and batch.ref_logprobs is None:
        raise ValueError(f"policy_loss: beta={objective.beta} needs ref_logprobs: score the batch under the reference")
