"""The step under `jax.pmap`, for pure data parallelism: a variant to read and to compare with, not what runs use.

Under `jax.jit` (`update.Update`) one program sees all rows, and the compiler adds up what devices hold of them. Under
`jax.pmap` each device runs its own program on its own rows, so what adds up has to be said, and where: behind the
gradient. With a `psum` inside of what is differentiated the loss comes out right and each device's gradient wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from agentrl_jax.batch import TokenBatch
from agentrl_jax.learner import metrics
from agentrl_jax.learner.state import LearnerState
from agentrl_jax.learner.update import Accumulator, StepInfo, Update

_AXIS = "devices"


def pmap_step(update: Update) -> Callable[[LearnerState, TokenBatch], tuple[LearnerState, StepInfo]]:
    """`update.step` of one micro-batch a device. State, batch and results have the devices as their first axis.

    The state [N, ...] is the same on every device, and donated; the batch [N, micro_rows, T] holds each device's rows.
    Its weights carry the denominators of the whole step, so losses and gradients of the devices add up to those of
    one device with all rows, and every device applies the same update.
    """

    def step(state: LearnerState, batch: TokenBatch) -> tuple[LearnerState, StepInfo]:
        return update.inline(state, batch, _over_devices)

    return jax.pmap(step, axis_name=_AXIS, donate_argnums=(0,))


def _over_devices(acc: Accumulator) -> Accumulator:
    grads, loss = lax.psum((acc.grads, acc.loss), _AXIS)
    return Accumulator(grads, loss, metrics.over_devices(acc.metrics, _AXIS))


def on_each(tree: Any, devices: int) -> Any:
    """The tree [...] once for each device, [N, ...]."""
    return jax.tree.map(lambda leaf: jax.numpy.broadcast_to(leaf[None], (devices, *leaf.shape)), tree)
