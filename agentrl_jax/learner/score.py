"""Per-token log-probabilities of a packed batch under given params."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding

from agentrl_jax.batch import TokenBatch
from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.kernels.locality import is_token_local
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.kernels.mesh_head import Split, split_logprobs, split_loss, split_of
from agentrl_jax.learner import metrics
from agentrl_jax.learner.placement import Placed, beside, put_row, rows_sharding, slice_rows
from agentrl_jax.rl.types import Loss, Metrics

HiddenFn = Callable[[Any, Array, Array, Array], Array]  # (params, tokens, positions, subtree_ends) -> [B, T, D]
UnembeddingFn = Callable[[Any], Array]  # params -> [V, D]


class Scorer(NamedTuple):
    """A model as a loss sees it: hidden states, and the head that turns them into log-probabilities of tokens."""

    hidden: HiddenFn
    unembedding: UnembeddingFn
    temperature: float = 1.0  # the sampler's; see `kernels.logprobs.token_logprobs`
    chunk: int = 1024  # tokens that a device projects to the vocabulary at once
    soft_cap: float | None = None  # bound of the logits, where the model has one
    vocab_axes: tuple[str, ...] = ()  # mesh axes that split the vocabulary, where arrays lie on a mesh that has any
    row_axes: tuple[str, ...] = ()  # those that split the rows
    width_axes: tuple[str, ...] = ()  # and those that split the unembedding's width

    def logprobs(self, params: Any, batch: TokenBatch, *, entropy: bool = False) -> tuple[Array, Array | None]:
        """`log pi(tokens[b, t] | ancestors of t)` f32[B, T], and entropies f32[B, T] or None; 0 off actions.

        With `batch.kept` pi is renormalised over the tokens that the sampler had left to draw from, entropies too:
        under the sampler's params these are its log-probabilities, whatever it cut.
        """
        return self._logprobs(self._arrays(params, batch), entropy, batch.kept)

    def loss(self, loss: Loss, params: Any, batch: TokenBatch, *, entropy: bool = False) -> tuple[Array, Metrics]:
        """`loss(logprobs, entropy, batch)`, differentiable in params; the metrics are not.

        A loss of separate tokens is formed with its gradient in a single pass over the vocabulary; one that pools
        tokens (a sequence ratio) takes two.
        """
        arrays, kept = self._arrays(params, batch), batch.kept
        batch = batch._replace(kept=None)  # the head's alone
        if not is_token_local(loss, entropy, batch, batch.tokens.shape):
            value, figures = loss(*self._logprobs(arrays, entropy, kept), lax.stop_gradient(batch))
            return value, lax.stop_gradient(figures)
        hidden, matrix, columns = arrays
        split = self._split(hidden, matrix)
        if split is None:
            value, rest = logprob_loss(loss, hidden, matrix, *columns, batch, kept=kept, **self._settings(entropy))
            return value, rest.aux
        value, parts = split_loss(split, loss, hidden, matrix, columns, batch, kept=kept, **self._settings(entropy))
        return value, metrics.merged(parts)

    def _logprobs(self, arrays: Any, entropy: bool, kept: Array | None) -> tuple[Array, Array | None]:
        hidden, matrix, columns = arrays
        split = self._split(hidden, matrix)
        if split is None:
            return token_logprobs(hidden, matrix, *columns, kept=kept, **self._settings(entropy))
        return split_logprobs(split, hidden, matrix, columns, kept=kept, **self._settings(entropy))

    def _split(self, hidden: Array, matrix: Array) -> Split | None:
        return split_of(hidden, matrix, self.vocab_axes, self.row_axes, self.width_axes)

    def _arrays(self, params: Any, batch: TokenBatch) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        hidden = self.hidden(params, batch.tokens, batch.positions, batch.subtree_ends)
        return hidden, self.unembedding(params), (batch.tokens, batch.parents, batch.action_mask)

    def _settings(self, entropy: bool) -> dict[str, Any]:
        head = {"temperature": self.temperature, "soft_cap": self.soft_cap, "chunk": self.chunk}
        return {**head, "entropy": entropy, "accumulator": jnp.float32}  # a bf16 head's gradient still adds up in f32


class Score:
    """Log-probabilities of a whole batch, some rows at a time; compiled once per run. No gradient is kept."""

    def __init__(self, scorer: Scorer, micro_rows: int) -> None:
        def piece(params: Any, scores: Array, batch: TokenBatch, row: Array, rows: NamedSharding | None) -> Array:
            part = slice_rows(batch, row, micro_rows, rows)
            return lax.dynamic_update_slice_in_dim(scores, scorer.logprobs(params, part)[0], row, 0)

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

    def traced(self, params: Any, batch: TokenBatch) -> Any:
        """`jax.stages.Traced` of one micro-batch for shapes that say where their arrays would lie."""
        batch = batch._replace(old_logprobs=None, ref_logprobs=None, values=None, returns=None)
        scores = jax.ShapeDtypeStruct(batch.tokens.shape, jnp.float32, sharding=batch.action_mask.sharding)
        row = jax.ShapeDtypeStruct((), jnp.int32, sharding=beside(params))
        return self._piece.trace(params, scores, batch, row, rows_sharding(batch))

    def cache_sizes(self) -> dict[str, int]:
        """How many times each function was compiled; more than 1 is a defect."""
        return {"score_start": self._start.size(), "score": self._piece.size()}


def make_score(scorer: Scorer, *, micro_rows: int) -> Score:
    """`(params, batch) -> f32[B, T]`, for `old_logprobs` and `ref_logprobs`.

    Raises `ValueError` at the first call when `micro_rows` does not divide B.
    """
    return Score(scorer, micro_rows)
