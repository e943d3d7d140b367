"""The parts of a loss head: visits to chunks of action columns, their logits, their scores, their gradients.

`logprobs`, `fused_loss`, `vocab_sharded` and `mesh_head` put them together. The B rows of T columns of a batch are
joined to E longer ones, one for each share of the rows that a mesh keeps apart: no row waits for the one with most
actions. Below, E rows are visited in the order of a `Plan`, N columns long, S columns at a time; V is the vocabulary,
or this device's share of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.typing import DTypeLike

from agentrl_jax.kernels.kept import unpack, words

_AUTO = AxisType.Auto
_NEVER = -1e30  # the logit of a column that stands for no token; finite, so that 0 * _NEVER is 0


class Head(NamedTuple):
    """What is fixed about a projection; hashable."""

    shape: tuple[int, int]  # B, T
    shares: int  # E; divides B
    columns: int  # S
    temperature: float
    soft_cap: float | None
    entropy: bool
    accumulator: DTypeLike | None
    pallas: bool = False
    axis_name: str | None = None  # mesh axis over which the vocabulary is split
    vocabulary: int | None = None  # tokens over all shares; columns beyond are padding
    width_axis: str | None = None  # mesh axis over which the unembedding's width is split, as rows are


class Plan(NamedTuple):
    """The batch's columns, rows joined (`fold`), and the order in which they are visited. L = B * T / E."""

    tokens: Array  # i32[E, L]
    parents: Array  # i32[E, L]
    action_mask: Array  # bool[E, L]
    order: Array  # i32[E, N] columns, each row's actions first
    chunks: Array  # i32[] that hold an action of any row
    kept: Array | None = None  # u32[E, L, words(V)] what each token was drawn from, as bits; None: the vocabulary


class Chunk(NamedTuple):
    """A visit to S columns of every row."""

    columns: Array  # i32[E, S] of the joined rows
    reads: Array  # i32[E, S] column whose hidden state predicts it
    targets: Array  # i32[E, S]
    active: Array  # bool[E, S]
    kept: Array | None  # u32[E, S, words(V)]


class Scores(NamedTuple):
    """What is known of the distributions at a chunk's columns, or at all of a plan's."""

    logprobs: Array  # f32[E, S] of the targets, 0 where idle
    peaks: Array  # f32[E, S] the highest logit
    totals: Array  # f32[E, S] sum over the vocabulary of exp(logit - peak)
    entropy: Array | None  # f32[E, S], 0 where idle


Pulls = Callable[[Array, Chunk, Array], tuple[Scores, Array, Array | None]]


def make_head(
    name: str,
    shape: tuple[int, ...],
    chunk: int,
    temperature: float,
    soft_cap: float | None,
    entropy: bool,
    accumulator: DTypeLike | None,
    shares: int = 1,
    **rest: Any,
) -> Head:
    """The head of a batch of shape (B, T) in E = `shares`, with chunks of at most `chunk` tokens of each.

    Refuses settings without a meaning.
    """
    if chunk < 1:
        raise ValueError(f"{name}: chunk: expected at least 1 token, got {chunk}")
    if not temperature > 0:
        raise ValueError(f"{name}: temperature: expected a number above 0, got {temperature}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{name}: soft_cap: expected a number above 0, or None for no cap, got {soft_cap}")
    if accumulator is not None and not jnp.issubdtype(accumulator, jnp.floating):
        raise ValueError(f"{name}: accumulator: expected a floating dtype, or None, got {accumulator}")
    rows, length = shape
    columns = columns_of(rows * length, chunk, shares)
    return Head((rows, length), shares, columns, temperature, soft_cap, entropy, accumulator, **rest)


