"""Log-probabilities on a TPU without logits in memory: the softmax is kept running over tiles of the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_NEVER = -1e30  # finite, so that 0 * _NEVER is 0
_VECTOR_MEMORY = 60 << 20


def score_columns(
    hidden: Array,
    unembedding: Array,
    targets: Array,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    tiles: tuple[int, int, int] = (512, 1024, 4096),
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Log-probability of each target, log-normaliser and entropy of each distribution, in one matmul.

    For `l = cap(hidden @ unembedding.T) / temperature` and `z = log sum_v exp l_v`: `l[target] - z`, `z` and
    `z - sum_v p_v l_v`. A tile of logits lives in vector memory only, while `max`, `sum exp` and `sum exp * l` are
    carried from one tile of the vocabulary to the next and rescaled when the maximum grows. Columns beyond the last
    token do not count: V need not be a multiple of the tile, nor N. Not differentiable.

    Args:
      hidden: [N, D] in the dtype of the unembedding.
      unembedding: [V, D].
      targets: i32[N].
      temperature: above 0.
      soft_cap: `cap(x) = soft_cap * tanh(x / soft_cap)`, or None.
      tiles: most tokens, columns of the vocabulary and features at once; two tiles of the unembedding and of the
        hidden states must fit in 60 MiB.
      interpret: run as plain JAX, where there is no TPU.

    Returns:
      Three f32[N].

    Raises:
      ValueError: shapes or dtypes do not fit together.

    Milakov & Gimelshein 2018 (https://arxiv.org/abs/1805.02867).
    """
    if hidden.ndim != 2 or unembedding.ndim != 2 or hidden.shape[1] != unembedding.shape[1]:
        shapes = f"{hidden.shape} and {unembedding.shape}"
        raise ValueError(f"score_columns: expected hidden [N, D] and unembedding [V, D], got {shapes}")
    if hidden.dtype != unembedding.dtype:
        raise ValueError(f"score_columns: hidden: expected {unembedding.dtype} as the unembedding, got {hidden.dtype}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"score_columns: targets: expected {hidden.shape[:1]}, got {targets.shape}")
    (tokens, width), vocabulary = hidden.shape, unembedding.shape[0]
    rows, columns, features = min(tiles[0], tokens), min(tiles[1], vocabulary), _divisor(width, tiles[2])
    scalar = pl.BlockSpec((rows, 1), lambda i, j, k: (i, 0))
    parts = width // features
    found = pl.pallas_call(
        partial(_kernel, parts=parts, vocabulary=vocabulary, temperature=temperature, soft_cap=soft_cap),
        grid=(pl.cdiv(tokens, rows), pl.cdiv(vocabulary, columns), parts),
        in_specs=[
            scalar,
            pl.BlockSpec((rows, features), lambda i, j, k: (i, k)),
            pl.BlockSpec((columns, features), lambda i, j, k: (j, k)),
        ],
        out_specs=[scalar] * 3,
        out_shape=[jax.ShapeDtypeStruct((tokens, 1), jnp.float32)] * 3,
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)] + [pltpu.VMEM((rows, 1), jnp.float32)] * 4,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_VECTOR_MEMORY
        ),
        interpret=interpret,
    )(targets[:, None], hidden, unembedding)
    logprobs, normalizers, entropy = (part[:, 0] for part in found)
    return logprobs, normalizers, entropy


def _kernel(
    targets: Any, hidden: Any, matrix: Any, logprobs: Any, normalizers: Any, entropy: Any, raw: Any, peak: Any,
    total: Any, moment: Any, chosen: Any, *, parts: int, vocabulary: int, temperature: float, soft_cap: float | None,
) -> None:  # fmt: skip
    tile, part = pl.program_id(1), pl.program_id(2)

    @pl.when((tile == 0) & (part == 0))
    def _() -> None:
        peak[...] = jnp.full_like(peak, _NEVER)
        for sums in (total, moment, chosen):
            sums[...] = jnp.zeros_like(sums)

    product = lax.dot_general(hidden[...], matrix[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    raw[...] = product if parts == 1 else jnp.where(part == 0, product, raw[...] + product)

    @pl.when(part == parts - 1)
    def _() -> None:
        capped = raw[...] if soft_cap is None else soft_cap * jnp.tanh(raw[...] * (1.0 / soft_cap))
        ids = tile * raw.shape[1] + lax.broadcasted_iota(jnp.int32, raw.shape, 1)
        # The last tile may reach beyond the vocabulary, where memory holds anything, NaN included.
        logits = jnp.where(ids < vocabulary, capped * (1.0 / temperature), _NEVER)
        higher = jnp.maximum(peak[...], jnp.max(logits, axis=1, keepdims=True))
        fallen, shifted = peak[...] - higher, logits - higher
        shrink, mass = jnp.exp(fallen), jnp.exp(shifted)
        moment[...] = shrink * (moment[...] + fallen * total[...]) + jnp.sum(mass * shifted, axis=1, keepdims=True)
        total[...] = shrink * total[...] + jnp.sum(mass, axis=1, keepdims=True)
        chosen[...] += jnp.sum(jnp.where(ids == targets[...], logits, 0.0), axis=1, keepdims=True)
        peak[...] = higher

    @pl.when((tile == pl.num_programs(1) - 1) & (part == parts - 1))
    def _() -> None:
        log_total = jnp.log(total[...])
        logprobs[...] = (chosen[...] - peak[...]) - log_total
        normalizers[...] = peak[...] + log_total
        entropy[...] = log_total - moment[...] / total[...]


def _divisor(width: int, most: int) -> int:
    """The widest tile of at most `most` features that leaves none over: memory beyond the last one holds anything."""
    if width <= most:
        return width
    fits = [tile for tile in range(128, most + 1, 128) if width % tile == 0]
    return max(fits, default=width)
