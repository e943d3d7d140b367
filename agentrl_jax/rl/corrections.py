"""Corrections for a sampler that is not quite the old policy: detached factors on the advantages."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.rl.types import Correction

_LOG_LIMIT = 20.0


def truncated(cap: float = 2.0) -> Correction:
    """Truncated importance sampling from the behavior to the old policy, per token.

    `c_t = min(pi_old(a_t) / mu(a_t), cap)`, detached; 1 off actions. The ratio of the loss then runs from the
    old policy, rescored with the learner's params. Where no `old_logprobs` are rescored that ratio starts
    at the behavior policy itself and already corrects; both together would count the mismatch twice.

    Args:
      cap: largest factor; 2 to 5 is usual.

    Returns:
      A correction on [B, T] arrays.

    Raises:
      ValueError: `cap` is not positive.

    Ionides 2008; Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl).
    """
    if not cap > 0:
        raise ValueError(f"truncated: cap: expected a number above 0, got {cap}")

    def correction(old_logprobs: Array, behavior_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
        del trajectory_ids
        log_ratio = jnp.where(action_mask, old_logprobs - behavior_logprobs, 0.0)
        ratio = jnp.exp(jnp.clip(log_ratio, -_LOG_LIMIT, _LOG_LIMIT))
        return lax.stop_gradient(jnp.where(action_mask, jnp.minimum(ratio, cap), 1.0))

    return correction
