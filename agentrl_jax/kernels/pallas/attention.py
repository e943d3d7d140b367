"""Forest attention on a TPU in tiles: scores live in vector memory only, tiles that nobody reads are not visited.

The rule and the numbers are those of `kernels.attention`, which calls `forward` and `backward` when it is compiled for
a TPU. They see the arrays of one device. Heads come first: q [B, J, R, T, C] with R = H / J, k and v [B, J, T, C].

Inside, tokens lie along the lanes: operands are [C, T], scores [keys, queries]. A head narrower than 128 then wastes no
memory, a maximum over keys runs down the sublanes, and what belongs to a query is one row of lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_MASKED = -1e30  # finite: no row of scores and no gradient is ever NaN
_LANES, _SMALL_TILE, _LARGE_TILE, _LONG = 128, 512, 1024, 8192
_VECTOR_MEMORY = 60 << 20


class Settings(NamedTuple):
    """What is fixed when the kernels are built. A tile of 0 is chosen by the length of the rows."""

    scale: float
    soft_cap: float | None
    tile: int = 0  # queries and keys at once, a multiple of 128 on a TPU
    interpret: bool = False  # run as plain JAX, where there is no TPU


class _Reach(NamedTuple):
    """Key column j is read by query i where `j <= i < ends[j]` and, windowed, `positions[j] > floors[i]`."""

    ends: Array  # i32[B, 1, T], above the column itself: every token reads itself
    positions: Array | None  # i32[B, 1, T]
    floors: Array | None  # i32[B, 1, T], positions - window


class _Visits(NamedTuple):
    """Which tiles of queries meet which tiles of keys, in order. Kept in scalar memory: they steer the transfers."""

    queries: Array  # i32[B, P]; beyond a row's count, the last visit again, which moves nothing
    keys: Array  # i32[B, P]
    counts: Array  # i32[B]


def forward(
    q: Array, k: Array, v: Array, subtree_ends: Array, positions: Array | None, window: Array | None, settings: Settings
) -> tuple[Array, Array]:
    """[B, J, R, T, C] outputs in the dtype of `v`, and the log-normalisers f32[B, J, R, T] of the scores.

    A tile of keys is visited where some query of the tile may read it: not behind it, reached by a subtree of it, and
    within the window. A row of many short documents costs about its documents, not T^2. T need not be a multiple
    of the tile. Dao et al. 2022 (https://arxiv.org/abs/2205.14135).
    """
    rows, groups, repeats, length, width = q.shape
    tile, reach, (qt, kt, vt) = _laid_out(settings, (q, k, v), subtree_ends, positions, window)
    settings = settings._replace(tile=tile)
    visits = _visits(reach, tile, by_key=False)
    query, scalar, key = _specs(width, tile, lambda b, h, s: (b, h), lambda b, h, s: (b, lax.div(h, repeats)))
    out, normalizers = _call(
        partial(_forward_kernel, settings=settings),
        visits,
        grid=(rows, groups * repeats, jnp.max(visits.counts)),
        in_specs=[*_reach_specs(reach, tile), query, key, key],
        out_specs=[query, scalar],
        out_shape=[_like(qt, qt.shape, v.dtype), _like(qt, (*qt.shape[:2], 1, qt.shape[3]), jnp.float32)],
        scratch_shapes=[pltpu.VMEM((1, tile), jnp.float32)] * 2 + [pltpu.VMEM((width, tile), jnp.float32)],
        interpret=settings.interpret,
    )(*jax.tree.leaves(reach), qt, kt, vt)
    return _restored(out, q.shape), normalizers[..., :length].reshape(q.shape[:-1])


def backward(
    q: Array, k: Array, v: Array, subtree_ends: Array, positions: Array | None, window: Array | None,
    inner: Array, normalizers: Array, gradient: Array, settings: Settings,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of q, k and v, from probabilities recomputed by their log-normalisers f32[B, J, R, T].

    One sweep for the queries, one for keys and values. `inner` is `sum_c gradient * out`, f32[B, J, R, T].
    """
    rows, groups, repeats, _, width = q.shape
    tile, reach, (qt, kt, vt, gt) = _laid_out(settings, (q, k, v, gradient), subtree_ends, positions, window)
    settings, padding = settings._replace(tile=tile), qt.shape[3] - q.shape[3]
    flat = lambda x: jnp.pad(x.reshape(rows, groups * repeats, 1, -1), ((0, 0),) * 3 + ((0, padding),))  # noqa: E731
    operands = (*jax.tree.leaves(reach), qt, kt, vt, gt, flat(normalizers), flat(inner))
    visits = _visits(reach, tile, by_key=False)
    query, scalar, key = _specs(width, tile, lambda b, h, s: (b, h), lambda b, h, s: (b, lax.div(h, repeats)))
    dq = _call(
        partial(_query_kernel, settings=settings),
        visits,
        grid=(rows, groups * repeats, jnp.max(visits.counts)),
        in_specs=[*_reach_specs(reach, tile), query, key, key, query, scalar, scalar],
        out_specs=query,
        out_shape=_like(qt, qt.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((width, tile), jnp.float32)],
        interpret=settings.interpret,
    )(*operands)
    visits = _visits(reach, tile, by_key=True)  # the query heads of a group innermost: keys and values stay
    query, scalar, key = _specs(width, tile, lambda b, g, s, r: (b, g * repeats + r), lambda b, g, s, r: (b, g))
    dk, dv = _call(
        partial(_key_kernel, settings=settings),
        visits,
        grid=(rows, groups, jnp.max(visits.counts), repeats),
        in_specs=[*_reach_specs(reach, tile), query, key, key, query, scalar, scalar],
        out_specs=[key, key],
        out_shape=[_like(x, x.shape, x.dtype) for x in (kt, vt)],
        scratch_shapes=[pltpu.VMEM((width, tile), jnp.float32)] * 2,
        interpret=settings.interpret,
    )(*operands)
    return _restored(dq, q.shape), _restored(dk, k.shape), _restored(dv, v.shape)


def _laid_out(
    settings: Settings, arrays: tuple[Array, ...], subtree_ends: Array, positions: Array | None, window: Array | None
) -> tuple[int, _Reach, list[Array]]:
    """The tile, the bounds and [B, heads, C, T] of every array, with T a multiple of the tile."""
    rows, length = subtree_ends.shape
    most = _LARGE_TILE if length >= _LONG else _SMALL_TILE
    tile = settings.tile or min(most, length + -length % _LANES)
    padding = -length % tile
    ends = jnp.pad(subtree_ends, ((0, 0), (0, padding)))
    ends = jnp.maximum(ends, 1 + lax.broadcasted_iota(jnp.int32, ends.shape, 1))[:, None]
    reach = _Reach(ends, None, None)
    if positions is not None and window is not None:
        where = jnp.pad(positions, ((0, 0), (0, padding)), mode="edge")[:, None]
        reach = _Reach(ends, where, where - window)
    wide = (x.reshape(rows, -1, *x.shape[-2:]).swapaxes(2, 3) for x in arrays)
    return tile, reach, [jnp.pad(x, ((0, 0),) * 3 + ((0, padding),)) for x in wide]


def _restored(x: Array, shape: tuple[int, ...]) -> Array:
    """[B, heads, C, T padded] -> [..., T, C] as in `shape`."""
    return x[..., : shape[-2]].swapaxes(2, 3).reshape(shape)


def _visits(reach: _Reach, tile: int, *, by_key: bool) -> _Visits:
    """The visits of each row, tile of queries by tile of queries (its own keys last), or of keys (its own first)."""
    rows, _, length = reach.ends.shape
    tiles = length // tile
    every = [(i, j) for i in range(tiles) for j in range(i + 1)]
    queries, keys = np.asarray(sorted(every, key=lambda pair: pair[::-1]) if by_key else every, np.int32).T
    tiled = lambda x: x.reshape(rows, tiles, tile)  # noqa: E731
    met = jnp.max(tiled(reach.ends), axis=2)[:, keys] > jnp.asarray(queries * tile)[None]
    if reach.positions is not None and reach.floors is not None:
        highest = jnp.max(tiled(reach.positions), axis=2)[:, keys]
        met &= highest > jnp.min(tiled(reach.floors), axis=2)[:, queries]
    counts = jnp.sum(met, axis=1, dtype=jnp.int32)
    order = jnp.argsort(~met, axis=1, stable=True)
    # Both orders end with the last tile of queries on its own keys, which is always visited.
    order = jnp.where(lax.broadcasted_iota(jnp.int32, order.shape, 1) < counts[:, None], order, len(every) - 1)
    return _Visits(jnp.asarray(queries)[order], jnp.asarray(keys)[order], counts)


def _call(
    kernel: Any, visits: _Visits, *, grid: Any, in_specs: Any, out_specs: Any, scratch_shapes: Any, **rest: Any
) -> Any:
    order: Any = ("parallel", "parallel", *("arbitrary",) * (len(grid) - 2))
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch_shapes
    )
    params = pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=_VECTOR_MEMORY)
    return partial(pl.pallas_call(kernel, grid_spec=spec, compiler_params=params, **rest), *visits)


