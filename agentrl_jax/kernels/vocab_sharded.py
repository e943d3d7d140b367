"""The loss head with the vocabulary split over a mesh axis: no device sees another's part of logits or unembedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from agentrl_jax.kernels.fused_loss import Detached, TokenLoss, check_data, single_pass
from agentrl_jax.kernels.head import (
    Head,
    Plan,
    axes_of,
    check_arrays,
    check_kept,
    make_head,
    make_plan,
    restore,
    spread,
)
from agentrl_jax.kernels.logprobs import two_pass


def vocab_sharded_loss(
    loss: TokenLoss,
    hidden: Array,
    unembedding: Array,
    tokens: Array,
    parents: Array,
    action_mask: Array,
    data: Any,
    *,
    axis_name: str,
    vocabulary: int | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = 1024,
    entropy: bool = False,
    accumulator: DTypeLike | None = None,
    kept: Array | None = None,
) -> tuple[Array, Detached]:
    """`logprob_loss(form="single_pass")` inside `shard_map`, the unembedding split over the mesh axis `axis_name`.

    Device i of n holds tokens `i * W .. (i + 1) * W - 1` of the vocabulary. Over the axis go, per chunk, the maxima,
    the sums of exponentials and the target's logit, a float a token each, and the gradient of the hidden states.
    The gradient of the unembedding stays split. Batches may be split over other axes: gradients of what is
    replicated there come out summed, and the loss is this device's part, to be summed outside the gradient.

    Args:
      loss: see `logprob_loss`.
      hidden: [B, T, D], the same on all devices of the axis, as the other arrays are.
      unembedding: [W, D], this device's share; W the same everywhere.
      tokens: i32[B, T], of the whole vocabulary.
      parents: i32[B, T].
      action_mask: bool[B, T].
      data: pytree of [B, T, ...].
      axis_name: the mesh axis.
      vocabulary: V, where `n * W > V`: the columns after it are padding and do not count. None: there are none.
      temperature, soft_cap, entropy: see `token_logprobs`.
      kept: u32[B, T, words(V)] of the whole vocabulary, the same on all devices of the axis; see `token_logprobs`.
      chunk: tokens that a device projects at once, over all of its rows.
      accumulator: dtype in which chunks add up the unembedding's gradient; None for the unembedding's own.

    Returns:
      The loss f32[], the same on all devices of the axis, and what it leaves behind, detached.

    Raises:
      ValueError: as `logprob_loss`; or arrays are not split as said, or `shard_map` does not check that
        (`check_vma=False`), where gradients would silently be one device's part.

    Shoeybi et al. 2019, Megatron-LM (https://arxiv.org/abs/1909.08053).
    """
    name = "vocab_sharded_loss"
    data = jax.tree.map(jnp.asarray, data)
    head, plan = _prepare(
        name, hidden, unembedding, tokens, parents, action_mask, data, axis_name=axis_name, vocabulary=vocabulary,
        chunk=chunk, temperature=temperature, soft_cap=soft_cap, entropy=entropy, accumulator=accumulator,
        kept=kept,
    )  # fmt: skip
    check_data(name, data, tokens.shape)
    return single_pass(name, head, loss, hidden, unembedding, plan, data)


def vocab_sharded_logprobs(
    hidden: Array,
    unembedding: Array,
    tokens: Array,
    parents: Array,
    action_mask: Array,
    *,
    axis_name: str,
    vocabulary: int | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = 1024,
    entropy: bool = False,
    accumulator: DTypeLike | None = None,
    kept: Array | None = None,
) -> tuple[Array, Array | None]:
    """`token_logprobs(form="two_pass")` inside `shard_map`, the unembedding split over the mesh axis `axis_name`.

    Arguments and errors are those of `vocab_sharded_loss`.

    Returns:
      f32[B, T] log-probabilities and f32[B, T] entropies or None, the same on all devices of the axis.
    """
    head, plan = _prepare(
        "vocab_sharded_logprobs", hidden, unembedding, tokens, parents, action_mask, None, axis_name=axis_name,
        vocabulary=vocabulary, chunk=chunk, temperature=temperature, soft_cap=soft_cap, entropy=entropy,
        accumulator=accumulator, kept=kept,
    )  # fmt: skip
    return restore(head, plan, *two_pass(head, spread(head, hidden, unembedding, plan), unembedding, plan))


def _prepare(
    name: str,
    hidden: Array,
    unembedding: Array,
    tokens: Array,
    parents: Array,
    action_mask: Array,
    data: Any,
    *,
    axis_name: str,
    vocabulary: int | None,
    kept: Array | None,
    **settings: Any,
) -> tuple[Head, Plan]:
    check_arrays(name, hidden, unembedding, tokens, parents, action_mask)
    if axis_name not in axes_of(unembedding):
        raise ValueError(
            f"{name}: unembedding: expected a share of the vocabulary per device of mesh axis {axis_name!r}: call it "
            f"inside shard_map(..., check_vma=True) with in_specs PartitionSpec({axis_name!r}) for the unembedding"
        )
    same = hidden, tokens, parents, action_mask, data, kept
    if any(axis_name in axes_of(leaf) for leaf in jax.tree.leaves(same)):
        raise ValueError(f"{name}: expected all arrays but the unembedding to be the same along axis {axis_name!r}")
    head = make_head(name, tokens.shape, axis_name=axis_name, vocabulary=vocabulary, **settings)
    check_kept(name, kept, tokens, vocabulary or lax.axis_size(axis_name) * unembedding.shape[0])
    return head, make_plan(head, tokens, parents, action_mask, kept)
