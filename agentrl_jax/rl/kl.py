"""Per-token estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

Value and gradient are different questions. k1 and k3 are unbiased values whose gradient is not the
gradient of the KL: differentiated as a loss, k1 has gradient 0 in expectation and k3 that of the
*forward* KL, while k2 is a biased value with exactly the reverse KL's gradient.

Schulman 2020 (http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

_LOG_LIMIT = 20.0


def k1(logprobs: Array, ref_logprobs: Array) -> Array:
    """`log pi - log ref`: unbiased, of either sign; d/dlogprob = 1. Any one shape."""
    return logprobs - ref_logprobs


def k2(logprobs: Array, ref_logprobs: Array) -> Array:
    """`(log pi - log ref)^2 / 2`: biased value, gradient of the reverse KL; d/dlogprob = log pi - log ref."""
    return 0.5 * jnp.square(logprobs - ref_logprobs)


def k3(logprobs: Array, ref_logprobs: Array) -> Array:
    """`ref/pi - log(ref/pi) - 1`: unbiased, never negative; d/dlogprob = 1 - ref/pi. The log-ratio is at most 20.

    Shao et al. 2024, GRPO (https://arxiv.org/abs/2402.03300).
    """
    log_ratio = jnp.clip(ref_logprobs - logprobs, -_LOG_LIMIT, _LOG_LIMIT)
    return jnp.exp(log_ratio) - log_ratio - 1.0
