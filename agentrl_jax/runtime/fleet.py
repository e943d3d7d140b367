"""The devices that sample: one program over all of them, each with pages and rows of its own.

Arrays of pages or rows are split along that axis, params are whole on every device, and nothing is exchanged: a device
computes what it would alone, to the bit. One program means one compilation and one dispatch however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.sampler import placement

AXIS = "sampler"
WHOLE, SPLIT, COLUMNS = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)


def spread(devices: Sequence[Any]) -> NamedSharding:
    """The placement of an engine whose slots are spread over these devices, all of this process."""
    return NamedSharding(Mesh(np.asarray(devices, dtype=object), (AXIS,)), WHOLE)


class Fleet:
    """Where an engine's arrays lie. `sharding`: of what is whole; the `sampler` axis of its mesh has the devices, and
    without one (or a sharding) everything is as on one device."""

    def __init__(self, sharding: Any = None) -> None:
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        self._mesh = None if mesh is None or AXIS not in mesh.shape else mesh
        self.whole = sharding
        self.split = sharding if self._mesh is None else NamedSharding(self._mesh, SPLIT)
        self.pools = placement.pools(sharding) if self._mesh is None else self.split
        self.count = 1 if self._mesh is None else self._mesh.shape[AXIS]

    def jit(self, f: Callable[..., Any], specs: tuple[Any, ...], out: Any, donate: int) -> Any:
        """`f` on every device at once: `specs` say of each argument, `out` of the results, what a device has of it."""

        def one(*arguments: Any) -> Any:  # a function of its own: jit shares what it compiled, and its count, by it
            return f(*arguments)

        if self._mesh is None or self.count == 1:
            places = jax.tree.map(lambda spec: self.pools if spec == SPLIT else self.whole, out, is_leaf=_is_spec)
            return jax.jit(one, donate_argnums=donate, out_shardings=places)
        one = jax.shard_map(one, mesh=self._mesh, in_specs=specs, out_specs=out, check_vma=False)
        return jax.jit(one, donate_argnums=donate)

    def put(self, tree: Any) -> Any:
        """Host arrays, an equal share of each for every device."""
        return jax.device_put(tree, self.split)

    def adopt(self, params: Any) -> Any:
        """Params whole on every device: what a device holds already is taken as it is, else copied from another device.

        Nothing passes through the host. Raises `ValueError` where an array is not whole on the devices it is on.
        """
        return params if self._mesh is None else jax.tree.map(self._adopt, params)

    def _adopt(self, x: jax.Array) -> jax.Array:
        if x.sharding == self.whole:
            return x
        if not x.is_fully_replicated:
            raise ValueError(f"Fleet.adopt: an array {x.shape} is split as {x.sharding}; expected whole arrays")
        assert self._mesh is not None
        held, devices = (
            {shard.device: shard.data for shard in x.addressable_shards},
            list(np.ravel(np.asarray(self._mesh.devices))),
        )
        if any(device not in held for device in devices):
            return jax.device_put(next(iter(held.values())), self.whole)
        return jax.make_array_from_single_device_arrays(x.shape, self.whole, [held[device] for device in devices])


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
