"""A loss straight from hidden states, formed together with its gradient while a chunk's logits are live."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from agentrl_jax.kernels.head import (
    Chunk,
    Head,
    Plan,
    Scores,
    check_arrays,
    check_form,
    check_kept,
    fold,
    make_head,
    make_plan,
    measure,
    pull_all,
    restore,
    score_all,
    shares_of,
    spread,
    summed,
    take,
    whole,
)
from agentrl_jax.kernels.locality import check_token_local
from agentrl_jax.kernels.logprobs import FORMS, Form, score, token_logprobs


class TokenLoss(Protocol):
    """(logprobs f32[..], entropy f32[..] or None, data of [..] leaves) -> f32[], a sum over tokens; and anything."""

    def __call__(self, logprobs: Array, entropy: Array | None, data: Any, /) -> tuple[Array, Any]: ...


class Detached(NamedTuple):
    """What a loss leaves behind; no gradient flows through any of it."""

    aux: Any  # the second result of the loss
    logprobs: Array  # f32[B, T], 0 off actions
    entropy: Array | None  # f32[B, T], 0 off actions


def logprob_loss(
    loss: TokenLoss,
    hidden: Array,
    unembedding: Array,
    tokens: Array,
    parents: Array,
    action_mask: Array,
    data: Any,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = 1024,
    entropy: bool = False,
    form: Literal["single_pass"] | Form = "single_pass",
    accumulator: DTypeLike | None = None,
    kept: Array | None = None,
    row_axes: tuple[str, ...] = ("data", "fsdp"),
) -> tuple[Array, Detached]:
    """`loss(logprobs, entropy, data)` of `token_logprobs`, differentiable in `hidden` and `unembedding` alone.

    The form "single_pass" differentiates the loss inside the loop over chunks, while a chunk's logits are live: 3
    matmuls of `2 * actions * V * D` operations for value and gradient where the other forms take 4, and no [B, T, V].

    It asks one thing: the gradient of the loss at a token may depend on that token's log-probability, entropy and
    data alone. That holds for PPO, GRPO, DAPO or CISPO with token ratios, per-token KL and entropy bonus, with
    weights and denominators in the data. A loss that pools tokens (a sequence ratio, a mean) is refused: the other
    forms call it once, on all of [B, T]. An objective bound to `rl.objective.policy_loss` fits as it is:
    `logprob_loss(partial(policy_loss, objective), hidden, unembedding, tokens, parents, action_mask, batch)`.

    Args:
      loss: (logprobs, entropy or None, data) -> a scalar sum over tokens, and anything else. It is called on [B, T]
        for its value and, in a single pass, on chunks of it, in another order, for its gradient.
      hidden: [B, T, D].
      unembedding: [V, D].
      tokens: i32[B, T].
      parents: i32[B, T].
      action_mask: bool[B, T].
      data: pytree of [B, T, ...], whatever else the loss reads; no gradient flows into it.
      temperature, soft_cap, chunk, entropy, kept, row_axes: see `token_logprobs`.
      form: "single_pass", or one of the forms of `token_logprobs`.
      accumulator: dtype in which chunks add up the unembedding's gradient; None for the unembedding's own. f32 is
        exact to rounding and takes `4 * V * D` bytes.

    Returns:
      The loss f32[], and what it leaves behind: its second result, log-probabilities and entropies, all detached.

    Raises:
      ValueError: a shape does not fit, a setting has no meaning, or the loss pools tokens in a single pass.
    """
    name, columns = "logprob_loss", (tokens, parents, action_mask)
    check_form(name, form, "single_pass", *FORMS)
    check_arrays(name, hidden, unembedding, *columns)
    check_kept(name, kept, tokens, unembedding.shape[0])
    data = jax.tree.map(jnp.asarray, data)
    check_data(name, data, tokens.shape)
    settings: Any = {"temperature": temperature, "soft_cap": soft_cap, "chunk": chunk, "entropy": entropy}
    settings["accumulator"] = accumulator
    if form == "single_pass":
        shares = shares_of(tokens.shape[0], row_axes, hidden, unembedding, *columns)
        head = make_head(name, tokens.shape, shares=shares, **settings)
        return single_pass(name, head, loss, hidden, unembedding, make_plan(head, *columns, kept), data)
    scored = token_logprobs(hidden, unembedding, *columns, form=form, kept=kept, row_axes=row_axes, **settings)
    value, aux = loss(*scored, lax.stop_gradient(data))
    return value, lax.stop_gradient(Detached(aux, *scored))


def single_pass(
    name: str, head: Head, loss: TokenLoss, hidden: Array, matrix: Array, plan: Plan, data: Any
) -> tuple[Array, Detached]:
    """`logprob_loss` in one pass, on behalf of the public function `name`."""
    check_token_local(name, loss, head.entropy, data, head.shape, (head.shares, head.columns))
    value, rest = _fused(head, loss, spread(head, hidden, matrix, plan, data), matrix, plan, data)
    return value, lax.stop_gradient(rest)


def _evaluate(head: Head, loss: TokenLoss, plan: Plan, scores: Scores, data: Any) -> tuple[Array, Detached]:
    logprobs, entropy = restore(head, plan, scores.logprobs, scores.entropy)
    value, aux = loss(logprobs, entropy, data)
    return value, Detached(aux, logprobs, entropy)


def _primal(head: Head, loss: TokenLoss, hidden: Array, matrix: Array, plan: Plan, data: Any) -> tuple[Array, Detached]:
    return _evaluate(head, loss, plan, score_all(head, hidden, whole(head, hidden, matrix), plan, score), data)


def _forward(head: Head, loss: TokenLoss, hidden: Array, matrix: Array, plan: Plan, data: Any) -> tuple[Any, Any]:
    def pulls(index: Array, chunk: Chunk, logits: Array) -> tuple[Scores, Array, Array | None]:
        del index
        found = measure(head, logits, chunk)
        part = jax.tree.map(lambda leaf: take(fold(head, leaf), chunk.columns), data)
        return found, *_slopes(loss, found.logprobs, found.entropy, part)

    dhidden, dmatrix, scores = pull_all(head, hidden, whole(head, hidden, matrix), plan, pulls)
    return _evaluate(head, loss, plan, scores, data), (dhidden, dmatrix, matrix)


def _slopes(loss: TokenLoss, logprobs: Array, entropy: Array | None, data: Any) -> tuple[Array, Array | None]:
    """Gradients of the loss by log-probabilities and by entropies."""
    return jax.grad(lambda scored: loss(scored[0], scored[1], data)[0])((logprobs, entropy))


def _backward(head: Head, loss: TokenLoss, kept: tuple[Array, Array, Array], pulled: Any) -> tuple[Any, ...]:
    del loss
    dhidden, dmatrix, matrix = kept
    scale = lambda x: x.astype(jnp.float32) * pulled[0]  # noqa: E731
    return scale(dhidden).astype(dhidden.dtype), summed(head, scale(dmatrix), matrix), None, None


_fused = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))
_fused.defvjp(_forward, _backward)


def check_data(name: str, data: Any, shape: tuple[int, ...]) -> None:
    for path, leaf in jax.tree.leaves_with_path(data):
        if leaf.shape[:2] != shape:
            where = f"data{jax.tree_util.keystr(path)}"
            raise ValueError(f"{name}: {where}: expected [B, T, ...] with (B, T) = {shape}, got {leaf.shape}")
