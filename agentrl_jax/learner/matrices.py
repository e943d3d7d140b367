"""Which axes of a stacked parameter are one matrix: what optimizers that act on matrices have to know.

A parameter of L layers is one array, query f32[L, D, H, C] for example, and stands for L matrices [D, H C]. An
optimizer that took it as it lies would mix layers, or heads with channels.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import optax

from agentrl_jax.models.lora import PROJECTIONS

_OUTPUTS = {"query": 2, "key": 2, "value": 2}  # axes of the output, where it is not one
_INPUTS = {**PROJECTIONS, "router": 1}


class Matrix(NamedTuple):
    """Axes of one array, from the first: `stacked` ones (layers, experts), those summed over, those of the outputs."""

    stacked: int
    inputs: int
    outputs: int


def matrix_of(path: tuple[Any, ...], ndim: int) -> Matrix | None:
    """What a parameter at `path` of a params tree is as a matrix; None: a norm, a bias, or outside the layers.

    Projections, those of experts, routers, and the adapters of projections ({projection: {"a": .., "b": ..}}).
    """
    names = [getattr(key, "key", None) for key in path]
    name, owner = (names[-1] if names else None), (names[-2] if len(names) > 1 else None)
    if owner in PROJECTIONS and name in ("a", "b"):
        inputs = PROJECTIONS[str(owner)] if name == "a" else 1
        return Matrix(1, inputs, ndim - 1 - inputs)
    if owner == "layers" and name in _INPUTS:
        inputs, outputs = _INPUTS[str(name)], _OUTPUTS.get(str(name), 1)
        return Matrix(ndim - inputs - outputs, inputs, outputs)
    return None


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Whether the first axis of the parameter at `path` numbers layers."""
    return getattr(path[0], "key", None) in ("layers", *PROJECTIONS) if path else False


def flattened(path: tuple[Any, ...], x: Any) -> Any:
    """The parameter as matrices [..., inputs, outputs]; what is no matrix stays as it is."""
    found = matrix_of(path, x.ndim)
    if found is None:
        return x
    cut = found.stacked + found.inputs
    return x.reshape(*x.shape[: found.stacked], prod(x.shape[found.stacked : cut]), prod(x.shape[cut:]))


def on_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on the params as `flattened` gives them. State that it keeps has those shapes."""

    def init(params: Any) -> Any:
        return inner.init(_flat(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        found, state = inner.update(_flat(updates), state, None if params is None else _flat(params))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), found, updates), state

    return optax.GradientTransformation(init, update)


def for_each(function: Callable[[tuple[Any, ...], Any], Any]) -> optax.GradientTransformation:
    """The transformation without state that maps every update, given its path."""
    return optax.stateless(lambda updates, params: jax.tree.map_with_path(function, updates))


def _flat(tree: Any) -> Any:
    return jax.tree.map_with_path(flattened, tree)
