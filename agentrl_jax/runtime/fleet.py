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

from agentrl_jax.models.decoder import DecoderConfig
from agentrl_jax.sampler import placement

AXIS = "sampler"
WHOLE, SPLIT, COLUMNS = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)


def spread(devices: Sequence[Any], tensor: int = 1) -> NamedSharding:
    """The placement of an engine whose slots are spread over these devices, all of this process.

    `tensor` devices in a row share one copy of the weights and the pages of their slots, by heads
    (`sampler.placement`). Raises `ValueError` where that does not divide the devices.
    """
    if len(devices) % tensor:
        raise ValueError(f"spread: tensor={tensor}: expected a divisor of the {len(devices)} devices")
    grid = np.asarray(devices, dtype=object).reshape(-1, tensor)
    return NamedSharding(Mesh(grid, (AXIS, "tensor")) if tensor > 1 else Mesh(grid[:, 0], (AXIS,)), WHOLE)


class Fleet:
    """Where an engine's arrays lie. `sharding`: of what is whole; the `sampler` axis of its mesh has the devices, and
    without one (or a sharding) everything is as on one device. Below, a device is a row of a `tensor` axis."""

    def __init__(self, sharding: Any = None) -> None:
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        self._mesh: Any = None if mesh is None or AXIS not in mesh.shape else mesh
        self.count = 1 if self._mesh is None else self._mesh.shape[AXIS]
        self.whole, heads = sharding, placement.pools(sharding)
        self.split = self.columns = sharding  # of the rows, and of what is drawn for them
        self.pools = heads
        if self._mesh is not None:
            self.split, self.columns = (NamedSharding(self._mesh, spec) for spec in (SPLIT, COLUMNS))
            self.pools = NamedSharding(self._mesh, PartitionSpec(AXIS, *heads.spec[1:]))

    def jit(self, f: Callable[..., Any], specs: tuple[Any, ...], out: Any, places: Any, donate: int) -> Any:
        """`f` on every device at once: `specs` say of each argument, `out` of the results, what a device has of it;
        `places` where the results lie."""

        def one(*arguments: Any) -> Any:  # a function of its own: jit shares what it compiled, and its count, by it
            return f(*arguments)

        if self.count > 1:
            one = jax.shard_map(one, mesh=self._mesh, in_specs=specs, out_specs=out, axis_names={AXIS}, check_vma=False)
        return jax.jit(one, donate_argnums=donate, out_shardings=places)

    def put(self, tree: Any) -> Any:
        """Host arrays, an equal share of each for every device."""
        return jax.device_put(tree, self.split)

    def adopt(self, config: DecoderConfig, params: Any) -> Any:
        """The params on these devices: what a device holds already is taken as it is, else copied from another one.

        Nothing passes through the host. Raises `ValueError` where an array lies on other devices, and not whole.
        """
        if self._mesh is None:
            return params
        places = placement.weights(config, self.whole)
        if isinstance(places, NamedSharding):
            return jax.tree.map(lambda x: self._adopt(x, places), params)
        return jax.tree.map(self._adopt, params, places)

    def _adopt(self, x: jax.Array, place: NamedSharding) -> jax.Array:
        if x.sharding == place:
            return x
        if not x.is_fully_replicated:
            raise ValueError(f"Fleet.adopt: an array {x.shape} is split as {x.sharding}; expected whole arrays")
        held, devices = {shard.device: shard.data for shard in x.addressable_shards}, list(self._mesh.devices.flat)
        if any(device not in held for device in devices) or not place.is_fully_replicated:
            return jax.device_put(next(iter(held.values())), place)
        return jax.make_array_from_single_device_arrays(x.shape, place, [held[device] for device in devices])
