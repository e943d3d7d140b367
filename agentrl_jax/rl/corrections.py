"""Corrections for a sampler that is not quite the old policy: detached factors on the advantages.

`rho_t = pi_old(a_t) / mu(a_t)`, from the behavior policy to the old one, rescored with the learner's params. Where no
`old_logprobs` are rescored the ratio of the loss starts at the behavior policy itself and already corrects; both
together would count the mismatch twice. A factor of 0 rejects a token or a trajectory: it leaves the numerator only.
The weights keep the step's original counts, since dividing by what is left would inflate the gradient by their ratio.

Factors of whole trajectories can be exactly 1 while single tokens are far off: `product` pairs them with one that
looks at tokens, and `mismatch` reports both kinds before anything is clipped. Every correction raises ValueError where
the shapes of its arrays differ or `action_mask` is not bool; those of whole trajectories, where they are not [B, T].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.rl.ratios import check_shapes, check_tokens, pooled
from agentrl_jax.rl.types import Correction, Metrics

_LOG_LIMIT = 20.0


def truncated(cap: float = 2.0) -> Correction:
    """Truncated importance sampling, per token: `c_t = min(rho_t, cap)`; 1 off actions.

    Args:
      cap: largest factor; 2 to 5 is usual.

    Returns:
      A correction on [B, T] arrays.

    Raises:
      ValueError: `cap` is not a finite number above 0.

    Ionides 2008; Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl).
    """
    _check_cap("truncated", cap)
    return _correction("truncated", lambda log_ratio, *_: jnp.minimum(_exp(log_ratio), cap))


def masked(low: float = 0.5, high: float = 2.0) -> Correction:
    """Masked importance sampling, per token: `c_t = rho_t` inside [low, high], 0 outside; 1 off actions.

    Args:
      low: smallest ratio that is kept; 0 for no lower bound.
      high: largest.

    Returns:
      A correction on [B, T] arrays.

    Raises:
      ValueError: a ratio of 1 does not lie between the bounds, or a bound is NaN.

    No paper: the masked form of `truncated`, as released trainers have it; the bounds are theirs.
    """
    _check_bounds("masked", low, high)
    return _correction("masked", lambda log_ratio, *_: _inside(_exp(log_ratio), low, high) * _exp(log_ratio))


def sequence(cap: float = 2.0) -> Correction:
    """Truncated importance sampling of whole trajectories: `c = min(prod_t rho_t, cap)` at each action token.

    Unbiased below the cap, but its variance grows exponentially with the length: a ratio of 1.1 a token is a
    product of 14 000 after 100.

    Args:
      cap: largest factor.

    Returns:
      A correction on [B, T] arrays.

    Raises:
      ValueError: `cap` is not a finite number above 0.

    No paper of its own: `truncated` (Ionides 2008), with the trajectory as what is sampled.
    """
    _check_cap("sequence", cap)
    return _correction("sequence", lambda log_ratio, _, ids: jnp.minimum(_exp(pooled(log_ratio, ids)), cap), rows=True)


def sequence_masked(low: float = 0.5, high: float = 2.0) -> Correction:
    """Masked importance sampling of whole trajectories: `c = prod_t rho_t` inside [low, high], 0 outside.

    Arguments, result, errors and source as in `masked`.
    """
    _check_bounds("sequence_masked", low, high)

    def factors(log_ratio: Array, action_mask: Array, trajectory_ids: Array) -> Array:
        del action_mask
        ratio = _exp(pooled(log_ratio, trajectory_ids))
        return _inside(ratio, low, high) * ratio

    return _correction("sequence_masked", factors, rows=True)


def geometric(low: float = 0.999, high: float = 1.001) -> Correction:
    """Rejection of whole trajectories by their mean: `c = 1` where `exp(mean_t log rho_t)` is in [low, high], else 0.

    What is kept is not weighed. The mean does not grow with the length, so the bounds are narrow. Arguments,
    result and errors as in `masked`.

    No paper: as released trainers have it. The mean is that of `ratios.sequence` (GSPO), of old and behavior policy.
    """
    _check_bounds("geometric", low, high)

    def factors(log_ratio: Array, action_mask: Array, trajectory_ids: Array) -> Array:
        return _inside(_exp(pooled(log_ratio, trajectory_ids) / _lengths(action_mask, trajectory_ids)), low, high)

    return _correction("geometric", factors, rows=True)


def veto(threshold: float = 1e-4) -> Correction:
    """Rejection of a whole trajectory for one token: `c = 0` where any `rho_t < threshold`, else 1.

    Args:
      threshold: a ratio this small says that the learner would hardly ever have sampled the token.

    Returns:
      A correction on [B, T] arrays.

    Raises:
      ValueError: `threshold` is not in (0, 1).

    No paper: as released trainers have it, and so is the threshold.
    """
    if not 0 < threshold < 1:
        raise ValueError(f"veto: threshold: expected a ratio in (0, 1), got {threshold}")

    def factors(log_ratio: Array, action_mask: Array, trajectory_ids: Array) -> Array:
        del action_mask
        hopeless = (log_ratio < math.log(threshold)).astype(jnp.float32)
        return (pooled(hopeless, trajectory_ids) == 0).astype(jnp.float32)

    return _correction("veto", factors, rows=True)


def product(*corrections: Correction) -> Correction:
    """All of several corrections at once: their factors multiplied, so that each may reject.

    `product(truncated(2.0), geometric(), veto())` weighs tokens and filters trajectories; errors are those of each.
    No paper: a definition of this library.
    """

    def correction(old_logprobs: Array, behavior_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
        factors = jnp.ones(action_mask.shape, jnp.float32)
        for each in corrections:
            factors = factors * each(old_logprobs, behavior_logprobs, action_mask, trajectory_ids)
        return factors

    return correction


def mismatch(
    old_logprobs: Array,
    behavior_logprobs: Array,
    action_mask: Array,
    trajectory_ids: Array,
    *,
    correction: Correction | None = None,
) -> Metrics:
    """How far the sampler is from the learner's old policy, before any correction clips it, and what one would do.

    Args:
      old_logprobs: f32[B, T] rescored by the learner.
      behavior_logprobs: f32[B, T] from the sampler.
      action_mask: bool[B, T].
      trajectory_ids: i32[B, T].
      correction: what is applied, to report its mean factor and the share of tokens it rejects.

    Returns:
      Metrics. Sums over action tokens: `mismatch_ratio` (rho, 1 in expectation), `mismatch_kl` (k3 of
      KL(behavior || old), in nats), `mismatch_k2` (`log(rho)^2 / 2`); over trajectories: `mismatch_product` (of
      their rho) and `mismatch_geometric` (mean of their rho); with a correction, over action tokens:
      `correction_mean` and `correction_rejected` (factor 0). The maximum `mismatch_k2_max`. Log-ratios are
      limited to [-20, 20] before they are exponentiated.

    Raises:
      ValueError: shapes differ or are not [B, T], or `action_mask` is not bool.

    No paper: figures of this library; k2 and k3 are Schulman's 2020 (http://joschu.net/blog/kl-approx.html).
    """
    _check_arrays("mismatch", old_logprobs, behavior_logprobs, action_mask, trajectory_ids, rows=True)
    log_ratio = lax.stop_gradient(_log_ratio(old_logprobs, behavior_logprobs, action_mask))
    ratio, totals = _exp(log_ratio), pooled(log_ratio, trajectory_ids)
    lengths = _lengths(action_mask, trajectory_ids)

    def over_tokens(values: Array) -> tuple[Array, Array]:
        return jnp.sum(jnp.where(action_mask, values, 0.0)), jnp.sum(action_mask.astype(jnp.float32))

    def over_trajectories(values: Array) -> tuple[Array, Array]:
        # A trajectory's value stands at each of its tokens.
        share = jnp.where(action_mask, 1.0 / lengths, 0.0)
        return jnp.sum(share * values), jnp.sum(share)

    k2 = 0.5 * jnp.square(log_ratio)
    sums = {
        "mismatch_ratio": over_tokens(ratio),
        "mismatch_kl": over_tokens(ratio - log_ratio - 1.0),
        "mismatch_k2": over_tokens(k2),
        "mismatch_product": over_trajectories(_exp(totals)),
        "mismatch_geometric": over_trajectories(_exp(totals / lengths)),
    }
    if correction is not None:
        factors = correction(old_logprobs, behavior_logprobs, action_mask, trajectory_ids)
        sums["correction_mean"] = over_tokens(factors)
        sums["correction_rejected"] = over_tokens((factors == 0).astype(jnp.float32))
    return Metrics(sums, {"mismatch_k2_max": jnp.max(k2)})


def proximal_share(behavior_versions: Array, proximal_versions: Array, versions: Array) -> Array:
    """How far the proximal policy lies between the behavior (0) and the current one (1), in updates, per token.

    `alpha = (v_prox - v_mu) / (v_theta - v_mu)`; 1 where the token was sampled by the current params.

    Args:
      behavior_versions: i32, params that sampled the token: a rollout may span several.
      proximal_versions: i32, params at the start of the update.
      versions: i32, params being trained. All of one shape.

    Returns:
      f32 of that shape, in [0, 1] where the versions are in order.

    Raises:
      ValueError: shapes differ.

    Li et al. 2025, A-3PO (https://arxiv.org/abs/2512.06547).
    """
    arrays = {"proximal_versions": proximal_versions, "versions": versions}
    check_shapes("proximal_share", "behavior_versions", behavior_versions, **arrays)
    lag = (versions - behavior_versions).astype(jnp.float32)
    passed = (proximal_versions - behavior_versions).astype(jnp.float32)
    return jnp.where(lag > 0, passed / jnp.maximum(lag, 1.0), 1.0)


def proximal_log_linear(logprobs: Array, behavior_logprobs: Array, share: Array) -> Array:
    """`old_logprobs` without a forward pass, by geometric interpolation: `log mu + alpha * (log pi - log mu)`.

    Args:
      logprobs: f32 under the params being trained; detached here.
      behavior_logprobs: f32 from the sampler.
      share: f32 alpha in [0, 1], from `proximal_share`. All of one shape.

    Returns:
      f32 of that shape, detached.

    Raises:
      ValueError: shapes differ.

    Li et al. 2025, A-3PO (https://arxiv.org/abs/2512.06547).
    """
    check_shapes("proximal_log_linear", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, share=share)
    return lax.stop_gradient(behavior_logprobs + share * (logprobs - behavior_logprobs))


def proximal_linear(logprobs: Array, behavior_logprobs: Array, share: Array) -> Array:
    """As `proximal_log_linear`, by arithmetic interpolation: `log((1 - alpha) * mu + alpha * pi)`.

    Arguments, result and errors as there. No paper of its own: a definition of this library, to compare with it.
    """
    check_shapes("proximal_linear", "logprobs", logprobs, behavior_logprobs=behavior_logprobs, share=share)
    return lax.stop_gradient(jnp.logaddexp(jnp.log1p(-share) + behavior_logprobs, jnp.log(share) + logprobs))


def _correction(name: str, factors: Callable[[Array, Array, Array], Array], *, rows: bool = False) -> Correction:
    """(log_ratio, action_mask, trajectory_ids) -> factors, as a correction: detached, and 1 off actions."""

    def correction(old_logprobs: Array, behavior_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
        _check_arrays(name, old_logprobs, behavior_logprobs, action_mask, trajectory_ids, rows=rows)
        found = factors(_log_ratio(old_logprobs, behavior_logprobs, action_mask), action_mask, trajectory_ids)
        return lax.stop_gradient(jnp.where(action_mask, found, 1.0))

    return correction


def _log_ratio(old_logprobs: Array, behavior_logprobs: Array, action_mask: Array) -> Array:
    return jnp.where(action_mask, old_logprobs - behavior_logprobs, 0.0)


def _exp(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -_LOG_LIMIT, _LOG_LIMIT))


def _inside(ratio: Array, low: float, high: float) -> Array:
    return ((ratio >= low) & (ratio <= high)).astype(jnp.float32)


def _lengths(action_mask: Array, trajectory_ids: Array) -> Array:
    return jnp.maximum(pooled(action_mask.astype(jnp.float32), trajectory_ids), 1.0)


def _check_cap(name: str, cap: float) -> None:
    if not 0 < cap < math.inf:
        raise ValueError(f"{name}: cap: expected a finite number above 0, got {cap}")


def _check_arrays(name: str, old: Array, behavior: Array, action_mask: Array, ids: Array, *, rows: bool) -> None:
    check_tokens(name, action_mask, rows=rows, old_logprobs=old, behavior_logprobs=behavior, trajectory_ids=ids)


def _check_bounds(name: str, low: float, high: float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"{name}: low, high: expected 0 <= low <= 1 <= high, got {low} and {high}")
