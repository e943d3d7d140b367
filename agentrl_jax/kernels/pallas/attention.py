"""Forest attention on a TPU in tiles: scores live in vector memory only, tiles that nobody reads are passed over.

The rule, the arguments and the numbers are those of `kernels.attention.forest_attention`, its plain-JAX reference.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_MASKED = -1e30  # finite: no row of scores and no gradient is ever NaN
_VECTOR_MEMORY = 60 << 20


class _Settings(NamedTuple):
    """What is fixed when the kernels are built."""

    scale: float
    soft_cap: float | None
    tile: int
    windowed: bool
    interpret: bool


class _Reach(NamedTuple):
    """What decides which columns a token reads, laid out for lanes (of a key) and for sublanes (of a query)."""

    window: Array  # i32[1]
    ends: Array  # i32[B, 1, T]
    key_positions: Array  # i32[B, 1, T]
    query_positions: Array  # i32[B, T, 1]


def forest_attention(
    q: Array, k: Array, v: Array, subtree_ends: Array, *, scale: float,
    positions: Array | None = None, window: Array | int | None = None, soft_cap: float | None = None,
    tile: int = 512, interpret: bool = False,
) -> Array:  # fmt: skip
    """Softmax attention in which a token reads exactly its ancestors and itself: q [B, T, H, C] -> [B, T, H, C].

    A tile of keys is skipped where it lies behind the tile of queries, or where all of its subtrees end before it: a
    row of many short documents costs about its documents, not T^2. The backward pass recomputes the probabilities
    from their log-normalisers, in one sweep for the queries and one for keys and values. T need not be a multiple of
    the tile. Runs on the arrays of one device: under a mesh, call it inside `shard_map`.

    Args:
      q, k, v, subtree_ends, scale, positions, window, soft_cap: see `kernels.attention.forest_attention`.
      tile: queries and keys at once, a multiple of 128 on a TPU.
      interpret: run as plain JAX, where there is no TPU.

    Raises:
      ValueError: a window comes without positions.

    Dao et al. 2022 (https://arxiv.org/abs/2205.14135); Rabe & Staats 2021 (https://arxiv.org/abs/2112.05682).
    """
    if window is not None and positions is None:
        raise ValueError("forest_attention: positions: a window needs them, got None")
    length = q.shape[1]
    padding = -length % tile
    columns = jnp.arange(length, length + padding, dtype=jnp.int32)
    ends = jnp.concatenate([subtree_ends, jnp.broadcast_to(columns, (q.shape[0], padding))], axis=1)  # padding tokens
    where = jnp.zeros_like(ends) if positions is None else jnp.pad(positions, ((0, 0), (0, padding)))
    bound = jnp.asarray(0 if window is None else window, jnp.int32).reshape(1)
    reach = _Reach(bound, ends[:, None], where[:, None], where[..., None])
    settings = _Settings(scale, soft_cap, tile, window is not None, interpret)
    heads_first = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))).transpose(0, 2, 1, 3) for x in (q, k, v))
    return _attention(*heads_first, reach, settings).transpose(0, 2, 1, 3)[:, :length]


# Inside, heads come first: q [B, H, T, C], k and v [B, J, T, C].


def _primal(q: Array, k: Array, v: Array, reach: _Reach, settings: _Settings) -> Array:
    return _forward(q, k, v, reach, settings)[0]


def _forward(q: Array, k: Array, v: Array, reach: _Reach, settings: _Settings) -> tuple[Array, tuple[Any, ...]]:
    (rows, heads, length, width), tile, repeats = q.shape, settings.tile, q.shape[1] // k.shape[1]
    tiles = length // tile
    query, scalar, key = _specs(width, tile, lambda b, h, i, j: (b, h, i), lambda b, h, i, j: (b, h // repeats, j))
    out, normalizers = pl.pallas_call(
        partial(_forward_kernel, settings=settings),
        grid=(rows, heads, tiles, tiles),
        in_specs=[*_reach_specs(tile, lambda b, h, i, j: (b, i, j)), query, key, key],
        out_specs=[query, scalar],
        out_shape=[jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct((*q.shape[:3], 1), jnp.float32)],
        scratch_shapes=[pltpu.VMEM((tile, 1), jnp.float32)] * 2 + [pltpu.VMEM((tile, width), jnp.float32)],
        compiler_params=_compiler_params(),
        interpret=settings.interpret,
    )(*reach, q, k, v)
    return out, (q, k, v, reach, out, normalizers)


def _backward(settings: _Settings, kept: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, reach, out, normalizers = kept
    inner = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    (rows, heads, length, width), tile, groups = q.shape, settings.tile, k.shape[1]
    tiles, repeats = length // tile, heads // groups
    query, scalar, key = _specs(width, tile, lambda b, h, i, j: (b, h, i), lambda b, h, i, j: (b, h // repeats, j))
    dq = pl.pallas_call(
        partial(_query_kernel, settings=settings),
        grid=(rows, heads, tiles, tiles),
        in_specs=[*_reach_specs(tile, lambda b, h, i, j: (b, i, j)), query, key, key, query, scalar, scalar],
        out_specs=query,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32)],
        compiler_params=_compiler_params(),
        interpret=settings.interpret,
    )(*reach, q, k, v, gradient, normalizers, inner)
    # The innermost axis walks over the query heads of a group and the tiles of each: n = repeat * tiles + tile.
    query, scalar, key = _specs(
        width, tile, lambda b, g, j, n: (b, g * repeats + n // tiles, n % tiles), lambda b, g, j, n: (b, g, j)
    )
    dk, dv = pl.pallas_call(
        partial(_key_kernel, settings=settings, tiles=tiles),
        grid=(rows, groups, tiles, repeats * tiles),
        in_specs=[*_reach_specs(tile, lambda b, g, j, n: (b, n % tiles, j)), query, key, key, query, scalar, scalar],
        out_specs=[key, key],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        scratch_shapes=[pltpu.VMEM((tile, width), jnp.float32)] * 2,
        compiler_params=_compiler_params(),
        interpret=settings.interpret,
    )(*reach, q, k, v, gradient, normalizers, inner)
    return dq, dk, dv, None


_attention = jax.custom_vjp(_primal, nondiff_argnums=(4,))
_attention.defvjp(_forward, _backward)


def _specs(width: int, tile: int, at_query: Any, at_key: Any) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Tiles of [B, H, T, C] at a query, of [B, H, T, 1] at a query, and of [B, J, T, C] at a key."""
    query = pl.BlockSpec((None, None, tile, width), lambda *at: (*at_query(*at), 0))
    scalar = pl.BlockSpec((None, None, tile, 1), lambda *at: (*at_query(*at), 0))
    return query, scalar, pl.BlockSpec((None, None, tile, width), lambda *at: (*at_key(*at), 0))


def _reach_specs(tile: int, at: Any) -> list[pl.BlockSpec]:
    """Tiles of `_Reach`; `at` gives (row, tile of queries, tile of keys)."""

    def of_key(*index: Any) -> tuple[Any, ...]:
        row, _, key = at(*index)
        return row, 0, key

    def of_query(*index: Any) -> tuple[Any, ...]:
        row, query, _ = at(*index)
        return row, query, 0

    lanes = pl.BlockSpec((None, 1, tile), of_key)
    return [pl.BlockSpec(memory_space=pltpu.SMEM), lanes, lanes, pl.BlockSpec((None, tile, 1), of_query)]


def _compiler_params() -> pltpu.CompilerParams:
    order = ("parallel", "parallel", "parallel", "arbitrary")
    return pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=_VECTOR_MEMORY)


