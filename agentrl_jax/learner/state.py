"""What one optimisation step reads and returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from agentrl_jax.learner.placement import beside, placed_like
from agentrl_jax.models.lora import trained


class LearnerState(NamedTuple):
    """A policy under training. Every update donates what it trains: hold on to the newest one only."""

    params: Any
    opt_state: Any
    step: Array  # i32[], updates applied so far


def init_state(optimizer: optax.GradientTransformation, params: Any) -> LearnerState:
    """The state before the first update. `params` is shared with the state, and donated with it.

    All of it lies on the devices of the params, see `placement.placed_like`.
    """
    learned, aside = trained(params), beside(params)
    fresh = lambda learned: (optimizer.init(learned), jnp.zeros((), jnp.int32))  # noqa: E731
    shapes = jax.eval_shape(optimizer.init, learned)
    options: dict[str, Any] = {} if aside is None else {"out_shardings": (placed_like(shapes, learned), aside)}
    return LearnerState(params, *jax.jit(fresh, **options)(learned))
