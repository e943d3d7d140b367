"""From hidden states to log-probabilities: the one place where columns are shifted from parent to child."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

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
    make_head,
    make_plan,
    measure,
    project,
    pull_all,
    read,
    restore,
    score_all,
    shares_of,
    spread,
    summed,
    visit,
    whole,
)

Form = Literal["two_pass", "pallas", "checkpointed"]
FORMS: tuple[str, ...] = get_args(Form)


def token_logprobs(
    hidden: Array,
    unembedding: Array,
    tokens: Array,
    parents: Array,
    action_mask: Array,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    chunk: int = 1024,
    entropy: bool = False,
    form: Form = "two_pass",
    accumulator: DTypeLike | None = None,
    kept: Array | None = None,
    row_axes: tuple[str, ...] = ("data", "fsdp"),
) -> tuple[Array, Array | None]:
    """Log-probability of every action token given its ancestors, without ever holding [B, T, V].

    `logprobs[b, t] = log softmax(cap(hidden[b, parents[b, t]] @ unembedding.T) / temperature)[tokens[b, t]]`
    on actions, 0 elsewhere; `cap(x) = soft_cap * tanh(x / soft_cap)`, or x without a soft cap;
    `entropy[b, t] = -sum_v p_v log p_v` of the same distribution. Action columns are sorted to the front and
    projected chunk by chunk, over all rows of a device, as many chunks as the device with most actions needs: the
    cost follows the number of actions, and none is ever dropped. Logits, log-softmax and sums are f32, and so
    is the sum of the unembedding's gradient over devices where the accumulator is.

    "two_pass" keeps a log-normaliser a token and projects a chunk again in the backward pass: 4 matmuls.
    "pallas" is that with a forward pass for scoring: a kernel without logits in memory, on TPUs, for
    arrays that `jit` does not partition. "checkpointed" is the plain formula under `jax.checkpoint`, idle
    chunks included: the reference, and the one that can be differentiated twice, or forwards. Inside
    `shard_map(check_vma=True)`, gradients of what is replicated come out summed over devices.

    Args:
      hidden: [B, T, D] after the final norm.
      unembedding: [V, D]; the projection runs in its dtype, accumulated in f32.
      tokens: i32[B, T].
      parents: i32[B, T] column that each token continues.
      action_mask: bool[B, T].
      temperature: of the distribution sampled from; it belongs to the policy's definition.
      soft_cap: bound of the logits before the temperature, or None.
      chunk: tokens that a device projects at once, over all of its rows; peak memory is about `chunk * V` floats.
      entropy: also return entropies.
      form: "two_pass", "pallas" or "checkpointed".
      accumulator: dtype in which chunks add up the unembedding's gradient; None for the unembedding's own.
      kept: u32[B, T, words(V)] what each token was drawn from, as bits (`kernels.kept.pack`): the softmax runs over
        these tokens alone, as the sampler's did; all bits set where nothing was cut. None: the whole vocabulary.
      row_axes: mesh axes over which the rows are split, where the compiler partitions the program.

    Returns:
      f32[B, T] log-probabilities, and f32[B, T] entropies or None.

    Raises:
      ValueError: a shape does not fit, or a setting has no meaning.
    """
    check_form("token_logprobs", form, *FORMS)
    if form == "checkpointed" and accumulator is not None:
        raise ValueError("token_logprobs: accumulator: has no effect on form='checkpointed': leave one of them out")
    if form == "pallas" and kept is not None:
        raise ValueError("token_logprobs: kept: form='pallas' scores the whole vocabulary only: use form='two_pass'")
    columns = tokens, parents, action_mask
    check_arrays("token_logprobs", hidden, unembedding, *columns)
    check_kept("token_logprobs", kept, tokens, unembedding.shape[0])
    settings = chunk, temperature, soft_cap, entropy, accumulator
    shares = shares_of(tokens.shape[0], row_axes, hidden, unembedding, *columns)
    head = make_head("token_logprobs", tokens.shape, *settings, shares=shares, pallas=form == "pallas")
    plan = make_plan(head, *columns, kept)
    function = _checkpointed if form == "checkpointed" else two_pass
    logprobs, entropies = function(head, spread(head, hidden, unembedding, plan), unembedding, plan)
    return restore(head, plan, logprobs, entropies)


def _checkpointed(head: Head, hidden: Array, matrix: Array, plan: Plan) -> tuple[Array, Array | None]:
    matrix = whole(head, hidden, matrix)
    steps = plan.order.shape[1] // head.columns
    indices = jnp.arange(steps, dtype=jnp.int32)
    states = jax.vmap(lambda index: read(hidden, matrix, visit(head, plan, index)))(indices)

    @jax.checkpoint
    def step(matrix: Array, index: Array, states: Array) -> Scores:
        return score(head, states, matrix, visit(head, plan, index))

    _, scores = lax.scan(lambda _, inputs: (None, step(matrix, *inputs)), None, (indices, states))
    flat = lambda x: jnp.moveaxis(x, 0, 1).reshape(plan.order.shape)  # noqa: E731
    return jax.tree.map(flat, (scores.logprobs, scores.entropy))


def score(head: Head, states: Array, matrix: Array, chunk: Chunk) -> Scores:
    """A chunk's scores, by way of its logits."""
    return measure(head, project(head, states, matrix, chunk)[0], chunk)


