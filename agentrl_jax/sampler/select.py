"""Choosing one token a row, exactly, with one uniform number a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.kernels.kept import pack, unpack, words

_UNDERFLOW = 87.0  # this far below the peak exp is no normal f32; it counts as probability zero


class Cuts(NamedTuple):
    """What each of Q rows draws from. Neutral: temperature 1, top_k 0, top_p 1, min_p 0."""

    temperature: jax.Array  # f32[Q]; 0 takes the largest logit, and cuts mean nothing
    top_k: jax.Array  # i32[Q]; 0 is off
    top_p: jax.Array  # f32[Q]
    min_p: jax.Array  # f32[Q]

    def cut(self) -> jax.Array:
        """bool[Q]: rows that draw from a part of the vocabulary."""
        cuts = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)
        return cuts & (self.temperature > 0.0)


class Choice(NamedTuple):
    """One token a row."""

    tokens: jax.Array  # i32[Q]
    logprobs: jax.Array  # f32[Q] under the distribution drawn from; at temperature 0 that of temperature 1
    raw_logprobs: jax.Array  # f32[Q] under the whole vocabulary at temperature 1
    kept: jax.Array  # u32[Q, words(V)] the tokens that a cut left (kernels/kept.py); 0 where a row is not cut


def choose(logits: jax.Array, uniforms: jax.Array, cuts: Cuts) -> Choice:
    """Exact inverse-CDF samples of softmax(logits / temperature) over the tokens that the cuts leave.

    In this order, each on what the one before left: temperature; top_k, the k largest; top_p, the fewest
    largest whose mass reaches p; min_p, those of at least min_p times the largest probability. Equal logits
    stay or go together, so a tie may keep a few more. Holtzman et al. 2019, arXiv:1904.09751; Nguyen et al.
    2024, arXiv:2407.01082.

    The vocabulary is walked in two levels: partial sums of about sqrt(V) interleaved lanes pick a lane, a
    running sum inside the lane picks the token. (Any fixed order of the tokens gives the same distribution;
    interleaved lanes make the partial sums vector additions.) A token of probability 0 is never picked.
    A cut is one number a row, the largest depth below the peak that stays: rows without cuts pay nothing.

    logits f32[Q, V], uniforms f32[Q] in [0, 1).
    """
    greedy = cuts.temperature <= 0.0
    temperature = jnp.where(greedy, 1.0, cuts.temperature)
    lanes = _lanes(logits) / temperature[:, None, None]  # [Q, S, W]
    top = jnp.max(lanes, axis=1)
    peak = jnp.max(top, axis=1)
    cut = cuts.cut()
    blank = (jnp.full_like(peak, _UNDERFLOW), jnp.zeros((logits.shape[0], words(logits.shape[1])), jnp.uint32))
    # The branch takes the logits and scales them again: what it took of the rest would have to be stored for it.
    limit, kept = jax.lax.cond(jnp.any(cut), lambda: _cut(logits, temperature, peak, cuts, cut), lambda: blank)
    depth = peak[:, None, None] - lanes
    mass = jnp.where(depth <= limit[:, None, None], jnp.exp(-depth), 0.0)
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
    scaled = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] / temperature
    logprobs = scaled - peak - jnp.log(total)
    plain = ~cut & (temperature == 1.0)
    raw = jax.lax.cond(jnp.all(plain), lambda: logprobs, lambda: _raw_logprobs(logits, tokens))
    return Choice(tokens, logprobs, jnp.where(plain, logprobs, raw), kept)


def choose_among(logits: jax.Array, uniforms: jax.Array, cuts: Cuts, allowed: jax.Array) -> Choice:
    """`choose` where only some tokens are allowed, u32[Q, words(V)] with a bit set in each row: the others have no
    probability, before any cut. `kept` is what was left of them, cut or not; `raw_logprobs` know no constraint."""
    masked = jnp.where(unpack(allowed, logits.shape[1]), logits, -jnp.inf)
    choice = choose(masked, uniforms, cuts)
    kept = jnp.where(cuts.cut()[:, None], choice.kept, allowed)
    return choice._replace(raw_logprobs=_raw_logprobs(logits, choice.tokens), kept=kept)


def _raw_logprobs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    lanes = _lanes(logits)
    peak = jnp.max(lanes, axis=(1, 2))
    total = jnp.sum(jnp.sum(jnp.exp(lanes - peak[:, None, None]), axis=1), axis=1)
    return jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0] - peak - jnp.log(total)


def _cut(
    logits: jax.Array, temperature: jax.Array, peak: jax.Array, cuts: Cuts, cut: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The depth below the peak down to which each row keeps tokens, and those tokens as bits.

    Depths are floats of one sign, so their bit patterns are in their order: bisection over the patterns finds
    the smallest limit that keeps k tokens, or the mass p, exactly and without sorting the vocabulary.
    """
    depth = peak[:, None, None] - _lanes(logits) / temperature[:, None, None]
    mass = jnp.where(depth <= _UNDERFLOW, jnp.exp(-depth), 0.0)

    def smallest(reaches: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = low + (high - low) // 2
            enough = reaches(jax.lax.bitcast_convert_type(middle, jnp.float32))
            return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

        most = jax.lax.bitcast_convert_type(jnp.float32(_UNDERFLOW), jnp.int32)
        bounds = (jnp.zeros(depth.shape[0], jnp.int32), jnp.broadcast_to(most, depth.shape[:1]))
        return jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, halve, bounds)[1], jnp.float32)

    def within(limit: jax.Array, values: jax.Array) -> jax.Array:
        kept = jnp.where(depth <= limit[:, None, None], values, jnp.zeros_like(values))
        return jnp.sum(jnp.sum(kept, axis=1), axis=1)

    everything = jnp.full(depth.shape[:1], _UNDERFLOW, jnp.float32)
    ones = jnp.ones_like(depth)
    by_count = jax.lax.cond(
        jnp.any(cut & (cuts.top_k > 0)),
        lambda: smallest(lambda limit: within(limit, ones) >= cuts.top_k.astype(jnp.float32)),
        lambda: everything,
    )
    limit = jnp.where(cuts.top_k > 0, by_count, everything)
    # What rounding may take from a sum that should reach p exactly: .6 + .3 has reached .9.
    wanted = cuts.top_p * (1.0 - 1e-6) * within(limit, mass)
    by_mass = jax.lax.cond(
        jnp.any(cut & (cuts.top_p < 1.0)), lambda: smallest(lambda low: within(low, mass) >= wanted), lambda: everything
    )
    limit = jnp.minimum(limit, jnp.where(cuts.top_p < 1.0, by_mass, everything))
    limit = jnp.where(cuts.min_p > 0.0, jnp.minimum(limit, -jnp.log(cuts.min_p)), limit)
    kept = (depth <= limit[:, None, None]).reshape(depth.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(cut, limit, _UNDERFLOW), jnp.where(cut[:, None], pack(kept), jnp.uint32(0))


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
