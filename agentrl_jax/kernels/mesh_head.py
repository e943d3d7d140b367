"""The loss head of arrays that lie on a mesh which splits the vocabulary: `vocab_sharded`, on each device's share.

Left to itself the compiler would keep the gradient of the unembedding whole in the loop over chunks, and add it up over
the devices that share the rows once a chunk. Here each keeps its own part, and they are added up once.
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

from agentrl_jax.kernels.fused_loss import TokenLoss
from agentrl_jax.kernels.vocab_sharded import vocab_sharded_logprobs, vocab_sharded_loss

Columns = tuple[Array, Array, Array]  # tokens, parents, action_mask


class Split(NamedTuple):
    """The mesh that arrays lie on, and what of it carries the vocabulary and the rows."""

    mesh: Any
    vocab: str
    rows: tuple[str, ...]  # empty where they do not divide the rows: then every device has all

    def chunk(self, tokens: int) -> int:
        """A device's share of the tokens projected at once."""
        return max(1, tokens // math.prod(self.mesh.shape[axis] for axis in self.rows))


def split_of(hidden: Array, unembedding: Array, vocab_axes: tuple[str, ...], row_axes: tuple[str, ...]) -> Split | None:
    """How `hidden` [B, T, D] and `unembedding` [V, D] are split; None where the vocabulary is not, or inside shard_map.

    Raises `ValueError` for a vocabulary that is split over several axes, or not evenly.
    """
    mesh: Any = jax.typeof(hidden).sharding.mesh
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
    sizes = {axis: mesh.shape[axis] for axis in vocab_axes if axis in mesh.axis_names and mesh.shape[axis] > 1}
    if not automatic or not sizes:
        return None
    if len(sizes) > 1 or unembedding.shape[0] % next(iter(sizes.values())):
        vocabulary = unembedding.shape[0]
        raise ValueError(f"unembedding: expected a vocabulary that one mesh axis divides, got {vocabulary} on {sizes}")
    rows = tuple(axis for axis in row_axes if axis in mesh.axis_names)
    count = math.prod(mesh.shape[axis] for axis in rows)
    return Split(mesh, next(iter(sizes)), rows if hidden.shape[0] % count == 0 else ())


def split_loss(
    split: Split, loss: TokenLoss, hidden: Array, unembedding: Array, columns: Columns, data: Any,
    *, chunk: int, kept: Array | None = None, **settings: Any,
) -> tuple[Array, Any]:  # fmt: skip
    """`logprob_loss(form="single_pass")` of `columns` (tokens, parents, action_mask): (loss f32[], second results).

    Of the second results of the loss each leaf has one more dimension in front: a share of the rows each.
    """

    def share(hidden: Array, matrix: Array, columns: Columns, data: Any, kept: Array | None) -> tuple[Array, Any]:
        more: Any = {**settings, "axis_name": split.vocab, "chunk": split.chunk(chunk), "kept": kept}
        value, rest = vocab_sharded_loss(loss, hidden, matrix, *columns, data, **more)
        return jax.tree.map(lambda leaf: leaf[None], (value, rest.aux))

    # Summed outside: a sum inside would be differentiated as well.
    parts, aux = _on(split, share)(hidden, unembedding, columns, data, kept)
    return jnp.sum(parts), aux


def split_logprobs(
    split: Split, hidden: Array, unembedding: Array, columns: Columns,
    *, chunk: int, kept: Array | None = None, **settings: Any,
) -> tuple[Array, Array | None]:  # fmt: skip
    """`token_logprobs(form="two_pass")` of `columns` (tokens, parents, action_mask)."""

    def share(hidden: Array, matrix: Array, columns: Columns, kept: Array | None) -> tuple[Array, Array | None]:
        more: Any = {**settings, "axis_name": split.vocab, "chunk": split.chunk(chunk), "kept": kept}
        return vocab_sharded_logprobs(hidden, matrix, *columns, **more)

    return _on(split, share)(hidden, unembedding, columns, kept)


def _on(split: Split, share: Callable[..., Any]) -> Callable[..., Any]:
    """`share(hidden, unembedding, *more)` on each device; `more` and the results lie by rows."""
    rows = PartitionSpec(split.rows)

    def run(hidden: Array, unembedding: Array, *more: Any) -> Any:
        specs = (rows, PartitionSpec(split.vocab), *(rows,) * len(more))
        mapped = partial(jax.shard_map, mesh=split.mesh, check_vma=True)
        return mapped(share, in_specs=specs, out_specs=rows)(hidden, unembedding, *more)

    return run
