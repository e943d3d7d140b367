"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Value and gradient are different questions. k1 and k3 are unbiased values whose gradient is not the
gradient of the KL: differentiated as a loss, k1 has gradient 0 in expectation and k3 that of the
*forward* KL, while k2 is a biased value with exactly the reverse KL's gradient. `straight_through` joins the
value of one with the gradient of another; `off_policy` makes both exact, from whatever policy the tokens came.

Schulman 2020 (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.rl.ratios import check_shapes
from agentrl_jax.rl.types import Kl

_LOG_LIMIT = 20.0


def k1(logprobs: Array, ref_logprobs: Array) -> Array:
    """`log pi - log ref`: unbiased, of either sign; d/dlogprob = 1. Any one shape, and ValueError of two.

    Schulman 2020 (http://joschu.net/blog/kl-approx.html).
    """
    check_shapes("k1", "logprobs", logprobs, ref_logprobs=ref_logprobs)
    return logprobs - ref_logprobs


def k2(logprobs: Array, ref_logprobs: Array) -> Array:
    """`(log pi - log ref)^2 / 2`: biased value, gradient of the reverse KL; d/dlogprob = log pi - log ref.

    Shapes, errors and source as in `k1`.
    """
    check_shapes("k2", "logprobs", logprobs, ref_logprobs=ref_logprobs)
    return 0.5 * jnp.square(logprobs - ref_logprobs)


def k3(logprobs: Array, ref_logprobs: Array) -> Array:
    """`ref/pi - log(ref/pi) - 1`: unbiased, never negative; d/dlogprob = 1 - ref/pi. The log-ratio is at most 20.

    Shapes and errors as in `k1`. Shao et al. 2024, GRPO (https://arxiv.org/abs/2402.03300).
    """
    check_shapes("k3", "logprobs", logprobs, ref_logprobs=ref_logprobs)
    log_ratio = jnp.clip(ref_logprobs - logprobs, -_LOG_LIMIT, _LOG_LIMIT)
    return jnp.exp(log_ratio) - log_ratio - 1.0


def straight_through(value: Kl, gradient: Kl) -> Kl:
    """The value of one estimator with the gradient of another: `gradient + stop_gradient(value - gradient)`.

    Args:
      value: what is reported and added to the loss.
      gradient: what is differentiated.

    Returns:
      An estimator of the same signature; its errors are those of the two.

    No paper: a definition of this library, the straight-through trick applied to `k1`, `k2` and `k3`.
    """

    def estimate(logprobs: Array, ref_logprobs: Array) -> Array:
        slope = gradient(logprobs, ref_logprobs)
        return slope + lax.stop_gradient(value(logprobs, ref_logprobs) - slope)

    return estimate


def k1_plus(logprobs: Array, ref_logprobs: Array) -> Array:
    """Value of `k1`, gradient of `k2`: unbiased value, gradient of the reverse KL.

    Shapes and errors as in `k1`. No paper: a definition of this library, by `straight_through`.
    """
    check_shapes("k1_plus", "logprobs", logprobs, ref_logprobs=ref_logprobs)
    return straight_through(k1, k2)(logprobs, ref_logprobs)


def k3_plus(logprobs: Array, ref_logprobs: Array) -> Array:
    """Value of `k3`, gradient of `k2`: unbiased and never negative, gradient of the reverse KL.

    Shapes and errors as in `k1`. No paper: by `straight_through`, under the name that trainers give it.
    """
    check_shapes("k3_plus", "logprobs", logprobs, ref_logprobs=ref_logprobs)
    return straight_through(k3, k2)(logprobs, ref_logprobs)


def off_policy(divergence: Array, ratio: Array) -> Array:
    """`r * kl` with r = pi / pi_old, not detached: value and gradient of the reverse KL from tokens of the old policy.

    `E_old[r * k] = KL(pi || ref)` for every pi where k is k1 or k3, so its gradient is the KL's as well: the
    gradient through r supplies what k1 and k3 lack by themselves, also at r = 1.

    Args:
      divergence: f32, values of `k1` or `k3`; any one shape.
      ratio: f32, `ratios.token`; `ratios.on_policy` where the tokens are the policy's own.

    Returns:
      f32 of that shape.

    Raises:
      ValueError: shapes differ.

    DeepSeek-AI 2025, DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556).
    """
    check_shapes("off_policy", "divergence", divergence, ratio=ratio)
    return ratio * divergence
