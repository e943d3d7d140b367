"""Matrix work of a traced program, loops multiplied out: exact, and known in seconds without any compiler."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr


class Flops(NamedTuple):
    """Operations of matrix products: of weights with activations, and of attention (products with a batch axis)."""

    weights: float = 0.0
    attention: float = 0.0


def count(traced: Any, trips: int = 1) -> Flops:
    """Of a `jax.stages.Traced`, over all devices. `trips`: how often a loop runs whose length only the data tell.

    A branch by platform counts as its plain form does, since what a kernel multiplies its caller cannot see.
    """
    return _walk(traced.jaxpr.jaxpr, trips)


def _walk(jaxpr: Any, trips: int) -> Flops:
    weights = attention = 0.0
    for equation in jaxpr.eqns:
        found, times = _one(equation, trips), 1
        if equation.primitive.name == "scan":
            times = equation.params["length"]
        elif equation.primitive.name == "while":
            times = trips
        weights, attention = weights + times * found.weights, attention + times * found.attention
    return Flops(weights, attention)


def _one(equation: Any, trips: int) -> Flops:
    name = equation.primitive.name
    if name == "dot_general":
        return _product(equation)
    inner = [_walk(jaxpr, trips) for jaxpr in _programs(equation)]
    if name == "pallas_call" or not inner:
        return Flops()
    if name == "cond":
        return max(inner, key=sum)
    shares = _devices(equation) if name == "shard_map" else 1
    return Flops(*(shares * sum(part) for part in zip(*inner, strict=True)))


def _product(equation: Any) -> Flops:
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    work = 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)
    return Flops(0.0, work) if batched else Flops(work, 0.0)


def _programs(equation: Any) -> list[Any]:
    """The programs that an equation holds, each as a plain jaxpr."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, ClosedJaxpr):
                found.append(part.jaxpr)
            elif isinstance(part, Jaxpr):
                found.append(part)
    return found


def _devices(equation: Any) -> int:
    params = equation.params
    mesh, axes = params["mesh"], params.get("newly_manual_axes", params.get("manual_axes", ()))  # by release
    return math.prod(mesh.shape[axis] for axis in axes)