def _like(model: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """A result that varies over the mesh axes that `model` varies over."""
    kind: Any = jax.typeof(model)
    name = "vma" if hasattr(kind, "vma") else "manual_axis_type"  # releases differ
    varying: dict[str, Any] = {name: getattr(kind, name)}
    return jax.ShapeDtypeStruct(shape, dtype, **varying)


At = Callable[..., tuple[Any, Any]]


def _specs(width: int, tile: int, at_query: At, at_key: At) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Tiles of [B, H, C, T] and [B, H, 1, T] at a query, of [B, J, C, T] at a key. The last arguments are visits."""
    of_query = lambda *a: (*at_query(*a[:-3]), 0, a[-3][a[0], a[2]])  # noqa: E731
    of_key = lambda *a: (*at_key(*a[:-3]), 0, a[-2][a[0], a[2]])  # noqa: E731
    block = lambda height, of: pl.BlockSpec((None, None, height, tile), of)  # noqa: E731
    return block(width, of_query), block(1, of_query), block(width, of_key)


def _reach_specs(reach: _Reach, tile: int) -> list[pl.BlockSpec]:
    key = pl.BlockSpec((None, 1, tile), lambda *a: (a[0], 0, a[-2][a[0], a[2]]))
    query = pl.BlockSpec((None, 1, tile), lambda *a: (a[0], 0, a[-3][a[0], a[2]]))
    return [key] if reach.floors is None else [key, key, query]


def _forward_kernel(queries: Any, keys: Any, counts: Any, *refs: Any, settings: Settings) -> None:
    *reach, q, k, v, out, normalizers, peak, total, sums = refs
    row, step = pl.program_id(0), pl.program_id(2)
    i, j, real, first = _here(queries, keys, counts, row, step)

    @pl.when(real & first)
    def _() -> None:
        peak[...] = jnp.full_like(peak, _MASKED)
        total[...] = jnp.zeros_like(total)
        sums[...] = jnp.zeros_like(sums)

    @pl.when(real)
    def _() -> None:
        # A query that reads nothing of a tile adds exp(0) for each of its keys. The next tile of which it reads
        # something wipes that out, by a factor of exp(-1e30 - peak) = 0; the tile with itself comes last.
        scores = jnp.where(_mask(reach, i, j, settings.tile), _scores(q, k, settings), _MASKED)
        higher = jnp.maximum(peak[...], jnp.max(scores, axis=0, keepdims=True))
        mass, shrink = jnp.exp(scores - higher), jnp.exp(peak[...] - higher)
        total[...] = shrink * total[...] + jnp.sum(mass, axis=0, keepdims=True)
        sums[...] = shrink * sums[...] + _product(v[...], mass.astype(v.dtype), 1, 0)
        peak[...] = higher

    @pl.when(real & (i == j))
    def _() -> None:
        out[...] = (sums[...] / total[...]).astype(out.dtype)
        normalizers[...] = peak[...] + jnp.log(total[...])


def _query_kernel(queries: Any, keys: Any, counts: Any, *refs: Any, settings: Settings) -> None:
    *reach, q, k, v, gradient, normalizers, inner, dq, sums = refs
    row, step = pl.program_id(0), pl.program_id(2)
    i, j, real, first = _here(queries, keys, counts, row, step)

    @pl.when(real & first)
    def _() -> None:
        sums[...] = jnp.zeros_like(sums)

    @pl.when(real)
    def _() -> None:
        mask = _mask(reach, i, j, settings.tile)
        _, dscores = _recompute(q, k, v, gradient, normalizers, inner, mask, settings)
        sums[...] += _product(k[...], dscores.astype(k.dtype), 1, 0)

    @pl.when(real & (i == j))
    def _() -> None:
        dq[...] = sums[...].astype(dq.dtype)


def _key_kernel(queries: Any, keys: Any, counts: Any, *refs: Any, settings: Settings) -> None:
    *reach, q, k, v, gradient, normalizers, inner, dk, dv, key_sums, value_sums = refs
    row, step, repeat = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    i, j, real, _ = _here(queries, keys, counts, row, step)
    following = jnp.minimum(step + 1, counts[row] - 1)
    last = (step == following) | (keys[row, following] != j)

    @pl.when(real & (i == j) & (repeat == 0))
    def _() -> None:
        key_sums[...] = jnp.zeros_like(key_sums)
        value_sums[...] = jnp.zeros_like(value_sums)

    @pl.when(real)
    def _() -> None:
        mask = _mask(reach, i, j, settings.tile)
        probabilities, dscores = _recompute(q, k, v, gradient, normalizers, inner, mask, settings)
        value_sums[...] += _product(gradient[...], probabilities.astype(gradient.dtype), 1, 1)
        key_sums[...] += _product(q[...], dscores.astype(q.dtype), 1, 1)

    @pl.when(real & last & (repeat == pl.num_programs(3) - 1))
    def _() -> None:
        dk[...] = key_sums[...].astype(dk.dtype)
        dv[...] = value_sums[...].astype(dv.dtype)


def _here(queries: Any, keys: Any, counts: Any, row: Any, step: Any) -> tuple[Any, Any, Any, Any]:
    """Tile of queries, tile of keys, whether the visit counts, and whether it is its queries' first."""
    before = jnp.maximum(step - 1, 0)
    i = queries[row, step]
    return i, keys[row, step], step < counts[row], (step == 0) | (queries[row, before] != i)


def _mask(reach: Any, i: Any, j: Any, tile: int) -> Array:
    """Which keys of tile j the queries of tile i read: bool[keys, queries]."""
    reader = i * tile + lax.broadcasted_iota(jnp.int32, (1, tile), 1)
    read = j * tile + lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    mask = (read <= reader) & (reader < reach[0][...].T)
    return mask if len(reach) == 1 else mask & (reach[2][...] < reach[1][...].T)


def _scores(q: Any, k: Any, settings: Settings) -> Array:
    scores = _product(k[...], q[...], 0, 0) * settings.scale
    if settings.soft_cap is None:
        return scores
    return settings.soft_cap * jnp.tanh(scores * (1.0 / settings.soft_cap))


def _recompute(
    q: Any, k: Any, v: Any, gradient: Any, normalizers: Any, inner: Any, mask: Array, settings: Settings
) -> tuple[Array, Array]:
    """Probabilities of a tile, and the gradient of its raw products k.q, f32[keys, queries]."""
    scores = _scores(q, k, settings)
    # Masked before the exponential: a forbidden score may lie far above its query's log-normaliser.
    probabilities = jnp.exp(jnp.where(mask, scores - normalizers[...], _MASKED))
    toward = _product(v[...], gradient[...], 0, 0) - inner[...]
    slope = settings.scale
    if settings.soft_cap is not None:
        slope = slope * (1.0 - jnp.square(scores * (1.0 / settings.soft_cap)))
    return probabilities, probabilities * toward * slope


def _product(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """f32 product of two matrices, summed over these axes."""
    return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), preferred_element_type=jnp.float32)