def _forward_kernel(
    window: Any, ends: Any, key_at: Any, query_at: Any, q: Any, k: Any, v: Any, out: Any, normalizers: Any, peak: Any,
    total: Any, sums: Any, *, settings: _Settings,
) -> None:  # fmt: skip
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        peak[...] = jnp.full_like(peak, _MASKED)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    @pl.when(_read(ends, i, j, settings.tile))
    def _() -> None:
        scores = _scores(q, k, settings)
        mask = _mask(window, ends, key_at, query_at, i, j, settings)
        scores = jnp.where(mask, scores, _MASKED)
        higher = jnp.maximum(peak[...], jnp.max(scores, axis=1, keepdims=True))
        # A row may read nothing of this tile: its maximum is then _MASKED still, and exp(0) would count.
        mass = jnp.where(mask, jnp.exp(scores - higher), 0.0)
        shrink = jnp.exp(peak[...] - higher)
        total[...] = shrink * total[...] + jnp.sum(mass, axis=1, keepdims=True)
        sums[...] = shrink * sums[...] + _product(mass.astype(v.dtype), v[...], 1, 0)
        peak[...] = higher

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        out[...] = (sums[...] / total[...]).astype(out.dtype)
        normalizers[...] = peak[...] + jnp.log(total[...])


def _query_kernel(
    window: Any, ends: Any, key_at: Any, query_at: Any, q: Any, k: Any, v: Any, gradient: Any, normalizers: Any,
    inner: Any, dq: Any, sums: Any, *, settings: _Settings,
) -> None:  # fmt: skip
    i, j = pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(_read(ends, i, j, settings.tile))
    def _() -> None:
        mask = _mask(window, ends, key_at, query_at, i, j, settings)
        _, dscores = _recompute(q, k, v, gradient, normalizers, inner, mask, settings)
        sums[...] += _product(dscores.astype(k.dtype), k[...], 1, 0)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        dq[...] = sums[...].astype(dq.dtype)


