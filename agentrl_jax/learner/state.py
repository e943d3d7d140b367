"""What one optimisation step reads and returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from agentrl_jax.models.lora import trained


class LearnerState(NamedTuple):
    """A policy under training. Every update donates what it trains: hold on to the newest one only."""

    params: Any
    opt_state: Any
    step: Array  # i32[], updates applied so far


def init_state(optimizer: optax.GradientTransformation, params: Any) -> LearnerState:
    """The state before the first update. `params` is shared with the state, and donated with it."""
    return LearnerState(params, jax.jit(optimizer.init)(trained(params)), jnp.zeros((), jnp.int32))
