"""One optimisation step: gradients summed over micro-batches, then one guarded application."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import NamedSharding

from agentrl_jax.batch import TokenBatch
from agentrl_jax.learner import metrics
from agentrl_jax.learner.masters import applied, updated
from agentrl_jax.learner.placement import Placed, beside, on_device, placed, put_row, rows_sharding, slice_rows
from agentrl_jax.learner.score import Scorer
from agentrl_jax.learner.state import LearnerState
from agentrl_jax.models.lora import trained, with_trained
from agentrl_jax.rl.types import Loss, Metrics


class Accumulator(NamedTuple):
    """What the micro-batches of one step have added up so far."""

    grads: Any  # f32, like what is trained of the params
    loss: Array  # f32[]
    metrics: Metrics


class StepInfo(NamedTuple):
    """What one application did. `grad_norm` is before clipping; not `finite` means that nothing was applied."""

    finite: Array  # bool[]
    grad_norm: Array  # f32[]
    update_norm: Array  # f32[]
    loss: Array  # f32[]
    metrics: Metrics

    def to_host(self) -> dict[str, Any]:
        """Flat Python numbers: finite, grad_norm, update_norm, loss, and every mean and maximum by name."""
        finite, grad_norm, update_norm, loss = jax.device_get(self[:4])
        figures = {"grad_norm": float(grad_norm), "update_norm": float(update_norm), "loss": float(loss)}
        return {"finite": bool(finite), **figures, **metrics.to_host(self.metrics)}


class Update:
    """Device functions, each compiled once per run: `start`, `accumulate` and `apply`; `step` runs all three.

    A batch that is one micro-batch is not added to zeros: `step` runs `gradients` in place of the first two, and the
    gradients are there once instead of twice.

    Whatever sharding params, state and batch arrive with at the first call is the one that results keep.
    """

    def __init__(
        self, gradients: Callable[..., Any], accumulate: Callable[..., Any], apply: Callable[..., Any],
        start: Callable[..., Any], micro_rows: int,
    ) -> None:  # fmt: skip
        def beginning(params: Any, *_: Any) -> Accumulator:
            return Accumulator(placed(trained(params)), beside(params), beside(params))  # pyright: ignore

        self._micro_rows = micro_rows
        self._start = Placed(start, placement=beginning)
        self._gradients = Placed(gradients, placement=beginning, static=(3,))
        self._accumulate = Placed(accumulate, donate=(1,), placement=lambda _, acc, *rest: placed(acc), static=(4,))
        self._apply = Placed(apply, donate=(0,), placement=lambda state, acc: (placed(state), beside(state)))

    def start(self, params: Any) -> Accumulator:
        """Zero gradients, loss and metrics."""
        return self._start(trained(params))

    def gradients(self, params: Any, batch: TokenBatch, row: int | Array) -> Accumulator:
        """Gradient, loss and metrics of the micro-batch that begins at `row`."""
        return self._gradients(params, batch, put_row(row, params), rows_sharding(batch))

    def accumulate(self, params: Any, acc: Accumulator, batch: TokenBatch, row: int | Array) -> Accumulator:
        """Add the gradient, loss and metrics of the micro-batch that begins at `row`. Consumes `acc`."""
        return self._accumulate(params, acc, batch, put_row(row, params), rows_sharding(batch))

    def apply(self, state: LearnerState, acc: Accumulator) -> tuple[LearnerState, StepInfo]:
        """One optimizer update, or the state unchanged where the gradient is not finite. Consumes both."""
        # What is frozen does not go in, or it would be donated and written again.
        new, info = self._apply(state._replace(params=trained(state.params)), acc)
        # No output has room for the gradients, so they cannot be donated; freed here, before the next step's.
        jax.tree.map(lambda leaf: leaf.delete(), acc.grads)
        return new._replace(params=with_trained(state.params, new.params)), info

    def step(self, state: LearnerState, batch: TokenBatch, rows: Iterable[int]) -> tuple[LearnerState, StepInfo]:
        """`start`, `accumulate` for every micro-batch that begins at one of `rows`, `apply`."""
        rows = tuple(rows)
        if len(rows) == 1 and self._is_whole(batch):
            return self.apply(state, self.gradients(state.params, batch, rows[0]))
        acc = self.start(state.params)
        for row in rows:
            acc = self.accumulate(state.params, acc, batch, row)
        return self.apply(state, acc)

    def _is_whole(self, batch: TokenBatch) -> bool:
        """Whether the batch is a single micro-batch: the same for all batches of a run."""
        return batch.tokens.shape[0] == self._micro_rows

    def inline(
        self, state: LearnerState, batch: TokenBatch, over_devices: Callable[[Accumulator], Accumulator]
    ) -> tuple[LearnerState, StepInfo]:
        """`step` of one micro-batch as plain functions, to be traced under a transformation that maps over devices.

        `over_devices` adds up what the devices have accumulated.
        """
        learned = trained(state.params)
        acc = over_devices(self._gradients.function(state.params, batch, jnp.int32(0), None))
        new, info = self._apply.function(state._replace(params=learned), acc)
        return new._replace(params=with_trained(state.params, new.params)), info

    def traced(self, state: LearnerState, batch: TokenBatch) -> dict[str, Any]:
        """`jax.stages.Traced` for shapes that say where their arrays would lie: of `accumulate`, or what `step` runs in
        its place, and of `apply`."""
        learned, aside = trained(state.params), beside(state.params)
        grads, *rest = jax.eval_shape(self._start.function, learned)
        grads = jax.tree.map(lambda g, p: jax.ShapeDtypeStruct(g.shape, g.dtype, sharding=p.sharding), grads, learned)
        rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=aside), rest)
        acc, row = Accumulator(grads, *rest), jax.ShapeDtypeStruct((), jnp.int32, sharding=aside)
        where = batch, row, rows_sharding(batch)
        if self._is_whole(batch):
            summing = self._gradients.trace(state.params, *where)
        else:
            summing = self._accumulate.trace(state.params, acc, *where)
        return {"accumulate": summing, "apply": self._apply.trace(state._replace(params=learned), acc)}

    def cache_sizes(self) -> dict[str, int]:
        """How many times each function that ran was compiled; more than 1 is a defect."""
        summing = {"start": self._start, "gradients": self._gradients, "accumulate": self._accumulate}
        return {
            name: function.size() for name, function in (*summing.items(), ("apply", self._apply)) if function.size()
        }


def make_update(
    scorer: Scorer,
    loss_fn: Loss,
    optimizer: optax.GradientTransformation,
    *,
    micro_rows: int,
    needs_entropy: bool = False,
) -> Update:
    """The optimisation step of a policy for a loss that is one weighted sum over tokens.

    `grads = sum_m d/dparams loss_fn(scorer.logprobs(params, micro-batch m))`. The weights carry every
    denominator, computed over the whole step beforehand, so splitting rows into micro-batches or
    over devices changes nothing. Gradients are summed in f32.

    Args:
      scorer: the model.
      loss_fn: (logprobs, entropy, batch) -> (sum, Metrics).
      optimizer: an optax transformation.
      micro_rows: rows per micro-batch; divides the rows of the batch. Best a multiple of the devices
        that share the rows, or the compiler has to replicate work.
      needs_entropy: whether `loss_fn` is given entropies.

    Returns:
      An `Update`.
    """

    def start(params: Any) -> Accumulator:
        table = jax.ShapeDtypeStruct((micro_rows, 2), jnp.float32)
        _, figures = jax.eval_shape(loss_fn, table, table if needs_entropy else None, _example(micro_rows))
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return Accumulator(grads, jnp.zeros((), jnp.float32), metrics.empty(figures))

    def gradients(params: Any, batch: TokenBatch, row: Array, rows: NamedSharding | None) -> Accumulator:
        part = slice_rows(batch, row, micro_rows, rows)

        def loss(learned: Any) -> tuple[Array, Metrics]:
            return scorer.loss(loss_fn, with_trained(params, learned), part, entropy=needs_entropy)

        (value, figures), grads = jax.value_and_grad(loss, has_aux=True)(trained(params))
        return Accumulator(jax.tree.map(lambda g: g.astype(jnp.float32), grads), value, figures)

    def accumulate(
        params: Any, acc: Accumulator, batch: TokenBatch, row: Array, rows: NamedSharding | None
    ) -> Accumulator:
        grads, value, figures = gradients(params, batch, row, rows)
        return Accumulator(
            jax.tree.map(jnp.add, acc.grads, grads), acc.loss + value, metrics.merge(acc.metrics, figures)
        )

    def moved(state: LearnerState, summed: Any) -> tuple[LearnerState, Array]:
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), summed, updated(state.params, state.opt_state))
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer step counts
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = LearnerState(applied(state.params, updates, opt_state), opt_state, state.step + 1)
        return new, optax.tree.norm(updates).astype(jnp.float32)

    def apply(state: LearnerState, acc: Accumulator) -> tuple[LearnerState, StepInfo]:
        state = state._replace(opt_state=on_device(state.opt_state))
        grad_norm = optax.tree.norm(acc.grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(acc.loss)
        # A branch, not a choice between old and new numbers afterwards: that would keep a copy of both moments.
        kept = lambda state, _: (state, jnp.zeros((), jnp.float32))  # noqa: E731
        state, update_norm = lax.cond(finite, moved, kept, state, acc.grads)
        return state, StepInfo(finite, grad_norm, update_norm, acc.loss, acc.metrics)

    return Update(gradients, accumulate, apply, start, micro_rows)


def _example(rows: int) -> TokenBatch:
    """The shapes of a batch with every optional field that a loss reads, to learn the names of its metrics from."""
    dtypes = dict.fromkeys(TokenBatch._fields, jnp.float32)
    dtypes |= dict.fromkeys(("tokens", "parents", "subtree_ends", "positions"), jnp.int32)
    dtypes |= dict.fromkeys(("trajectory_ids", "turn_ids", "policy_versions"), jnp.int32)
    dtypes |= {"sources": jnp.int8, "action_mask": jnp.bool_}
    shapes = {name: jax.ShapeDtypeStruct((rows, 2), dtype) for name, dtype in dtypes.items()}
    return TokenBatch(**shapes | {"kept": None})
