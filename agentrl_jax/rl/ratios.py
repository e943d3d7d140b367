"""Probability ratios between the current and the old policy, per token, and what log-probabilities they compare."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

_LOG_LIMIT = 20.0  # exp(20) is far outside every clip range, and far inside f32


def token(logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
    """`r_t = pi(a_t) / pi_old(a_t)` for every action token on its own; 0 off actions.

    The log-ratio is limited to [-20, 20]. All arguments are [B, T]; returns f32[B, T].

    Raises:
      ValueError: shapes differ, or `action_mask` is not bool.

    Schulman et al. 2017, PPO (https://arxiv.org/abs/1707.06347).
    """
    _check("token", logprobs, old_logprobs, action_mask, trajectory_ids)
    return _exp(_log_ratio(logprobs, old_logprobs, action_mask), action_mask)


def sequence(logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
    """One ratio per trajectory, on each of its action tokens; 0 off actions.

    `s = exp(mean_t log(pi(a_t) / pi_old(a_t)))`, the geometric mean over the trajectory's action tokens;
    the gradient flows through all of them. A trajectory lies in one row, as the packer promises, so
    rows are pooled apart from each other and micro-batches change nothing. (Only the segments of a trajectory whose
    history was rendered anew may be too long for one row together: then each row's part has a ratio of its own.)

    All arguments are [B, T]; returns f32[B, T]. Use with weights that count trajectories
    (`sequence_mean`); clip ranges are about a thousand times narrower than a token ratio's.

    Raises:
      ValueError: shapes differ, are not [B, T], or `action_mask` is not bool.

    Zheng et al. 2025, GSPO (https://arxiv.org/abs/2507.18071).
    """
    _check("sequence", logprobs, old_logprobs, action_mask, trajectory_ids, rows=True)
    totals = pooled(_log_ratio(logprobs, old_logprobs, action_mask), trajectory_ids)
    lengths = pooled(action_mask.astype(jnp.float32), trajectory_ids)
    return _exp(totals / jnp.maximum(lengths, 1.0), action_mask)


def sequence_token(logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
    """The value of `sequence` with each token's own gradient; 0 off actions.

    `s_t = stop_gradient(s) * pi(a_t) / stop_gradient(pi(a_t))`. Where the advantages of a trajectory are equal
    its gradient is that of `sequence`; where they differ, each token answers for its own.

    All arguments are [B, T]; returns f32[B, T].

    Raises:
      ValueError: as in `sequence`.

    Zheng et al. 2025, GSPO-token (https://arxiv.org/abs/2507.18071).
    """
    _check("sequence_token", logprobs, old_logprobs, action_mask, trajectory_ids, rows=True)
    shared = lax.stop_gradient(sequence(logprobs, old_logprobs, action_mask, trajectory_ids))
    return shared * on_policy(logprobs, old_logprobs, action_mask, trajectory_ids)


def on_policy(logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array) -> Array:
    """Exactly 1, with the gradient of the log-probability: `r_t = pi / stop_gradient(pi)`; 0 off actions.

    With `surrogates.linear` this is REINFORCE. The old policy is ignored: right only where the batch
    was sampled by the params being updated. All arguments are [B, T]; returns f32[B, T].

    Raises:
      ValueError: as in `token`.

    Williams 1992 (https://doi.org/10.1007/BF00992696).
    """
    _check("on_policy", logprobs, old_logprobs, action_mask, trajectory_ids)
    return _exp(_log_ratio(logprobs, lax.stop_gradient(logprobs), action_mask), action_mask)


def renormalised(logprobs: Array, kept: Array) -> Array:
    """The distribution that a top-p or top-k sampler really drew from: `log pi_v - log sum_{u kept} pi_u`.

    A sampler that cuts the tail reports these; a learner that scores the full vocabulary is off by
    `-log(kept mass)` at every token. With the kept set stored (`TokenBatch.kept`), the gap is 0: the loss head
    scores so. Storing V bits a token is dear: sampling for training without a cut needs none of this.

    Args:
      logprobs: f32[..., V] over the full vocabulary, at the sampler's temperature.
      kept: bool[..., V] what the sampler could draw.

    Returns:
      f32[..., V]; -inf where not kept.

    Raises:
      ValueError: shapes differ, or `kept` is not bool.

    No paper: the conditional distribution given the kept set.
    """
    if kept.dtype != jnp.bool_ or kept.shape != logprobs.shape:
        found = f"{kept.dtype}{list(kept.shape)}"
        raise ValueError(f"renormalised: kept: expected bool{list(logprobs.shape)}, as logprobs, got {found}")
    inside = jnp.where(kept, logprobs, -jnp.inf)
    return inside - jax.nn.logsumexp(inside, axis=-1, keepdims=True)


def pooled(values: Array, *ids: Array) -> Array:
    """At every token, the sum of `values` over those tokens of its row whose ids all equal its own.

    Args:
      values: f32[B, T].
      ids: i32[B, T] each: trajectory ids, or trajectory ids and turn ids. Any integers, in any order.

    Returns:
      f32[B, T].

    Raises:
      ValueError: shapes differ, or are not [B, T].

    No paper: a definition of this library, for whatever looks at whole trajectories or turns of packed rows.
    """
    if values.ndim != 2 or any(each.shape != values.shape for each in ids):
        found = [tuple(each.shape) for each in (values, *ids)]
        raise ValueError(f"pooled: values, ids: expected one shape [B, T], got {found}: add a row with [None]")
    return jax.vmap(_pooled_row)(values, *ids)


def check_tokens(name: str, action_mask: Array, /, *, rows: bool = False, **arrays: Array) -> None:
    """Refuse arrays per token that do not belong together: they would broadcast, or count what they should not.

    Args:
      name: the public function, for the message.
      action_mask: bool, any shape.
      rows: ask for [B, T].
      **arrays: of the shape of `action_mask`, by argument.

    Raises:
      ValueError: `action_mask` is not bool (or, with `rows`, not [B, T]), or another shape differs from its own.
    """
    found = f"{action_mask.dtype}{list(action_mask.shape)}"
    if action_mask.dtype != jnp.bool_:
        raise ValueError(f"{name}: action_mask: expected bool, got {found}: compare with 0, or use astype(bool)")
    if rows and action_mask.ndim != 2:
        raise ValueError(f"{name}: action_mask: expected bool[B, T], got {found}: add a row with [None], or vmap")
    check_shapes(name, "action_mask", action_mask, **arrays)


def check_shapes(name: str, argument: str, first: Array, /, **others: Array) -> None:
    """Refuse arrays of another shape than the first: they would broadcast, in silence.

    Args:
      name: the public function, for the message.
      argument: what `first` is called there.
      first: any shape.
      **others: of that shape, by argument.

    Raises:
      ValueError: a shape differs.
    """
    for other, array in others.items():
        if jnp.shape(array) != jnp.shape(first):
            shapes = f"{list(jnp.shape(first))}, as {argument}, got {list(jnp.shape(array))}"
            raise ValueError(f"{name}: {other}: expected {shapes}: it would be broadcast")


def _check(name: str, logprobs: Array, old: Array, action_mask: Array, ids: Array, *, rows: bool = False) -> None:
    check_tokens(name, action_mask, rows=rows, logprobs=logprobs, old_logprobs=old, trajectory_ids=ids)


def _pooled_row(values: Array, *ids: Array) -> Array:
    order = jnp.lexsort(ids)
    starts = jnp.zeros(values.shape, jnp.bool_)
    for key in ids:
        starts |= jnp.diff(key[order], prepend=key[order][:1]) != 0
    segments = jnp.cumsum(starts.astype(jnp.int32))[jnp.argsort(order)]
    return jax.ops.segment_sum(values, segments, values.shape[0])[segments]


def _log_ratio(logprobs: Array, old_logprobs: Array, action_mask: Array) -> Array:
    # Masked before the exponential: garbage off actions must not reach the gradient.
    return jnp.where(action_mask, logprobs - old_logprobs, 0.0)


def _exp(log_ratio: Array, action_mask: Array) -> Array:
    return jnp.where(action_mask, jnp.exp(jnp.clip(log_ratio, -_LOG_LIMIT, _LOG_LIMIT)), 0.0)
