"""Params of few bits, updated through a copy in f32 that the optimizer keeps.

An update of a thousandth of a parameter is lost in bf16, whose numbers lie 1/256 apart: the params would stand still.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from agentrl_jax.learner.placement import on_device


class Masters(NamedTuple):
    """State of `with_masters` for params of fewer bits than f32."""

    params: Any  # f32, like the params
    inner: Any


def with_masters(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` on f32 masters: `masters <- masters + updates`, params = masters in the params' dtype.

    The updates are those of the masters; `applied` makes the new params of them, to the bit. Where every parameter has
    32 bits there is nothing to keep, and this is `optimizer` itself, its state as well.

    Micikevicius et al. 2018, arXiv:1710.03740.
    """

    def init(params: Any) -> Any:
        if all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params)):
            return optimizer.init(params)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return Masters(wide, optimizer.init(wide))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, Masters):
            return optimizer.update(updates, state, params)
        updates, inner = optimizer.update(updates, state.inner, state.params)
        return updates, Masters(optax.apply_updates(state.params, updates), inner)

    return optax.GradientTransformation(init, update)


def updated(params: Any, opt_state: Any) -> Any:
    """What an optimizer's updates are added to: the masters where there are some, else the params."""
    return opt_state.params if isinstance(opt_state, Masters) else params


def applied(params: Any, updates: Any, opt_state: Any) -> Any:
    """The params after `updates`, given the state that came with them: the masters rounded, where there are some."""
    if isinstance(opt_state, Masters):
        return jax.tree.map(lambda master, leaf: master.astype(leaf.dtype), opt_state.params, params)
    return optax.apply_updates(params, updates)


def masters_of(opt_state: Any) -> Any:
    """The masters in an optimizer's state; None where it has none."""
    return opt_state.params if isinstance(opt_state, Masters) else None


def started(optimizer: optax.GradientTransformation, params: Any, masters: Any = None) -> Any:
    """The state before the first update. Where it has masters, they are copies of those given, if any are: the params
    that an earlier stage has left have lost bits."""
    state = optimizer.init(params)
    if masters is None or not isinstance(state, Masters):
        return state
    return state._replace(params=jax.tree.map(jnp.copy, on_device(masters)))