def columns_of(tokens: int, chunk: int, shares: int) -> int:
    """S: how many columns of each of E = `shares` joined rows make a chunk of at most `chunk` tokens of each."""
    return min(tokens // shares, chunk)


def shares_of(rows: int, row_axes: tuple[str, ...], *arrays: Array) -> int:
    """E: over how many devices a program that the compiler partitions spreads `rows` rows, by the mesh of its arrays.

    Inside `shard_map` and `pmap` each device has its own rows: 1.
    """
    for array in arrays:
        mesh: Any = jax.typeof(array).sharding.mesh
        sizes = {a: mesh.shape[a] for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == _AUTO}
        if sizes:
            return math.prod(sizes[axis] for axis in dividing({a: sizes[a] for a in row_axes if a in sizes}, rows))
    return 1


def dividing(sizes: dict[str, int], whole: int) -> tuple[str, ...]:
    """The first of the axes, as many as together divide `whole`."""
    taken, product = [], 1
    for axis, size in sizes.items():
        if whole % (product * size):
            break
        taken, product = [*taken, axis], product * size
    return tuple(taken)


def fold(head: Head, values: Array) -> Array:
    """[B, T, ...] -> [E, L, ...]: the rows of a share one after another."""
    return values.reshape(head.shares, -1, *values.shape[2:])


def check_form(name: str, form: str, *forms: str) -> None:
    if form not in forms:
        raise ValueError(f"{name}: form: expected one of {', '.join(map(repr, forms))}, got {form!r}")


def check_arrays(
    name: str, hidden: Array, unembedding: Array, tokens: Array, parents: Array, action_mask: Array
) -> None:
    """Refuses what does not fit together, in the words of the public function `name`."""
    if hidden.ndim != 3 or unembedding.ndim != 2 or hidden.shape[2] != unembedding.shape[1]:
        shapes = f"{hidden.shape} and {unembedding.shape}"
        raise ValueError(f"{name}: expected hidden [B, T, D] and unembedding [V, D], got {shapes}")
    for field, array in (("tokens", tokens), ("parents", parents), ("action_mask", action_mask)):
        if array.shape != hidden.shape[:2]:
            raise ValueError(f"{name}: {field}: expected {hidden.shape[:2]}, got {array.shape}")
    for field, array in (("tokens", tokens), ("parents", parents)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name}: {field}: expected integers, got {array.dtype}")
    if action_mask.dtype != jnp.bool_:
        raise ValueError(f"{name}: action_mask: expected bool, got {action_mask.dtype}: compare it, as in mask != 0")


def check_kept(name: str, kept: Array | None, tokens: Array, vocabulary: int) -> None:
    """Refuses sets of kept tokens that are not `kernels.kept.pack` of bool[B, T, V]."""
    expected = (*tokens.shape, words(vocabulary))
    if kept is not None and (kept.shape != expected or kept.dtype != jnp.uint32):
        raise ValueError(f"{name}: kept: expected uint32{list(expected)}, got {kept.dtype}{list(kept.shape)}")


def make_plan(head: Head, tokens: Array, parents: Array, action_mask: Array, kept: Array | None = None) -> Plan:
    """Which columns are visited when, and how many chunks of them there are."""
    rows, length = head.shape
    first = length * (jnp.arange(rows, dtype=jnp.int32) % (rows // head.shares))[:, None]
    parents = jnp.where(parents < 0, parents, parents + first.astype(parents.dtype))
    tokens, parents, action_mask = (fold(head, values) for values in (tokens, parents, action_mask))
    kept = None if kept is None else fold(head, kept)
    order = jnp.argsort(~action_mask, axis=1, stable=True)
    most = jnp.max(jnp.sum(action_mask, axis=1, dtype=jnp.int32))
    chunks = (most + (head.columns - 1)) // head.columns
    if head.axis_name is not None and (axes := tuple(axes_of(chunks))):
        chunks = lax.pmax(chunks, axes)  # a chunk holds collectives: all devices must visit the same number
    order = jnp.pad(order, ((0, 0), (0, -order.shape[1] % head.columns)))
    return Plan(tokens, parents, action_mask, order, chunks, kept)


def visit(head: Head, plan: Plan, index: Array) -> Chunk:
    """The chunk number `index`. A column of the padding is a visit to column 0, and not active."""
    start = index * head.columns
    columns = lax.dynamic_slice_in_dim(plan.order, start, head.columns, axis=1)
    real = start + jnp.arange(head.columns, dtype=jnp.int32)[None] < plan.tokens.shape[1]
    return Chunk(
        columns=columns,
        reads=jnp.maximum(take(plan.parents, columns), 0),
        targets=take(plan.tokens, columns),
        active=take(plan.action_mask, columns) & real,
        kept=None if plan.kept is None else take(plan.kept, columns),
    )


def take(values: Array, columns: Array) -> Array:
    """[E, L, ...] at columns i32[E, S] -> [E, S, ...]."""
    return jnp.take_along_axis(values, columns.reshape(*columns.shape, *[1] * (values.ndim - 2)), axis=1)


def restore(head: Head, plan: Plan, logprobs: Array, entropy: Array | None) -> tuple[Array, Array | None]:
    """[E, N] in the plan's order -> [B, T], 0 off actions."""
    rank = jnp.maximum(jnp.cumsum(plan.action_mask, axis=1, dtype=jnp.int32) - 1, 0)
    place = lambda values: jnp.where(plan.action_mask, take(values, rank), 0.0).reshape(head.shape)  # noqa: E731
    return place(logprobs), None if entropy is None else place(entropy)


def spread(head: Head, hidden: Array, *others: Any) -> Array:
    """Hidden states with rows joined, varying over every mesh axis that any array varies over but the vocabulary's.

    In `shard_map(check_vma=True)` the transpose of this step is the sum of gradients over devices. Elsewhere nothing
    varies.
    """
    axes = {axis for array in jax.tree.leaves((hidden, others)) for axis in axes_of(array)}
    return vary(fold(head, hidden), axes - {head.axis_name})


def whole(head: Head, hidden: Array, matrix: Array) -> Array:
    """The unembedding as the chunks read it: gathered where its width is split, varying as the hidden states do too."""
    if head.width_axis is not None:
        matrix = lax.all_gather(matrix, head.width_axis, axis=1, tiled=True)
    return vary(matrix, axes_of(hidden) | axes_of(matrix))


def summed(head: Head, dmatrix: Array, matrix: Array) -> Array:
    """The gradient by `matrix` from a device's part of that by `whole`: added up over devices once, in its own dtype.

    Where the width is split a device is left with its share alone, and only that goes over the other axes.
    """
    if head.width_axis is not None:
        dmatrix = lax.psum_scatter(dmatrix, head.width_axis, scatter_dimension=1, tiled=True)
    if missing := tuple(sorted(axes_of(dmatrix) - axes_of(matrix))):
        dmatrix = lax.psum(dmatrix, missing)
    return dmatrix.astype(matrix.dtype)


def axes_of(array: Array) -> frozenset[str]:
    """The mesh axes that an array varies over inside `shard_map(check_vma=True)`; none elsewhere."""
    kind: Any = jax.typeof(array)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying  # releases differ in the name


def vary(array: Array, axes: Set[str]) -> Array:
    """`array`, varying over `axes` as well."""
    missing = tuple(sorted(axes - axes_of(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def read(hidden: Array, matrix: Array, chunk: Chunk) -> Array:
    """[E, S, D] in the matrix's dtype. Zero where idle: what stands there must not reach the gradient."""
    states = take(hidden, chunk.reads).astype(matrix.dtype)
    return jnp.where(chunk.active[:, :, None], states, jnp.zeros((), matrix.dtype))


def project(head: Head, states: Array, matrix: Array, chunk: Chunk) -> tuple[Array, Callable[[Array], tuple[Array]]]:
    """Logits f32[E, S, V], and the pull-back from them to the raw projection."""
    raw = jnp.einsum("bsd,vd->bsv", states, matrix, preferred_element_type=jnp.float32)
    return jax.vjp(partial(_scale, head, chunk.kept), raw)


def _scale(head: Head, kept: Array | None, raw: Array) -> Array:
    capped = raw if head.soft_cap is None else head.soft_cap * jnp.tanh(raw * (1.0 / head.soft_cap))
    logits = capped * (1.0 / head.temperature)
    if kept is not None:  # what the sampler could not draw has no part in the distribution
        logits = jnp.where(_share(head, kept, raw.shape[-1]), logits, _NEVER)
    return logits if head.vocabulary is None else jnp.where(_ids(head, raw) < head.vocabulary, logits, _NEVER)


def _share(head: Head, kept: Array, size: int) -> Array:
    """bool[E, S, V] of the kept sets, or this device's share of them."""
    if head.axis_name is None:
        return unpack(kept, size)
    everything = lax.axis_size(head.axis_name) * size
    missing = words(everything) - kept.shape[-1]
    whole = unpack(jnp.pad(kept, ((0, 0), (0, 0), (0, missing))), everything)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(head.axis_name) * size, size, axis=2)


def _ids(head: Head, logits: Array) -> Array:
    """i32[1, 1, V]: the token that each column of the logits stands for."""
    size = logits.shape[-1]
    ids = jnp.arange(size, dtype=jnp.int32)[None, None]
    return ids if head.axis_name is None else lax.axis_index(head.axis_name) * size + ids


def measure(head: Head, logits: Array, chunk: Chunk) -> Scores:
    """Scores of a chunk from its logits. Sums over the vocabulary run over its mesh axis, too."""
    everywhere = (lambda x: x) if head.axis_name is None else partial(lax.psum, axis_name=head.axis_name)
    peak = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    if head.axis_name is not None:
        peak = lax.pmax(peak, head.axis_name)
    # From the peak down, before anything is added up: a logit of 20 is rounded to 2e-6, its distance to the peak less.
    shifted = logits - peak
    mass = jnp.exp(shifted)
    total = everywhere(jnp.sum(mass, axis=-1))
    targets = chunk.targets[:, :, None]
    if head.axis_name is None:
        chosen = jnp.take_along_axis(logits, targets, axis=-1)[:, :, 0] - peak[:, :, 0]
    else:  # compared, not gathered: the logits stay where they are
        chosen = everywhere(jnp.sum(jnp.where(_ids(head, logits) == targets, shifted, 0.0), axis=-1))
    logprobs = jnp.where(chunk.active, chosen - jnp.log(total), 0.0)
    if not head.entropy:
        return Scores(logprobs, peak[:, :, 0], total, None)
    mean = everywhere(jnp.sum(mass * shifted, axis=-1)) / total
    return Scores(logprobs, peak[:, :, 0], total, jnp.where(chunk.active, jnp.log(total) - mean, 0.0))


def score_all(head: Head, hidden: Array, matrix: Array, plan: Plan, score: Callable[..., Scores]) -> Scores:
    """What `score(head, states, matrix, chunk)` gives for all columns, in the plan's order: f32[E, N] each."""

    def step(index: Array, scores: Scores) -> Scores:
        chunk = visit(head, plan, index)
        return _write(head, scores, score(head, read(hidden, matrix, chunk), matrix, chunk), index)

    return _repeat(head, plan, step, _blank(head, hidden, plan))


def pull_all(head: Head, hidden: Array, matrix: Array, plan: Plan, pulls: Pulls) -> tuple[Array, Array, Scores]:
    """Gradients of hidden states and of the whole unembedding, and the scores, in one sweep over the chunks.

    The unembedding's is this device's part (`summed`), in the accumulator's dtype.

    `pulls(index, chunk, logits)` names the chunk's scores, and the gradients of the loss by its log-probabilities
    and its entropies, f32[E, S]; what it says of idle columns is not read.
    """

    def step(index: Array, carry: tuple[Array, Array, Scores]) -> tuple[Array, Array, Scores]:
        dhidden, dmatrix, scores = carry
        chunk = visit(head, plan, index)
        states = read(hidden, matrix, chunk)
        logits, unscale = project(head, states, matrix, chunk)
        found, dlogprobs, dentropy = pulls(index, chunk, logits)
        # Kept from being fused into what follows, which would work them out anew for every token of the vocabulary.
        dlogprobs, dentropy = lax.optimization_barrier((dlogprobs, dentropy))
        dlogits = _dlogits(head, logits, chunk, found, dlogprobs, dentropy)
        draw = unscale(dlogits)[0].astype(matrix.dtype)
        dstates = jnp.einsum("bsv,vd->bsd", draw, matrix, preferred_element_type=jnp.float32)
        if head.axis_name is not None:
            dstates = lax.psum(dstates, head.axis_name)
        # Added, not set: two actions may continue the same token.
        add = jax.vmap(lambda row, reads, part: row.at[reads].add(part))
        return (
            add(dhidden, chunk.reads, dstates.astype(hidden.dtype)),
            dmatrix + _outer(draw, states).astype(dmatrix.dtype),
            _write(head, scores, found, index),
        )

    dmatrix = jnp.zeros(matrix.shape, head.accumulator or matrix.dtype)
    zeros = _like(hidden, jnp.zeros(hidden.shape, hidden.dtype)), _like(matrix, dmatrix)
    return _repeat(head, plan, step, (*zeros, _blank(head, hidden, plan)))


def _outer(draw: Array, states: Array) -> Array:
    """[E, S, V] x [E, S, D] -> f32[V, D], summed over the tokens."""
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def by_columns(draw: Array, states: Array) -> Array:
        # The other way round, a CPU first copies [S, V] into columns. The barrier keeps the transpose where it is.
        return lax.optimization_barrier(product("bsv,bsd->dv", draw, states)).T

    return lax.platform_dependent(draw, states, cpu=by_columns, default=partial(product, "bsv,bsd->vd"))


def _repeat(head: Head, plan: Plan, step: Callable[[Array, Any], Any], start: Any) -> Any:
    """`step` for every chunk that holds an action."""
    if plan.order.shape[1] == head.columns:  # without a loop, nothing is added to zeros
        return step(jnp.int32(0), start)
    return lax.fori_loop(0, plan.chunks, step, start)


def _dlogits(
    head: Head, logits: Array, chunk: Chunk, scores: Scores, dlogprobs: Array, dentropy: Array | None
) -> Array:
    """`g (1[v = target] - p_v) - e p_v (log p_v + H)` for gradients g by log-probability and e by entropy H."""
    masked = lambda x: jnp.where(chunk.active, x, 0.0)  # noqa: E731
    wide = lambda x: x[:, :, None]  # noqa: E731
    # Written with the very exponentials that the scores were summed from: a program may hold on to them.
    shifted = logits - wide(scores.peaks)
    slope = wide(masked(dlogprobs) / scores.totals)
    if dentropy is not None and scores.entropy is not None:
        log_p = shifted - wide(jnp.log(scores.totals))
        slope = slope + wide(masked(dentropy) / scores.totals) * (log_p + wide(scores.entropy))
    chosen = _ids(head, logits) == wide(chunk.targets)
    return jnp.where(chosen, wide(masked(dlogprobs)), 0.0) - slope * jnp.exp(shifted)


def _blank(head: Head, hidden: Array, plan: Plan) -> Scores:
    zeros = _like(hidden, jnp.zeros(plan.order.shape, jnp.float32))
    return Scores(zeros, zeros, zeros, zeros if head.entropy else None)


def _like(model: Array, array: Array) -> Array:
    """`array`, varying over the mesh axes that `model` varies over: a loop's carry must begin as it goes on."""
    return vary(array, axes_of(model))


def _write(head: Head, scores: Scores, part: Scores, index: Array) -> Scores:
    put = partial(lax.dynamic_update_slice_in_dim, start_index=index * head.columns, axis=1)
    return jax.tree.map(put, scores, part)
