"""Keys in pages of a pool [P, J, C, PAGE], values in one of [P, J, PAGE, C]; a row's table names those it reads.

Position p of a row is at offset p % PAGE of page table[p // PAGE]. Page 0 is nobody's: tables are filled up
with it and it is never written. Rows may name the same page, so a prompt is stored once for its group.

Attention walks a table with a running softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) and stops after
the last page in use. A page where a row has nothing to see changes none of its bits: the maximum stays,
exp(0) = 1 scales, 0 is added. So a row's numbers never depend on how long its neighbours are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PAGE = 32
GROUP = 8  # rows that walk their pages together
_NEGATIVE = -1e30
_BF16 = jnp.uint16  # bf16 is kept as its bits: XLA's CPU backend would convert a whole pool to f32 to write into it


def allocate_keys(pages: int, kv_heads: int, head_width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """An empty pool of `pages` pages of keys, the nobody's page among them; channels before positions.

    Scores are then sums of vectors over positions: on a CPU half the time of sums along the channels.
    """
    return jnp.zeros((pages, kv_heads, head_width, PAGE), _BF16 if dtype == jnp.bfloat16 else dtype)


def allocate_values(pages: int, kv_heads: int, head_width: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """An empty pool of `pages` pages of values; positions before channels."""
    return jnp.zeros((pages, kv_heads, PAGE, head_width), _BF16 if dtype == jnp.bfloat16 else dtype)


def write(
    keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array, new_keys: jax.Array,
    new_values: jax.Array, keep: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Put new keys, values [R, S, J, C] at positions i32[R, S] of the rows of table i32[R, W] where `keep` bool[R, S].

    No two kept positions may share a place: whoever writes a page must be the only one that holds it.
    """
    page = jnp.take_along_axis(table, positions // PAGE, axis=1)
    page = jnp.where(keep, page, keys.shape[0])  # out of range: dropped
    place = {"mode": "drop", "unique_indices": True}
    news = _stored(new_keys, keys.dtype), _stored(new_values, values.dtype)

    def by_token(keys: jax.Array, values: jax.Array, new_keys: jax.Array, new_values: jax.Array, at: jax.Array) -> Any:
        keys = keys.at[page, :, :, at].set(new_keys, **place)
        return keys, values.at[page, :, at].set(new_values, **place)

    def by_head(keys: jax.Array, values: jax.Array, new_keys: jax.Array, new_values: jax.Array, at: jax.Array) -> Any:
        # A window of heads and channels would have a TPU's compiler lay the whole pool out anew, positions first.
        where, head, at = page[..., None], jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None], at[..., None]
        keys = keys.at[where, head, :, at].set(new_keys, **place)
        return keys, values.at[where, head, at].set(new_values, **place)

    written = jax.lax.platform_dependent(keys, values, *news, positions % PAGE, tpu=by_head, default=by_token)
    return written[0], written[1]


def _stored(x: jax.Array, dtype: Any) -> jax.Array:
    """x as a pool of this dtype holds it."""
    return x.astype(jnp.bfloat16).view(dtype) if dtype == _BF16 else x.astype(dtype)


def _loaded(x: jax.Array) -> jax.Array:
    """What a pool holds, in f32."""
    return (x.view(jnp.bfloat16) if x.dtype == _BF16 else x).astype(jnp.float32)


def copy(pools: Any, source: jax.Array, target: jax.Array) -> Any:
    """In every pool of the tree, page target[n] becomes a copy of page source[n]; target 0 copies nothing. i32[N]."""

    def one(pool: jax.Array) -> jax.Array:
        return pool.at[jnp.where(target > 0, target, pool.shape[0])].set(pool[source], mode="drop")

    return jax.tree.map(one, pools)


def attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array, blocks: jax.Array,
    *, scale: float, window: jax.Array | None = None, soft_cap: float | None = None,
) -> jax.Array:  # fmt: skip
    """Attention of q [R, S, H, C] at positions i32[R, S] over what the pages of table i32[R, W] hold up to there.

    softmax(cap(scale * q . k)) v in f32, grouped queries, cap(x) = soft_cap * tanh(x / soft_cap); a token reads back
    `window` i32[] positions, itself included. `blocks` i32[R]: how many pages each row has to walk. -> f32[R, S, H, C].

    Rows of one token go in groups of 8, which walk the pages of their longest: what a group reads stays in a CPU's
    cache, short rows side by side end early, and the same program runs whatever the batch (`kernels.steady`).
    """
    settings = {"scale": scale, "window": window, "soft_cap": soft_cap}
    r, s = q.shape[:2]
    if s > 1:
        return _walk(q, keys, values, table, positions, jnp.max(blocks), **settings)
    groups = -(-r // GROUP)

    def grouped(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, groups * GROUP - r), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(groups, GROUP, *x.shape[1:])

    def one(rows: tuple[jax.Array, ...]) -> jax.Array:
        q, table, positions, blocks = jax.lax.optimization_barrier(rows)
        return jax.lax.optimization_barrier(_walk(q, keys, values, table, positions, jnp.max(blocks), **settings))

    out = jax.lax.map(one, tuple(grouped(x) for x in (q, table, positions, blocks)))
    return out.reshape(-1, *q.shape[1:])[:r]


def _walk(
    q: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array, blocks: jax.Array,
    *, scale: float, window: jax.Array | None, soft_cap: float | None,
) -> jax.Array:  # fmt: skip
    """`attend` of rows that all walk `blocks` i32[] pages."""
    r, s, h, c = q.shape
    j, g = keys.shape[1], h // keys.shape[1]
    queries = (q.astype(jnp.float32) * scale).reshape(r, s, j, g, c).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(r, j, g * s, c)
    limit = jnp.tile(positions, (1, g))[:, None, :, None]  # [R, 1, G * S, 1]
    column = jnp.arange(PAGE, dtype=jnp.int32)[None, None, None]

    def block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, out = carry
        page = jax.lax.dynamic_index_in_dim(table, index, axis=1, keepdims=False)
        k = _pages(keys, page)
        v = _pages(values, page)
        here = column + index * PAGE
        seen = here <= limit if window is None else (here <= limit) & (here > limit - window)
        scores = jnp.einsum("rjsc,rjct->rjst", queries, k)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen, scores, _NEGATIVE)
        higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
        mass = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
        mass, shrink = jax.lax.optimization_barrier((mass, jnp.exp(peak - higher)))
        out = out * shrink[..., None] + jnp.einsum("rjst,rjtc->rjsc", mass, v)
        return higher, total * shrink + jnp.sum(mass, axis=-1), out

    zeros = jnp.zeros(queries.shape[:3], jnp.float32)
    start = (zeros + _NEGATIVE, zeros, jnp.zeros(queries.shape, jnp.float32))
    _, total, out = jax.lax.fori_loop(0, blocks, block, start)
    out = (out / total[..., None]).reshape(r, j, g, s, c).transpose(0, 3, 1, 2, 4)
    return out.reshape(r, s, h, c)


def _pages(pool: jax.Array, page: jax.Array) -> jax.Array:
    """Pages i32[R] of a pool in f32."""

    def flat(pool: jax.Array, page: jax.Array) -> jax.Array:  # one long copy each instead of an index an element
        rows = pool.reshape(pool.shape[0], -1).at[page].get(mode="promise_in_bounds")
        return rows.reshape(page.shape[0], *pool.shape[1:])

    def plain(pool: jax.Array, page: jax.Array) -> jax.Array:  # flat, the whole pool would change its layout each time
        return pool.at[page].get(mode="promise_in_bounds")

    return _loaded(jax.lax.platform_dependent(pool, page, cpu=flat, default=plain))
