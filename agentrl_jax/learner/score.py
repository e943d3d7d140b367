"""Per-token log-probabilities of a packed batch under given params."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding

from agentrl_jax.batch import TokenBatch
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.learner.placement import Placed, put_row, rows_sharding, slice_rows

HiddenFn = Callable[[Any, Array, Array, Array], Array]  # (params, tokens, positions, subtree_ends) -> [B, T, D]
UnembeddingFn = Callable[[Any], Array]  # params -> [V, D]


class LogprobsFn(Protocol):
    """(params, batch, entropy) -> (logprobs f32[B, T], entropy f32[B, T] or None), 0 off actions."""

    def __call__(self, params: Any, batch: TokenBatch, entropy: bool, /) -> tuple[Array, Array | None]: ...


def make_logprobs(
    hidden_fn: HiddenFn, unembedding_fn: UnembeddingFn, *, temperature: float = 1.0, chunk: int = 1024
) -> LogprobsFn:
    """A model as the loss sees it: `logprobs[b, t] = log pi(tokens[b, t] | ancestors of t)` at `temperature`.

    Args:
      hidden_fn: (params, tokens, positions, subtree_ends) -> [B, T, D].
      unembedding_fn: params -> [V, D].
      temperature: the sampler's; see `kernels.logprobs.token_logprobs`.
      chunk: tokens projected to the vocabulary at once.
    """

    def logprobs(params: Any, batch: TokenBatch, entropy: bool) -> tuple[Array, Array | None]:
        hidden = hidden_fn(params, batch.tokens, batch.positions, batch.subtree_ends)
        return token_logprobs(
            hidden,
            unembedding_fn(params),
            batch.tokens,
            batch.parents,
            batch.action_mask,
            temperature=temperature,
            chunk=chunk,
            entropy=entropy,
        )

    return logprobs


class Score:
    """Log-probabilities of a whole batch, some rows at a time; compiled once per run. No gradient is kept."""

    def __init__(self, logprobs_fn: LogprobsFn, micro_rows: int) -> None:
        def piece(params: Any, scores: Array, batch: TokenBatch, row: Array, rows: NamedSharding | None) -> Array:
            part = slice_rows(batch, row, micro_rows, rows)
            return lax.dynamic_update_slice_in_dim(scores, logprobs_fn(params, part, False)[0], row, 0)

        self._micro_rows = micro_rows
        self._start = Placed(jnp.zeros_like, placement=lambda mask, _: mask.sharding, static=(1,))
        self._piece = Placed(piece, placement=lambda _, scores, *rest: scores.sharding, donate=(1,), static=(4,))

    def __call__(self, params: Any, batch: TokenBatch, rows: Iterable[int] | None = None) -> Array:
        """f32[B, T]. `rows`: where the micro-batches begin that need a score, all by default; 0 elsewhere."""
        # Optional fields play no part, and their coming and going would compile again.
        batch = batch._replace(old_logprobs=None, ref_logprobs=None, values=None, returns=None)
        scores = self._start(batch.action_mask, jnp.float32)
        starts = range(0, batch.tokens.shape[0], self._micro_rows) if rows is None else rows
        for row in starts:
            scores = self._piece(params, scores, batch, put_row(row, params), rows_sharding(batch))
        return scores

    def cache_sizes(self) -> dict[str, int]:
        """How many times each function was compiled; more than 1 is a defect."""
        return {"score_start": self._start.size(), "score": self._piece.size()}


def make_score(logprobs_fn: LogprobsFn, *, micro_rows: int) -> Score:
    """`(params, batch) -> f32[B, T]`, for `old_logprobs` and `ref_logprobs`.

    Raises `ValueError` at the first call when `micro_rows` does not divide B.
    """
    return Score(logprobs_fn, micro_rows)
