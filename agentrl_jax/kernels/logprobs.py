"""From hidden states to log-probabilities: the one place where columns are shifted from parent to child."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class _Chunk(NamedTuple):
    """A block of action columns, gathered: what is read to predict them, what they are, which are real."""

    hidden: Array  # [B, S, D]
    targets: Array  # i32[B, S]
    active: Array  # bool[B, S]


def token_logprobs(
    hidden: Array,
    unembedding: Array,
    tokens: Array,
    parents: Array,
    action_mask: Array,
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    entropy: bool = False,
) -> tuple[Array, Array | None]:
    """Log-probability of every action token given its ancestors, without ever holding [B, T, V].

    `logprobs[b, t] = log softmax(hidden[b, parents[b, t]] @ unembedding.T / temperature)[tokens[b, t]]`
    on actions, 0 elsewhere; `entropy[b, t] = -sum_v p_v log p_v` of the same distribution.

    Action columns are sorted to the front of their row and projected chunk by chunk; a chunk in which
    no row has an action is skipped, so the cost follows the number of actions, and no action is ever
    dropped. Chunks are rematerialised in the backward pass. Logits, log-softmax and sums are f32.

    Args:
      hidden: [B, T, D] after the final norm.
      unembedding: [V, D]; the projection runs in its dtype, accumulated in f32.
      tokens: i32[B, T].
      parents: i32[B, T] column that each token continues.
      action_mask: bool[B, T].
      temperature: of the distribution sampled from; it belongs to the policy's definition.
      chunk: tokens projected at once, over all rows; peak memory is about `chunk * V` floats.
      entropy: also return entropies.

    Returns:
      f32[B, T] log-probabilities, and f32[B, T] entropies or None.

    Raises:
      ValueError: a shape does not fit, or `temperature` or `chunk` is not positive.
    """
    _check(hidden, unembedding, tokens, parents, action_mask, temperature, chunk)
    rows, length = tokens.shape
    columns = min(length, max(1, chunk // rows))
    steps = -(-length // columns)
    order = jnp.argsort(~action_mask, axis=1, stable=True)

    def arrange(values: Array) -> Array:
        """[B, T, ...] in sorted order -> [steps, B, columns, ...]."""
        padded = jnp.pad(values, [(0, 0), (0, steps * columns - length)] + [(0, 0)] * (values.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, steps, columns, *values.shape[2:]), 1, 0)

    read = jnp.maximum(jnp.take_along_axis(parents, order, axis=1), 0)
    chunks = _Chunk(
        hidden=arrange(jnp.take_along_axis(hidden.astype(unembedding.dtype), read[:, :, None], axis=1)),
        targets=arrange(jnp.take_along_axis(tokens, order, axis=1)),
        active=arrange(jnp.take_along_axis(action_mask, order, axis=1)),
    )

    @jax.checkpoint
    def project(matrix: Array, chunk_: _Chunk) -> tuple[Array, Array | None]:
        nothing = jnp.zeros(chunk_.active.shape, jnp.float32)
        return lax.cond(
            jnp.any(chunk_.active),
            lambda: _project(matrix, chunk_, temperature, entropy),
            lambda: (nothing, nothing if entropy else None),
        )

    _, (logprobs, entropies) = lax.scan(lambda _, chunk_: (None, project(unembedding, chunk_)), None, chunks)
    inverse = jnp.argsort(order, axis=1)

    def restore(values: Array) -> Array:
        flat = jnp.moveaxis(values, 0, 1).reshape(rows, steps * columns)
        return jnp.take_along_axis(flat, inverse, axis=1)

    return restore(logprobs), restore(entropies) if entropy else None


def _project(matrix: Array, chunk: _Chunk, temperature: float, entropy: bool) -> tuple[Array, Array | None]:
    # Zeroed before the projection, not after: what stands in idle columns must not reach the gradient.
    hidden = jnp.where(chunk.active[:, :, None], chunk.hidden, jnp.zeros((), chunk.hidden.dtype))
    logits = jnp.einsum("bsd,vd->bsv", hidden, matrix, preferred_element_type=jnp.float32) * (1.0 / temperature)
    # From the peak down, before anything is added up: a logit of 20 is rounded to 2e-6, its distance to the peak less.
    shifted = logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    mass = jnp.exp(shifted)
    total = jnp.sum(mass, axis=-1)
    chosen = jnp.take_along_axis(shifted, chunk.targets[:, :, None], axis=-1)[:, :, 0]
    logprobs = jnp.where(chunk.active, chosen - jnp.log(total), 0.0)
    if not entropy:
        return logprobs, None
    mean = jnp.sum(mass * shifted, axis=-1) / total
    return logprobs, jnp.where(chunk.active, jnp.log(total) - mean, 0.0)


def _check(
    hidden: Array, unembedding: Array, tokens: Array, parents: Array, mask: Array, temperature: float, chunk: int
) -> None:
    if hidden.ndim != 3 or unembedding.ndim != 2 or hidden.shape[2] != unembedding.shape[1]:
        shapes = f"{hidden.shape} and {unembedding.shape}"
        raise ValueError(f"token_logprobs: expected hidden [B, T, D] and unembedding [V, D], got {shapes}")
    for name, array in (("tokens", tokens), ("parents", parents), ("action_mask", mask)):
        if array.shape != hidden.shape[:2]:
            raise ValueError(f"token_logprobs: {name}: expected {hidden.shape[:2]}, got {array.shape}")
    if not temperature > 0:
        raise ValueError(f"token_logprobs: temperature: expected a number above 0, got {temperature}")
    if chunk < 1:
        raise ValueError(f"token_logprobs: chunk: expected at least 1 token, got {chunk}")
