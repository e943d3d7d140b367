"""What one optimisation step reads and returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from agentrl_jax.learner.masters import masters_of, started
from agentrl_jax.learner.placement import beside, in_memory, placed_like
from agentrl_jax.models.lora import trained


class LearnerState(NamedTuple):
    """A policy under training. Every update donates what it trains: hold on to the newest one only."""

    params: Any
    opt_state: Any
    step: Array  # i32[], updates applied so far


def init_state(
    optimizer: optax.GradientTransformation, params: Any, *, before: Any = None, memory_kind: str | None = None
) -> LearnerState:
    """The state before the first update. `params` is shared with the state, and donated with it.

    All of it lies on the devices of the params, see `placement.placed_like`; of `opt_state` what is more than a number
    in the memory of `memory_kind` ("pinned_host") where one is given, which takes params on a mesh. `before`: the
    `opt_state` that led to the params, see `masters.started`.
    """
    learned, aside = trained(params), beside(params)
    fresh = lambda learned, before: (started(optimizer, learned, before), jnp.zeros((), jnp.int32))  # noqa: E731
    options: dict[str, Any] = {}
    if aside is not None:
        shapes = jax.eval_shape(optimizer.init, learned)
        options = {"out_shardings": (in_memory(placed_like(shapes, learned), shapes, memory_kind), aside)}
    return LearnerState(params, *jax.jit(fresh, **options)(learned, masters_of(before)))
