"""Keys and values of Q slots in blocks of time [blocks, Q, J, BLOCK, C]: what attention reads is contiguous.

Attention walks the blocks with a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) and stops
after the last one in use. A block where a slot has nothing changes none of its bits: the maximum stays,
exp(0) = 1 scales, 0 is added. So a slot's numbers never depend on how long its neighbours are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

BLOCK = 32
_NEGATIVE = -1e30


def allocate(slots: int, context: int, kv_heads: int, head_width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """An empty cache that holds at least `context` positions a slot."""
    return jnp.zeros((-(-context // BLOCK), slots, kv_heads, BLOCK, head_width), dtype)


def write(cache: jax.Array, rows: jax.Array, positions: jax.Array, update: jax.Array, keep: jax.Array) -> jax.Array:
    """Put update [R, S, J, C] at positions i32[R, S] of slots rows i32[R], in place where `keep` bool[R, S]."""
    block = jnp.where(keep, positions // BLOCK, cache.shape[0])  # out of range: dropped
    slot = jnp.broadcast_to(rows[:, None], positions.shape)
    update = update.astype(cache.dtype)
    return cache.at[block, slot, :, positions % BLOCK].set(update, mode="drop", unique_indices=True)


def copy(caches: Any, source: jax.Array, length: jax.Array) -> Any:
    """In every cache of the tree, slot q takes the first `length` positions (whole blocks) of slot source[q]."""

    def block(index: jax.Array, caches: Any) -> Any:
        return jax.tree.map(lambda cache: cache.at[index].set(_block(cache, index, source)), caches)

    return jax.lax.fori_loop(0, ((length + BLOCK - 1) // BLOCK).astype(jnp.int32), block, caches)


def attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, rows: jax.Array | None, positions: jax.Array, blocks: jax.Array,
    *, scale: float, window: jax.Array | None = None, soft_cap: float | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of q [R, S, H, C] at positions i32[R, S] over what slots `rows` (None: all, R = Q) hold up to there.

    softmax(cap(scale * q . k)) v in f32, grouped queries; `blocks` i32[]: how many blocks to walk; `window` i32[]:
    positions that a token reads back, itself included; `soft_cap` bounds the scores. -> f32[R, S, H, C].
    """
    r, s, h, c = q.shape
    j = keys.shape[2]
    grouped = (q.astype(jnp.float32) * scale).reshape(r, s, j, h // j, c).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(r, j, (h // j) * s, c)
    limit = jnp.tile(positions, (1, h // j))[:, None, :, None]  # [R, 1, G * S, 1]
    column = jnp.arange(BLOCK, dtype=jnp.int32)[None, None, None]

    def block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, out = carry
        k, v = (_block(cache, index, rows).astype(jnp.float32) for cache in (keys, values))
        at = column + index * BLOCK
        seen = at <= limit if window is None else (at <= limit) & (limit - at < window)
        scores = jnp.einsum("rjsc,rjtc->rjst", grouped, k)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores * (1.0 / soft_cap))
        scores = jnp.where(seen, scores, _NEGATIVE)
        higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
        mass = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
        shrink = jnp.exp(peak - higher)
        out = out * shrink[..., None] + jnp.einsum("rjst,rjtc->rjsc", mass, v)
        return higher, total * shrink + jnp.sum(mass, axis=-1), out

    zeros = jnp.zeros(grouped.shape[:3], jnp.float32)
    start = (zeros + _NEGATIVE, zeros, jnp.zeros(grouped.shape, jnp.float32))
    _, total, out = jax.lax.fori_loop(0, blocks, block, start)
    out = (out / total[..., None]).reshape(r, j, h // j, s, c).transpose(0, 3, 1, 2, 4)
    return out.reshape(r, s, h, c)


def _block(cache: jax.Array, index: jax.Array, rows: jax.Array | None) -> jax.Array:
    if rows is None:
        return jax.lax.dynamic_index_in_dim(cache, index, axis=0, keepdims=False)
    return cache[index, rows]
