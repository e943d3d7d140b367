"""Matrices made orthogonal by Newton-Schulz iterations, each whole on one device of a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax import sharding

Logical = tuple[str | None, str | None]
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at 0 of those that keep singular values near 1
_ITERATIONS = 5


def orthogonal(x: jax.Array, logical: Logical = (None, None)) -> jax.Array:
    """About U V^T of each matrix U S V^T of x [..., in, out]: `X <- a X + (b A + c A A) X`, A = X X^T, five times.

    Singular values come to lie between about 0.7 and 1.2, however small they were; of zeros there come zeros.

    `logical`: what in and out are called in the sharding rules. On a mesh that splits them, each of the products would
    gather a whole stack of layers; instead each device is sent a share of the matrices, and sends them back.

    Jordan 2024, https://kellerjordan.github.io/posts/muon/.
    """
    if x.ndim == 3:
        return _of_stack(x, (None, *logical))
    # Experts lie on a mesh axis and layers on none: with experts first, a device's share is in one piece.
    turned = jnp.moveaxis(x, 1, 0)
    found = _of_stack(turned.reshape(-1, *x.shape[2:]), ("experts", *logical))
    return jnp.moveaxis(found.reshape(turned.shape), 0, 1)


def _of_stack(x: jax.Array, logical: tuple[str | None, ...]) -> jax.Array:
    """x [N, in, out]."""
    each = jax.vmap(_newton_schulz)
    mesh = sharding.mesh_of(x)
    if mesh is None or mesh.size == 1:
        return each(x)
    count, route = x.shape[0], _route(mesh, logical)
    # Zeros behind, so that the devices' shares are equal.
    x = jnp.pad(x, ((0, -count % mesh.size), (0, 0), (0, 0)))
    for place in route:
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, place))
    x = each(x)
    for place in reversed(route):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, place))
    return x[:count]


def _route(mesh: Any, logical: tuple[str | None, ...]) -> list[PartitionSpec]:
    """Placements on the way from the rules' to whole matrices: one axis moves at a time, by an all-to-all.

    Asked for at once, the compiler would gather everything everywhere and cut it up again.
    """
    first, *sides = ([a for a in sharding.names(part) if mesh.shape[a] > 1] for part in sharding.spec(logical))
    route = [[first, *sides]]
    for index, side in enumerate(sides):
        for _ in side:
            moved = [list(part) for part in route[-1]]
            moved[0].append(moved[1 + index].pop())
            route.append(moved)
    rest = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in route[-1][0]]
    route.append([[*route[-1][0], *rest], [], []])
    return [PartitionSpec(*(tuple(part) or None for part in parts)) for parts in route]


def _newton_schulz(x: jax.Array) -> jax.Array:
    a, b, c = (jnp.asarray(value, x.dtype) for value in _COEFFICIENTS)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (jnp.linalg.norm(x) + jnp.asarray(1e-8, x.dtype))

    def iterate(_: Any, x: jax.Array) -> jax.Array:
        square = x @ x.T
        return a * x + (b * square + c * square @ square) @ x

    x = lax.fori_loop(0, _ITERATIONS, iterate, x)
    return x.T if tall else x
