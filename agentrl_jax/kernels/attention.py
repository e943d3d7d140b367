"""Attention over packed forest rows, in plain JAX: blocks of queries forward, recomputed backward."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

# A block of queries reads only the keys before its end, so blocks spare almost half of the work, and their
# scores stay in cache. At most about 8 of them are unrolled, until the scores of one block grow too large.
_SMALLEST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 128, 1024, 8
_MASKED = -1e30  # finite: no row of scores and no gradient is ever NaN


def forest_attention(q: Array, k: Array, v: Array, subtree_ends: Array, *, scale: float) -> Array:
    """Softmax attention in which a token reads exactly its ancestors and itself.

    `out[i] = sum_j softmax_j(scale * q[i].k[j]) v[j]` over the j with `j <= i < subtree_ends[j]`.
    Query head h reads key head `h // (H / J)` (grouped queries). Scores and softmax are f32. The
    backward pass recomputes the probabilities from their log-normalisers, so that only the inputs
    and the output are kept between the passes, never [T, T].

    A padding token (`subtree_ends[i] == i`) reads itself alone: its output and its gradient are
    finite, and nothing reads it.

    Args:
      q: [B, T, H, C] queries.
      k: [B, T, J, C] keys; J divides H.
      v: [B, T, J, C] values.
      subtree_ends: i32[B, T] first column after each token's subtree.
      scale: what the scores are multiplied by, usually `C ** -0.5`.

    Returns:
      [B, T, H, C] in the dtype of `v`.

    Raises:
      ValueError: the shapes do not fit together.

    Grouped queries: Ainslie et al. 2023 (https://arxiv.org/abs/2305.13245); recomputation from
    log-normalisers: Dao et al. 2022 (https://arxiv.org/abs/2205.14135).
    """
    _check(q, k, v, subtree_ends)
    rows, length, heads, width = q.shape
    groups = k.shape[2]
    grouped = q.reshape(rows, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    out = _attention(grouped, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), subtree_ends, scale)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(rows, length, heads, width)


def readable(subtree_ends: Array, start: int, stop: int) -> Array:
    """Which of the first `stop` columns the tokens in columns `start..stop-1` read: bool[B, stop-start, stop].

    The forest rule `j <= i < subtree_ends[j]`, and every token itself (which adds padding only).
    """
    reader = jnp.arange(start, stop, dtype=jnp.int32)[None, :, None]
    read = jnp.arange(stop, dtype=jnp.int32)[None, None, :]
    inside = reader < subtree_ends[:, None, :stop]
    return ((read <= reader) & inside) | (read == reader)


# Inside, heads come first: q [B, J, R, T, C] with R = H / J, k and v [B, J, T, C].


def _primal(q: Array, k: Array, v: Array, subtree_ends: Array, scale: float) -> Array:
    return _forward(q, k, v, subtree_ends, scale)[0]


def _forward(q: Array, k: Array, v: Array, subtree_ends: Array, scale: float) -> tuple[Array, tuple[Array, ...]]:
    outs, normalizers = [], []
    for start, stop in _blocks(q.shape[3]):
        scores = _scores(q[..., start:stop, :], k[:, :, :stop], scale)
        scores = jnp.where(readable(subtree_ends, start, stop)[:, None, None], scores, _MASKED)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        unnormalized = jnp.exp(scores - highest)
        total = jnp.sum(unnormalized, axis=-1, keepdims=True)
        out = _mix(unnormalized.astype(v.dtype), v[:, :, :stop]) / total
        outs.append(out.astype(v.dtype))
        normalizers.append(highest + jnp.log(total))
    out = jnp.concatenate(outs, axis=3)
    return out, (q, k, v, subtree_ends, out, jnp.concatenate(normalizers, axis=3))


def _backward(scale: float, kept: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, subtree_ends, out, normalizers = kept
    inner = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    dk, dv = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dq = []
    for start, stop in _blocks(q.shape[3]):
        queries, wanted = q[..., start:stop, :], gradient[..., start:stop, :]
        scores = _scores(queries, k[:, :, :stop], scale)
        mask = readable(subtree_ends, start, stop)[:, None, None]
        # Masked before the exponential: a forbidden score may lie far above its row's log-normaliser.
        probabilities = jnp.exp(jnp.where(mask, scores - normalizers[..., start:stop, :], _MASKED))
        toward = _scores(wanted, v[:, :, :stop], 1.0) - inner[..., start:stop, :]
        dscores = (probabilities * toward * scale).astype(q.dtype)
        dv = dv.at[:, :, :stop].add(_pool(probabilities.astype(v.dtype), wanted))
        dk = dk.at[:, :, :stop].add(_pool(dscores, queries))
        dq.append(_mix(dscores, k[:, :, :stop]).astype(q.dtype))
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention = jax.custom_vjp(_primal, nondiff_argnums=(4,))
_attention.defvjp(_forward, _backward)


def _scores(q: Array, k: Array, scale: float) -> Array:
    """[B, J, R, I, C] x [B, J, S, C] -> f32[B, J, R, I, S]; R and I are folded into one matmul dimension."""
    rows, groups, repeats, length, width = q.shape
    folded = q.reshape(rows, groups, repeats * length, width)
    scores = jnp.einsum("bjqc,bjsc->bjqs", folded, k, preferred_element_type=jnp.float32)
    return scores.reshape(rows, groups, repeats, length, -1) * scale


def _mix(p: Array, v: Array) -> Array:
    """[B, J, R, I, S] x [B, J, S, C] -> f32[B, J, R, I, C]."""
    rows, groups, repeats, length, reads = p.shape
    folded = p.reshape(rows, groups, repeats * length, reads)
    mixed = jnp.einsum("bjqs,bjsc->bjqc", folded, v, preferred_element_type=jnp.float32)
    return mixed.reshape(rows, groups, repeats, length, -1)


def _pool(p: Array, q: Array) -> Array:
    """[B, J, R, I, S] x [B, J, R, I, C] -> f32[B, J, S, C]: summed over the queries that read each key."""
    rows, groups, repeats, length, reads = p.shape
    left = p.reshape(rows, groups, repeats * length, reads)
    right = q.reshape(rows, groups, repeats * length, -1)
    return jnp.einsum("bjqs,bjqc->bjsc", left, right, preferred_element_type=jnp.float32)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    step = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, -(-length // _BLOCKS)))
    return ((start, min(start + step, length)) for start in range(0, length, step))


def _check(q: Array, k: Array, v: Array, subtree_ends: Array) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(f"forest_attention: expected q [B, T, H, C], k and v [B, T, J, C]; got {shapes}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"forest_attention: B, T and C must agree and J must divide H; got {shapes}")
    if subtree_ends.shape != q.shape[:2]:
        raise ValueError(f"forest_attention: subtree_ends: expected {q.shape[:2]}, got {subtree_ends.shape}")
