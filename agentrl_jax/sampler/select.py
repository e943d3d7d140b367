"""Choosing one token a row, exactly, with one uniform number a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_UNDERFLOW = -87.0  # below this exp is no normal f32; it counts as probability zero


def choose(logits: jax.Array, uniforms: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact inverse-CDF samples of softmax(logits / temperature); temperature 0 takes the largest logit.

    The vocabulary is walked in two levels: partial sums of about sqrt(V) interleaved lanes pick a lane, a
    running sum inside the lane picks the token. (Any fixed order of the tokens gives the same distribution;
    interleaved lanes make the partial sums vector additions.) A token of probability 0 is never picked.

    logits f32[Q, V], uniforms f32[Q] in [0, 1), temperature f32[Q] -> tokens i32[Q], logprobs f32[Q].
    The log-probability is under the distribution sampled from, at its temperature; at temperature 0 it is
    that of temperature 1.
    """
    greedy = temperature <= 0.0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    lanes = _lanes(scaled)  # [Q, S, W]
    top = jnp.max(lanes, axis=1)
    peak = jnp.max(top, axis=1)
    shifted = lanes - peak[:, None, None]
    mass = jnp.where(shifted > _UNDERFLOW, jnp.exp(shifted), 0.0)
    sums = jnp.sum(mass, axis=1)
    running = _running_sum(sums)
    total = running[:, -1]
    target = uniforms * total
    lane = _first((running > target[:, None]) & (sums > 0.0), sums > 0.0)
    lane = jnp.where(greedy, _first(top == peak[:, None], top == peak[:, None]), lane)
    column = jnp.take_along_axis(mass, lane[:, None, None], axis=2)[:, :, 0]
    before = jnp.take_along_axis(running - sums, lane[:, None], axis=1)
    inside = _first((_running_sum(column) + before > target[:, None]) & (column > 0.0), column > 0.0)
    # At temperature 0 the lane's maximum has mass exp(0) = 1, the largest there is.
    inside = jnp.where(greedy, jnp.argmax(column, axis=1).astype(jnp.int32), inside)
    tokens = inside * lanes.shape[2] + lane
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0]
    return tokens, chosen - peak - jnp.log(total)


def _lanes(logits: jax.Array) -> jax.Array:
    """[Q, V] -> [Q, S, W], token s * W + w at (s, w), padded with -inf."""
    rows, vocab = logits.shape
    width = 1 << (vocab.bit_length() // 2)
    padding = -vocab % width
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits.reshape(rows, -1, width)


def _running_sum(x: jax.Array) -> jax.Array:
    """Inclusive running sum along the last axis as one triangular product: few rows, some hundred columns."""
    size = x.shape[1]
    triangle = jnp.triu(jnp.ones((size, size), x.dtype))
    return jax.lax.dot(x, triangle, precision=jax.lax.Precision.HIGHEST)


def _first(hit: jax.Array, otherwise: jax.Array) -> jax.Array:
    """First column where `hit`; where rounding left none, the last column where `otherwise`. i32[Q]."""
    last = hit.shape[1] - 1 - jnp.argmax(otherwise[:, ::-1], axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1).astype(jnp.int32), last)
