"""Losses on preferences: pairs of trajectories, single ones marked desirable or not, scores of a reward model.

Elementwise over pairs (or trajectories) of any one shape; the caller takes the mean. A trajectory's log-probability
is that of its *action tokens*: with observations in the sum the margin would be the environment's noise, not the
policy's. So `trajectory_logprobs` comes first, then for pairs `reference_margins`, then a loss of the margin.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.rl.ratios import check_shapes, check_tokens


def trajectory_logprobs(
    logprobs: Array, action_mask: Array, trajectory_ids: Array, *, num_trajectories: int
) -> tuple[Array, Array]:
    """Log-probability of each trajectory's actions, and how many there are: sums over its action tokens.

    `sums / counts` is the mean per token, for the losses that want it (SimPO, ORPO, length-normalised IPO).

    Args:
      logprobs: f32[B, T]; what stands off actions is never read.
      action_mask: bool[B, T].
      trajectory_ids: i32[B, T] 0..N-1; N where shared or padding.
      num_trajectories: N. Under a mapped axis these are the trajectories of one device, and so are the ids: the
        two of a pair lie on the same device, and the loss stays a sum over devices.

    Returns:
      f32[N] sums and f32[N] counts; 0 and 0 for a trajectory without an action token.

    Raises:
      ValueError: shapes differ, or `action_mask` is not bool.
    """
    check_tokens("trajectory_logprobs", action_mask, logprobs=logprobs, trajectory_ids=trajectory_ids)
    ids = jnp.where(action_mask, jnp.clip(trajectory_ids, 0, num_trajectories), num_trajectories).reshape(-1)
    parts = jnp.stack([jnp.where(action_mask, logprobs, 0.0), action_mask.astype(jnp.float32)], axis=-1)
    totals = jax.ops.segment_sum(parts.reshape(-1, 2), ids, num_trajectories + 1)[:-1]
    return totals[:, 0], totals[:, 1]


def reference_margins(chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array) -> Array:
    """How much more the policy has moved towards the chosen trajectory than towards the rejected one, in nats.

    `log(pi / ref)(chosen) - log(pi / ref)(rejected)`; the reference's are detached.

    Args:
      chosen: f32, log-probabilities of the better trajectories; sums for DPO, hinge and the IPO of the paper,
        means per token for a length-normalised IPO.
      rejected: f32 of the same shape, the worse ones.
      ref_chosen: f32 of the same shape, the better ones under the reference.
      ref_rejected: f32 of the same shape.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: shapes differ.

    Rafailov et al. 2023, DPO (https://arxiv.org/abs/2305.18290).
    """
    others = {"rejected": rejected, "ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
    check_shapes("reference_margins", "chosen", chosen, **others)
    return (chosen - lax.stop_gradient(ref_chosen)) - (rejected - lax.stop_gradient(ref_rejected))


def dpo(margins: Array, *, beta: float = 0.1) -> Array:
    """`-log sigmoid(beta * margin)`: the log-loss of preferring the chosen trajectory.

    With sums over action tokens this is ETO's trajectory DPO. Chosen log-probabilities may fall while the margin
    grows: report them.

    Args:
      margins: f32 from `reference_margins`, any shape.
      beta: strength of the implicit KL to the reference; ETO uses 0.1, then 0.5.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: `beta` is not a finite number above 0.

    Rafailov et al. 2023 (https://arxiv.org/abs/2305.18290); Song et al. 2024, ETO (https://arxiv.org/abs/2403.02502).
    """
    _check("dpo", beta)
    return -jax.nn.log_sigmoid(beta * margins)


def dpo_smoothed(margins: Array, *, beta: float = 0.1, flip: float = 0.1) -> Array:
    """Conservative DPO: `(1 - flip) * dpo(margin) + flip * dpo(-margin)`, the expected loss if labels flip that often.

    Margins, beta and errors as in `dpo`; `flip` in [0, 0.5), else ValueError.

    Mitchell 2023 (https://ericmitchell.ai/cdpo.pdf).
    """
    _check("dpo_smoothed", beta, flip)
    return (1.0 - flip) * dpo(margins, beta=beta) + flip * dpo(-margins, beta=beta)


def dpo_robust(margins: Array, *, beta: float = 0.1, flip: float = 0.1) -> Array:
    """Robust DPO: `((1 - flip) * dpo(margin) - flip * dpo(-margin)) / (1 - 2 * flip)`.

    Over labels that flip with that chance its expectation is the loss on the true ones. Margins, beta and
    errors as in `dpo`; `flip` in [0, 0.5), else ValueError.

    Chowdhury et al. 2024 (https://arxiv.org/abs/2403.00409).
    """
    _check("dpo_robust", beta, flip)
    return ((1.0 - flip) * dpo(margins, beta=beta) - flip * dpo(-margins, beta=beta)) / (1.0 - 2.0 * flip)


def ipo(margins: Array, *, beta: float = 0.1) -> Array:
    """`(margin - 1 / (2 * beta))^2`: a target for the margin, so certain labels do not drive it to infinity.

    Args:
      margins: f32 from `reference_margins`. Of sums the target is one of whole trajectories, so long ones
        overshoot it; of means per token it is the length-normalised form that most code bases use.
      beta: the target is 1 / (2 beta).

    Returns:
      f32 of that shape.

    Raises:
      ValueError: `beta` is not a finite number above 0.

    Azar et al. 2023 (https://arxiv.org/abs/2310.12036).
    """
    _check("ipo", beta)
    return jnp.square(margins - 1.0 / (2.0 * beta))


def hinge(margins: Array, *, beta: float = 0.1) -> Array:
    """`max(0, 1 - beta * margin)`: no more is asked of a pair once its margin reaches 1 / beta.

    Arguments, result and errors as in `dpo`. Zhao et al. 2023, SLiC-HF (https://arxiv.org/abs/2305.10425).
    """
    _check("hinge", beta)
    return jnp.maximum(0.0, 1.0 - beta * margins)


def simpo(chosen: Array, rejected: Array, *, beta: float = 2.5, gamma: float = 1.375) -> Array:
    """`-log sigmoid(beta * (chosen - rejected) - gamma)` of means per token: no reference, no pay for length.

    Args:
      chosen: f32, mean log-probability per action token of the better trajectories; any shape.
      rejected: f32 of that shape, of the worse ones.
      beta: scale of the means.
      gamma: margin that the scaled difference should exceed.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: shapes differ, or `beta` is not a finite number above 0, or `gamma` not a finite one.

    Meng et al. 2024 (https://arxiv.org/abs/2405.14734).
    """
    _check("simpo", beta)
    if not math.isfinite(gamma):
        raise ValueError(f"simpo: gamma: expected a finite number, got {gamma}")
    check_shapes("simpo", "chosen", chosen, rejected=rejected)
    return -jax.nn.log_sigmoid(beta * (chosen - rejected) - gamma)


def orpo(chosen: Array, rejected: Array) -> Array:
    """The odds-ratio term `-log sigmoid(log odds(chosen) - log odds(rejected))`.

    `odds = p / (1 - p)` of `p = exp(mean log-probability)`. The whole loss is the cross-entropy of the chosen
    trajectory plus 0.1 times this; no reference.

    Args:
      chosen: f32, mean log-probability per action token of the better trajectories; any shape.
      rejected: f32 of that shape, of the worse ones.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: shapes differ.

    Hong et al. 2024 (https://arxiv.org/abs/2403.07691).
    """
    check_shapes("orpo", "chosen", chosen, rejected=rejected)
    return -jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto_baseline(mismatched: Array, *, axis_name: str | None = None) -> Array:
    """The reference point of `kto`: `max(0, mean log(pi / ref))` over answers paired with others' prompts, detached.

    Args:
      mismatched: f32[M], `log pi - log ref` of trajectories under a context that is not their own.
      axis_name: mapped axis to take the mean over as well, M alike on each device.

    Returns:
      f32[], an estimate of KL(pi || ref).

    Raises:
      ValueError: `mismatched` is not [M], or M is 0.

    Ethayarajh et al. 2024 (https://arxiv.org/abs/2402.01306).
    """
    if mismatched.ndim != 1 or mismatched.size == 0:
        raise ValueError(f"kto_baseline: mismatched: expected f32[M] with M > 0, got {list(mismatched.shape)}")
    mean = jnp.mean(mismatched)
    return lax.stop_gradient(jnp.maximum(mean if axis_name is None else lax.pmean(mean, axis_name), 0.0))


def kto(
    log_ratios: Array,
    desirable: Array,
    baseline: Array,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Array:
    """Gains and losses against a reference point, from single trajectories: no pairs needed.

    `weight_D * (1 - sigmoid(beta * (log_ratio - z)))` where desirable, else
    `weight_U * (1 - sigmoid(beta * (z - log_ratio)))`.

    Args:
      log_ratios: f32, `log pi - log ref` summed over each trajectory's action tokens; any shape.
      desirable: bool of that shape.
      baseline: f32[] z, from `kto_baseline`; detached.
      beta: strength of the implicit KL.
      desirable_weight: the paper asks for `n_D * weight_D / (n_U * weight_U)` in [1, 4/3].
      undesirable_weight: likewise.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: `desirable` is not bool of that shape, `baseline` is not one number, or `beta` is not a finite number
        above 0.

    Ethayarajh et al. 2024 (https://arxiv.org/abs/2402.01306).
    """
    _check("kto", beta)
    check_shapes("kto", "log_ratios", log_ratios, desirable=desirable)
    if desirable.dtype != jnp.bool_:
        raise ValueError(f"kto: desirable: expected bool, got {desirable.dtype}: compare the labels with 0")
    if jnp.ndim(baseline) != 0:
        raise ValueError(f"kto: baseline: expected one number, got {list(jnp.shape(baseline))}: see kto_baseline")
    gain = jnp.where(desirable, 1.0, -1.0) * (log_ratios - lax.stop_gradient(baseline))
    weight = jnp.where(desirable, jnp.float32(desirable_weight), jnp.float32(undesirable_weight))
    return weight * jax.nn.sigmoid(-beta * gain)


def bradley_terry(chosen: Array, rejected: Array, *, margin: Array | float = 0.0, centring: float = 0.0) -> Array:
    """Reward model: `-log sigmoid(chosen - rejected - margin) + centring * (chosen + rejected)^2`.

    Scores mean something only up to a constant for each prompt; `centring` fixes it near 0.

    Args:
      chosen: f32 scores of the better trajectories; any shape.
      rejected: f32 of that shape, of the worse ones.
      margin: by how much the scores should differ, one number or f32 of that shape; larger for clearer preferences.
      centring: weight of the pull towards 0; 0.01 is usual.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: shapes differ, or `centring` is not a finite number of 0 or more.

    Touvron et al. 2023, Llama 2 (https://arxiv.org/abs/2307.09288); centring: Eisenstein et al. 2023
    (https://arxiv.org/abs/2312.09244).
    """
    if not 0 <= centring < math.inf:
        raise ValueError(f"bradley_terry: centring: expected a finite number of 0 or more, got {centring}")
    check_shapes("bradley_terry", "chosen", chosen, rejected=rejected)
    if jnp.ndim(margin) != 0:
        check_shapes("bradley_terry", "chosen", chosen, margin=jnp.asarray(margin))
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + centring * jnp.square(chosen + rejected)


def bce(logits: Array, targets: Array) -> Array:
    """Cross-entropy with soft labels, for process reward models: `-(q * log p + (1 - q) * log(1 - p))`, p = sigmoid.

    Its minimum over p is at p = q: a Monte-Carlo success rate is a label as it stands, without rounding to 0 or 1.

    Args:
      logits: f32, any shape.
      targets: f32 in [0, 1] of that shape.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: shapes differ.

    Setlur et al. 2024, PAV (https://arxiv.org/abs/2410.08146); Choudhury 2025, AgentPRM
    (https://arxiv.org/abs/2502.10325).
    """
    check_shapes("bce", "logits", logits, targets=targets)
    return jax.nn.softplus(logits) - targets * logits


def _log_odds(mean: Array) -> Array:
    # A mean of 0 is a probability of 1, whose odds are infinite.
    mean = jnp.minimum(mean, -1e-6)
    return mean - jnp.log(-jnp.expm1(mean))


def _check(name: str, beta: float, flip: float = 0.0) -> None:
    if not 0 < beta < math.inf:
        raise ValueError(f"{name}: beta: expected a finite number above 0, got {beta}")
    if not 0 <= flip < 0.5:
        raise ValueError(f"{name}: flip: expected a chance in [0, 0.5), got {flip}")