def _score_on_tpu(head: Head, states: Array, matrix: Array, chunk: Chunk) -> Scores:
    from agentrl_jax.kernels.pallas.logprobs import score_columns

    flat = states.reshape(-1, states.shape[2]), matrix, chunk.targets.reshape(-1)
    found = score_columns(*flat, temperature=head.temperature, soft_cap=head.soft_cap)
    logprobs, normalizers, entropy = (part.reshape(chunk.targets.shape) for part in found)
    logprobs, entropy = (jnp.where(chunk.active, part, 0.0) for part in (logprobs, entropy))
    return Scores(logprobs, normalizers, jnp.ones_like(normalizers), entropy if head.entropy else None)


def _score_anywhere(head: Head, states: Array, matrix: Array, chunk: Chunk) -> Scores:
    if not head.pallas:
        return score(head, states, matrix, chunk)
    # Chosen when it is lowered: compiling for a TPU on another machine gets the kernel as well.
    kernel, plain = (partial(function, head) for function in (_score_on_tpu, score))
    return lax.platform_dependent(states, matrix, chunk, tpu=kernel, default=plain)


def _primal(head: Head, hidden: Array, matrix: Array, plan: Plan) -> tuple[Array, Array | None]:
    return _forward(head, hidden, matrix, plan)[0]


def _forward(head: Head, hidden: Array, matrix: Array, plan: Plan) -> tuple[tuple[Array, Array | None], Any]:
    everything = whole(head, hidden, matrix)
    scores = score_all(head, hidden, everything, plan, _score_anywhere)
    return (scores.logprobs, scores.entropy), (hidden, matrix, everything, plan, scores)


def _backward(head: Head, kept: Any, pulled: tuple[Array, Array | None]) -> tuple[Array, Array, None]:
    hidden, matrix, everything, plan, scores = kept

    def pulls(index: Array, chunk: Chunk, logits: Array) -> tuple[Scores, Array, Array | None]:
        del chunk, logits
        cut = partial(lax.dynamic_slice_in_dim, start_index=index * head.columns, slice_size=head.columns, axis=1)
        return jax.tree.map(cut, (scores, *pulled))

    dhidden, dmatrix, _ = pull_all(head, hidden, everything, plan, pulls)
    return dhidden, summed(head, dmatrix, matrix), None


two_pass = jax.custom_vjp(_primal, nondiff_argnums=(0,))
two_pass.defvjp(_forward, _backward)