def _key_kernel(
    window: Any, ends: Any, key_at: Any, query_at: Any, q: Any, k: Any, v: Any, gradient: Any, normalizers: Any,
    inner: Any, dk: Any, dv: Any, key_sums: Any, value_sums: Any, *, settings: _Settings, tiles: int,
) -> None:  # fmt: skip
    j, n = pl.program_id(2), pl.program_id(3)
    i = n % tiles

    @pl.when(n == 0)
    def _() -> None:
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    @pl.when(_read(ends, i, j, settings.tile))
    def _() -> None:
        mask = _mask(window, ends, key_at, query_at, i, j, settings)
        probabilities, dscores = _recompute(q, k, v, gradient, normalizers, inner, mask, settings)
        value_sums[...] += _product(probabilities.astype(gradient.dtype), gradient[...], 0, 0)
        key_sums[...] += _product(dscores.astype(q.dtype), q[...], 0, 0)

    @pl.when(n == pl.num_programs(3) - 1)
    def _() -> None:
        dk[...] = key_sums[...].astype(dk.dtype)
        dv[...] = value_sums[...].astype(dv.dtype)


def _read(ends: Any, i: Any, j: Any, tile: int) -> Any:
    """Whether a query of tile i may read a key of tile j: not behind it, and itself or some subtree reaches it."""
    return (j == i) | ((j < i) & (jnp.max(ends[...]) > i * tile))


def _mask(window: Any, ends: Any, key_at: Any, query_at: Any, i: Any, j: Any, settings: _Settings) -> Array:
    """Which keys of tile j the queries of tile i read: bool[tile, tile]."""
    shape = (settings.tile, settings.tile)
    reader = i * settings.tile + lax.broadcasted_iota(jnp.int32, shape, 0)
    read = j * settings.tile + lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = ((read <= reader) & (reader < jnp.broadcast_to(ends[...], shape))) | (read == reader)
    if not settings.windowed:
        return mask
    back = jnp.broadcast_to(query_at[...], shape) - jnp.broadcast_to(key_at[...], shape)
    return mask & (back < window[0])


def _scores(q: Any, k: Any, settings: _Settings) -> Array:
    scores = _product(q[...], k[...], 1, 1) * settings.scale
    if settings.soft_cap is None:
        return scores
    return settings.soft_cap * jnp.tanh(scores * (1.0 / settings.soft_cap))


def _recompute(
    q: Any, k: Any, v: Any, gradient: Any, normalizers: Any, inner: Any, mask: Array, settings: _Settings
) -> tuple[Array, Array]:
    """Probabilities of a tile, and the gradient of its raw products q.k, f32[tile, tile]."""
    scores = _scores(q, k, settings)
    # Masked before the exponential: a forbidden score may lie far above its row's log-normaliser.
    probabilities = jnp.exp(jnp.where(mask, scores - normalizers[...], _MASKED))
    toward = _product(gradient[...], v[...], 1, 1) - inner[...]
    slope = settings.scale
    if settings.soft_cap is not None:
        slope = slope * (1.0 - jnp.square(scores * (1.0 / settings.soft_cap)))
    return probabilities, probabilities * toward * slope


def _product(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """f32 product of two matrices, summed over these axes."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)
