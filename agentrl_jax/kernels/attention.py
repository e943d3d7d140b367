"""Attention over packed forest rows: blocks of queries forward, recomputed backward; Pallas kernels on a TPU.

Plain JAX is the reference and runs everywhere. Where a program is compiled for a TPU, `kernels.pallas.attention` takes
its place, on each device's rows and heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from agentrl_jax.kernels.head import axes_of, dividing, vary
from agentrl_jax.kernels.pallas import attention as tiled

# A block of queries reads only the keys before its end, so blocks spare almost half of the work, and their
# scores stay in cache. At most about 8 of them are unrolled, until the scores of one block grow too large.
_SMALLEST_BLOCK, _LARGEST_BLOCK, _BLOCKS = 128, 1024, 8
_MASKED = -1e30  # finite: no row of scores and no gradient is ever NaN


def forest_attention(
    q: Array, k: Array, v: Array, subtree_ends: Array, *, scale: float,
    positions: Array | None = None, window: Array | int | None = None, soft_cap: float | None = None,
    row_axes: tuple[str, ...] = ("data", "fsdp"), head_axes: tuple[str, ...] = ("tensor",),
) -> Array:  # fmt: skip
    """Softmax attention in which a token reads exactly its ancestors and itself.

    `out[i] = sum_j softmax_j(cap(scale * q[i].k[j])) v[j]` over the j with `j <= i < subtree_ends[j]`
    and, with a window, `positions[i] - positions[j] < window`; `cap(s) = soft_cap * tanh(s / soft_cap)`,
    or s without a soft cap. Query head h reads key head `h // (H / J)` (grouped queries). Scores and
    softmax are f32. The backward pass recomputes the probabilities from their log-normalisers, so that
    only the inputs and the output are kept between the passes, never [T, T].

    On a TPU the scores never reach memory (`kernels.pallas.attention`). A kernel is opaque to the compiler's
    partitioner, so on a mesh it runs in a `shard_map` over `row_axes` and `head_axes`, as far as the mesh has them
    and they divide B and J; an axis named in neither repeats the work.

    A padding token (`subtree_ends[i] == i`) reads itself alone: its output and its gradient are
    finite, and nothing reads it.

    Args:
      q: [B, T, H, C] queries.
      k: [B, T, J, C] keys; J divides H.
      v: [B, T, J, C] values.
      subtree_ends: i32[B, T] first column after each token's subtree.
      scale: what the scores are multiplied by, usually `C ** -0.5`.
      positions: i32[B, T] distances from the root; a window needs them.
      window: i32 scalar, at least 1, traced or not: how many positions a token reads back, itself included.
      soft_cap: bound of the scores, or None.
      row_axes: mesh axes over which the rows are split.
      head_axes: mesh axes over which the heads are split.

    Returns:
      [B, T, H, C] in the dtype of `v`.

    Raises:
      ValueError: the shapes do not fit together, or a window comes without positions.

    Grouped queries: Ainslie et al. 2023 (https://arxiv.org/abs/2305.13245); recomputation from
    log-normalisers: Dao et al. 2022 (https://arxiv.org/abs/2205.14135).
    """
    _check(q, k, v, subtree_ends)
    if window is not None and (positions is None or positions.shape != subtree_ends.shape):
        found = None if positions is None else positions.shape
        raise ValueError(f"forest_attention: positions: a window needs {subtree_ends.shape}, got {found}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"forest_attention: soft_cap: expected a number above 0 or None, got {soft_cap}")
    reach = Reach(subtree_ends) if window is None else Reach(subtree_ends, positions, jnp.asarray(window, jnp.int32))
    rows, length, heads, width = q.shape
    groups = k.shape[2]
    axes = frozenset().union(*map(axes_of, (q, k, v, *jax.tree.leaves(reach))))
    grouped = q.reshape(rows, length, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    arrays = (grouped, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), reach)
    out = _attention(*jax.tree.map(lambda x: vary(x, axes), arrays), _Settings(scale, soft_cap, row_axes, head_axes))
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(rows, length, heads, width)


class Reach(NamedTuple):
    """What decides which columns a token reads."""

    subtree_ends: Array  # i32[B, T]
    positions: Array | None = None  # i32[B, T]
    window: Array | None = None  # i32[]


def _readable(reach: Reach, start: int, stop: int) -> Array:
    """`readable`, cut to the window where there is one."""
    mask = readable(reach.subtree_ends, start, stop)
    if reach.positions is None or reach.window is None:
        return mask
    back = reach.positions[:, start:stop, None] - reach.positions[:, None, :stop]
    return mask & (back < reach.window)


def readable(subtree_ends: Array, start: int, stop: int) -> Array:
    """Which of the first `stop` columns the tokens in columns `start..stop-1` read: bool[B, stop-start, stop].

    The forest rule `j <= i < subtree_ends[j]`, and every token itself (which adds padding only).
    """
    reader = jnp.arange(start, stop, dtype=jnp.int32)[None, :, None]
    read = jnp.arange(stop, dtype=jnp.int32)[None, None, :]
    inside = reader < subtree_ends[:, None, :stop]
    return ((read <= reader) & inside) | (read == reader)


class _Settings(NamedTuple):
    scale: float
    soft_cap: float | None
    row_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()


# Inside, heads come first: q [B, J, R, T, C] with R = H / J, k and v [B, J, T, C].


def _primal(q: Array, k: Array, v: Array, reach: Reach, settings: _Settings) -> Array:
    return _forward(q, k, v, reach, settings)[0]


# Every branch is traced on every platform; jitted, the kernels are traced once for equal shapes.
_tiled_forward = jax.jit(tiled.forward, static_argnames="settings")
_tiled_backward = jax.jit(tiled.backward, static_argnames="settings")


def _forward(q: Array, k: Array, v: Array, reach: Reach, settings: _Settings) -> tuple[Array, tuple[Any, ...]]:
    kernel = partial(_tiled_forward, settings=tiled.Settings(settings.scale, settings.soft_cap))
    out, normalizers = lax.platform_dependent(
        q, k, v, reach,
        tpu=lambda q, k, v, reach: per_device(kernel, settings.row_axes, settings.head_axes)(q, k, v, *reach),
        default=partial(_plain_forward, settings=settings),
    )  # fmt: skip
    return out, (q, k, v, reach, out, normalizers)


def _backward(settings: _Settings, kept: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, reach, out, normalizers = kept
    inner = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    kernel = partial(_tiled_backward, settings=tiled.Settings(settings.scale, settings.soft_cap))

    def tpu(q: Array, k: Array, v: Array, reach: Reach, *more: Array) -> Any:
        return per_device(kernel, settings.row_axes, settings.head_axes)(q, k, v, *reach, *more)

    operands = (q, k, v, reach, inner, normalizers, gradient)
    plain = partial(_plain_backward, settings=settings)
    return *lax.platform_dependent(*operands, tpu=tpu, default=plain), None


def _plain_forward(q: Array, k: Array, v: Array, reach: Reach, settings: _Settings) -> tuple[Array, Array]:
    outs, normalizers = [], []
    for start, stop in _blocks(q.shape[3]):
        scores = _cap(_scores(q[..., start:stop, :], k[:, :, :stop], settings.scale), settings.soft_cap)
        scores = jnp.where(_readable(reach, start, stop)[:, None, None], scores, _MASKED)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        unnormalized = jnp.exp(scores - highest)
        total = jnp.sum(unnormalized, axis=-1, keepdims=True)
        out = _mix(unnormalized.astype(v.dtype), v[:, :, :stop]) / total
        outs.append(out.astype(v.dtype))
        normalizers.append((highest + jnp.log(total))[..., 0])
    return jnp.concatenate(outs, axis=3), jnp.concatenate(normalizers, axis=3)


def _plain_backward(
    q: Array, k: Array, v: Array, reach: Reach, inner: Array, normalizers: Array, gradient: Array, settings: _Settings
) -> tuple[Array, Array, Array]:
    scale, soft_cap = settings.scale, settings.soft_cap
    dk, dv = _zeros(k), _zeros(v)
    dq = []
    for start, stop in _blocks(q.shape[3]):
        queries, wanted = q[..., start:stop, :], gradient[..., start:stop, :]
        scores = _cap(_scores(queries, k[:, :, :stop], scale), soft_cap)
        mask = _readable(reach, start, stop)[:, None, None]
        # Masked before the exponential: a forbidden score may lie far above its row's log-normaliser.
        probabilities = jnp.exp(jnp.where(mask, scores - normalizers[..., start:stop, None], _MASKED))
        toward = _scores(wanted, v[:, :, :stop], 1.0) - inner[..., start:stop, None]
        slope = scale if soft_cap is None else scale * (1.0 - jnp.square(scores * (1.0 / soft_cap)))
        dscores = (probabilities * toward * slope).astype(q.dtype)
        dv = dv.at[:, :, :stop].add(_pool(probabilities.astype(v.dtype), wanted))
        dk = dk.at[:, :, :stop].add(_pool(dscores, queries))
        dq.append(_mix(dscores, k[:, :, :stop]).astype(q.dtype))
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype)


_attention = jax.custom_vjp(_primal, nondiff_argnums=(4,))
_attention.defvjp(_forward, _backward)


def per_device(function: Any, row_axes: tuple[str, ...], head_axes: tuple[str, ...]) -> Any:
    """`function(q, k, v, subtree_ends, positions, window, *more)` on each device's rows and heads.

    q and `more` are [B, J, ...], k and v too; the results likewise. The mesh is the one that q lies on; without one,
    and inside `shard_map` or `pmap`, where every device already has its own, the function itself.
    """

    def run(q: Array, k: Array, v: Array, *rest: Array | None) -> Any:
        mesh: Any = jax.typeof(q).sharding.mesh
        automatic = {
            axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual
        }
        if not automatic:
            return function(q, k, v, *rest)
        over = lambda axes, size: dividing({a: mesh.shape[a] for a in axes if a in automatic}, size)  # noqa: E731
        rows, heads = over(row_axes, q.shape[0]), over(head_axes, q.shape[1])
        split, row = PartitionSpec(rows, heads), PartitionSpec(rows)
        specs = (split, split, split, row, row, PartitionSpec(), *(split,) * len(rest[3:]))
        # Unchecked, as the interpreter of kernels demands: nothing is summed over devices, nothing differentiated.
        mapped = partial(jax.shard_map, mesh=mesh, axis_names=automatic, check_vma=False)
        return mapped(function, in_specs=specs, out_specs=split)(q, k, v, *rest)

    return run


def _zeros(model: Array) -> Array:
    return vary(jnp.zeros(model.shape, jnp.float32), axes_of(model))


def _cap(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores * (1.0 / soft_cap))


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
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def by_columns(left: Array, right: Array) -> Array:
        # The other way round, a CPU first copies [Q, S] into columns. The barrier keeps the transpose where it is.
        return lax.optimization_barrier(product("bjqs,bjqc->bjcs", left, right)).swapaxes(2, 3)

    return lax.platform_dependent(left, right, cpu=by_columns, default=partial(product, "bjqs,bjqc->bjsc"))


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
