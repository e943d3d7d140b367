"""The loss head of arrays that lie on a mesh: on each device's rows, and on its share of a vocabulary that is split.

Left to itself the compiler would add up the gradient of the unembedding over the devices once a chunk, and keep them
all in step. Here each device visits its own chunks, as many as its own actions fill where the vocabulary is whole. An
unembedding whose width is split is gathered once; the parts of its gradient, f32[V, D] each, are added up once, and
each device keeps its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from agentrl_jax.kernels.fused_loss import TokenLoss, check_data, single_pass
from agentrl_jax.kernels.head import (
    Head,
    Plan,
    check_arrays,
    check_kept,
    dividing,
    make_head,
    make_plan,
    restore,
    spread,
)
from agentrl_jax.kernels.logprobs import two_pass

Columns = tuple[Array, Array, Array]  # tokens, parents, action_mask


class Split(NamedTuple):
    """The mesh that arrays lie on, and what of it carries the rows, the vocabulary and the unembedding's width."""

    mesh: Any
    rows: tuple[str, ...]  # as many as divide them; the devices of every other axis have them all
    vocab: str | None  # None: every device has all of it
    width: str | None  # one of `rows`; None: gathered before


def split_of(
    hidden: Array, unembedding: Array, vocab_axes: tuple[str, ...], row_axes: tuple[str, ...],
    width_axes: tuple[str, ...] = (),
) -> Split | None:  # fmt: skip
    """How `hidden` [B, T, D] and `unembedding` [V, D] are split; None where no such axis is, or inside shard_map.

    Raises `ValueError` for a vocabulary that is split over several axes, or not evenly.
    """
    mesh: Any = jax.typeof(hidden).sharding.mesh
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
    sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names if mesh.shape[axis] > 1}
    vocab, rows, width = ({a: sizes[a] for a in axes if a in sizes} for axes in (vocab_axes, row_axes, width_axes))
    if not automatic or not vocab | rows | width:
        return None
    vocabulary, features = unembedding.shape
    if len(vocab) > 1 or vocabulary % math.prod(vocab.values()):
        raise ValueError(f"unembedding: expected a vocabulary that one mesh axis divides, got {vocabulary} on {vocab}")
    shared = dividing(rows, hidden.shape[0])
    scattered = len(width) == 1 and set(width) <= set(shared) and features % math.prod(width.values()) == 0
    return Split(mesh, shared, next(iter(vocab), None), next(iter(width)) if scattered else None)


def split_loss(
    split: Split, loss: TokenLoss, hidden: Array, unembedding: Array, columns: Columns, data: Any,
    *, kept: Array | None = None, **settings: Any,
) -> tuple[Array, Any]:  # fmt: skip
    """`logprob_loss(form="single_pass")` of `columns` (tokens, parents, action_mask): (loss f32[], second results).

    Of the second results of the loss each leaf has one more dimension in front: a share of the rows each. `settings`:
    temperature, soft_cap, chunk (tokens of a device at once), entropy and accumulator, all of them.
    """
    name = "split_loss"
    _check(name, hidden, unembedding, columns, kept)
    check_data(name, data, hidden.shape[:2])

    def share(hidden: Array, matrix: Array, columns: Columns, data: Any, kept: Array | None) -> tuple[Array, Any]:
        head, plan = _prepare(name, split, columns, kept, settings)
        value, rest = single_pass(name, head, loss, hidden, matrix, plan, data)
        return jax.tree.map(lambda leaf: leaf[None], (value, rest.aux))

    # Summed outside: a sum inside would be differentiated as well.
    parts, aux = _on(split, share)(hidden, unembedding, columns, data, kept)
    return jnp.sum(parts), aux


def split_logprobs(
    split: Split, hidden: Array, unembedding: Array, columns: Columns, *, kept: Array | None = None, **settings: Any
) -> tuple[Array, Array | None]:
    """`token_logprobs(form="two_pass")` of `columns` (tokens, parents, action_mask)."""
    name = "split_logprobs"
    _check(name, hidden, unembedding, columns, kept)

    def share(hidden: Array, matrix: Array, columns: Columns, kept: Array | None) -> tuple[Array, Array | None]:
        head, plan = _prepare(name, split, columns, kept, settings)
        return restore(head, plan, *two_pass(head, spread(head, hidden, matrix, plan), matrix, plan))

    return _on(split, share)(hidden, unembedding, columns, kept)


def _check(name: str, hidden: Array, unembedding: Array, columns: Columns, kept: Array | None) -> None:
    check_arrays(name, hidden, unembedding, *columns)
    check_kept(name, kept, columns[0], unembedding.shape[0])


def _prepare(name: str, split: Split, columns: Columns, kept: Array | None, settings: Any) -> tuple[Head, Plan]:
    """A device's head, and the order in which it visits its columns."""
    head = make_head(name, columns[0].shape, **settings, axis_name=split.vocab, width_axis=split.width)
    return head, make_plan(head, *columns, kept)


def _on(split: Split, share: Callable[..., Any]) -> Callable[..., Any]:
    """`share(hidden, unembedding, *more)` on each device; `more` and the results lie by rows."""
    rows = PartitionSpec(split.rows)

    def run(hidden: Array, unembedding: Array, *more: Any) -> Any:
        specs = (rows, PartitionSpec(split.vocab, split.width), *(rows,) * len(more))
        mapped = partial(jax.shard_map, mesh=split.mesh, check_vma=True)
        return mapped(share, in_specs=specs, out_specs=rows)(hidden, unembedding, *more)

    return run
