"""Metrics that add up: merged on the device as sums, counts and maxima, divided once on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from agentrl_jax.rl.types import Metrics


def empty(shape_of: Metrics) -> Metrics:
    """The neutral element of `merge`, with the names of `shape_of` (arrays or their shapes).

    Maxima start at 0: they are of magnitudes.
    """
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape_of)


def merge(one: Metrics, other: Metrics) -> Metrics:
    """Metrics of two disjoint parts of a batch -> metrics of both. Sums and counts add, maxima take the larger."""
    return Metrics(
        sums=jax.tree.map(jnp.add, one.sums, other.sums),
        maxima=jax.tree.map(jnp.maximum, one.maxima, other.maxima),
    )


def merged(parts: Metrics) -> Metrics:
    """Metrics whose leaves have a dimension of disjoint parts in front -> metrics of all of them, as `merge` adds."""
    return Metrics(
        sums=jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), parts.sums),
        maxima=jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), parts.maxima),
    )


def over_devices(one: Metrics, axis_name: str) -> Metrics:
    """Metrics of each device's rows -> metrics of all rows, the same on every device of a mapped axis."""
    return Metrics(sums=lax.psum(one.sums, axis_name), maxima=lax.pmax(one.maxima, axis_name))


def to_host(metrics: Metrics) -> dict[str, float]:
    """Means and maxima as Python floats; a mean over nothing is left out. One explicit transfer."""
    sums, maxima = jax.device_get((metrics.sums, metrics.maxima))
    means = {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count) > 0}
    return means | {name: float(value) for name, value in maxima.items()}
