"""Which axes of a stacked parameter are one matrix: what optimizers that act on matrices have to know.

A parameter of L layers is one array, query f32[L, D, H, C] for example, and stands for L matrices [D, H C]. An
optimizer that took it as it lies would mix layers, or heads with channels.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from agentrl_jax.models.lora import PROJECTIONS

# Logical axes of (inputs, outputs) as matrices, see `models.config.layer_parameters`.
_AXES = {
    "query": ("width", "heads"), "key": ("width", "kv_heads"), "value": ("width", "kv_heads"),
    "out": ("heads", "width"), "gate": ("width", "mlp"), "up": ("width", "mlp"), "down": ("mlp", "width"),
    "router": ("width", None),
}  # fmt: skip
_INPUTS = {**PROJECTIONS, "router": 1}
_OUTPUTS = {"query": 2, "key": 2, "value": 2}  # where it is not one axis


class Matrix(NamedTuple):
    """Axes of one array, from the first: `stacked` ones (layers, experts), those summed over, those of the outputs."""

    stacked: int
    inputs: int
    outputs: int
    logical: tuple[str | None, str | None] = (None, None)  # names of inputs and outputs


def matrix_of(path: tuple[Any, ...], ndim: int) -> Matrix | None:
    """What a parameter at `path` of a params tree is as a matrix; None: a norm, a bias, or outside the layers.

    Projections, those of experts, routers, and the adapters of projections ({projection: {"a": .., "b": ..}}).
    """
    names = [getattr(key, "key", None) for key in path]
    name, owner = (names[-1] if names else None), (names[-2] if len(names) > 1 else None)
    if owner in PROJECTIONS and name in ("a", "b"):
        inputs = PROJECTIONS[str(owner)] if name == "a" else 1
        return Matrix(1, inputs, ndim - 1 - inputs)
    if owner == "layers" and name in _AXES:
        inputs, outputs = _INPUTS[str(name)], _OUTPUTS.get(str(name), 1)
        return Matrix(ndim - inputs - outputs, inputs, outputs, _AXES[str(name)])
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
