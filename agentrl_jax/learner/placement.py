"""Where arrays lie: results keep the placement of what they are made from, and slices spread over all devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax.batch import TokenBatch


class Placed:
    """`jax.jit` whose output placement is read off the arguments of the first call.

    Left to itself the compiler may place the first result otherwise than the second,
    and the next call would compile again.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        placement: Callable[..., Any],
        donate: tuple[int, ...] = (),
        static: tuple[int, ...] = (),
    ) -> None:
        self.function, self._placement, self._donate, self._static = function, placement, donate, static
        self._jitted: Any = None

    def __call__(self, *args: Any) -> Any:
        return self._made_for(args)(*args)

    def trace(self, *args: Any) -> Any:
        """What `jax.jit(...).trace` gives for arrays, or for shapes that say where arrays would lie."""
        return self._made_for(args).trace(*args)

    def _made_for(self, args: tuple[Any, ...]) -> Any:
        if self._jitted is None:
            on_mesh = beside(args[0]) is not None
            options: dict[str, Any] = {"out_shardings": self._placement(*args)} if on_mesh else {}

            @wraps(self.function)
            def own(*args: Any) -> Any:  # jit shares what it compiled, and its count, between all jits of a function
                return self.function(*args)

            self._jitted = jax.jit(own, donate_argnums=self._donate, static_argnums=self._static, **options)
        return self._jitted

    def size(self) -> int:
        """How many times it was compiled."""
        return 0 if self._jitted is None else self._jitted._cache_size()


def placed(tree: Any) -> Any:
    """The sharding of every array of a tree."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def placed_like(state: Any, params: Any) -> Any:
    """The placement of an optimizer's state: what it keeps for a parameter lies as the parameter does.

    A leaf belongs to the parameter whose path its own path ends with, as in `mu["layers"]["query"]`. Where it has not
    its shape (a factored moment lacks a dimension) the dimensions that are left are split as they were. All else, such
    as counts, is whole on every device. Arrays, or shapes that say where arrays would lie.
    """
    known = dict(jax.tree.leaves_with_path(params))
    whole = beside(params)

    def place(path: Any, leaf: Any) -> Any:
        owner = next((known[path[at:]] for at in range(len(path) + 1) if path[at:] in known), None)
        return whole if owner is None else _split_like(leaf.shape, owner) or whole

    return jax.tree.map_with_path(place, state)


def _split_like(shape: tuple[int, ...], owner: Any) -> NamedSharding | None:
    sharding = owner.sharding
    if shape == owner.shape:
        return sharding
    parts = (*sharding.spec, *[None] * (len(owner.shape) - len(sharding.spec)))
    for out in range(len(owner.shape)):
        if shape == (*owner.shape[:out], *owner.shape[out + 1 :]):
            return NamedSharding(sharding.mesh, PartitionSpec(*parts[:out], *parts[out + 1 :]))
    return None


def beside(tree: Any) -> NamedSharding | None:
    """Replicated on the mesh of `tree`'s arrays; None where they lie on one device without a mesh."""
    sharding = getattr(jax.tree.leaves(tree)[0], "sharding", None)
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


def in_memory(places: Any, state: Any, kind: str | None) -> Any:
    """`places` of `state` in memory of this kind, what is a single number excepted; None leaves them."""
    if kind is None:
        return places
    return jax.tree.map(lambda place, leaf: place.with_memory_kind(kind) if leaf.ndim else place, places, state)


def on_device(tree: Any) -> Any:
    """Inside jit: what lies in the host's memory, brought to the device; the rest as it is."""
    host = jax.memory.Space.Host
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, jax.memory.Space.Device) if jax.typeof(leaf).memory_space == host else leaf,
        tree,
    )


def put_row(row: int | Array, tree: Any) -> Array:
    """A row number on the devices of `tree`, those of other processes too, transferred explicitly."""
    if isinstance(row, jax.Array):
        return row
    place, value = beside(tree), np.asarray(row, np.int32)
    if place is None or place.is_fully_addressable:
        return jax.device_put(value, place)
    shards = [jax.device_put(value, device) for device in place.addressable_devices]
    return jax.make_array_from_single_device_arrays((), place, shards)


def rows_sharding(batch: TokenBatch) -> NamedSharding | None:
    """How the rows of a device batch are spread over a mesh, or None."""
    sharding = getattr(batch.tokens, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def slice_rows(batch: TokenBatch, start: Array, count: int, rows: NamedSharding | None) -> TokenBatch:
    """`count` rows of a batch from row `start` on, spread as `rows` says; fields that are None stay None.

    Consecutive rows of a sharded batch lie on some of its devices only. Where `count` permits, every
    device is given a share of them again; else the compiler repeats the work on each.

    Raises `ValueError` when `count` does not divide the rows of the batch: the last slice would overlap.
    """
    total = batch.tokens.shape[0]
    if count < 1 or total % count:
        raise ValueError(f"micro_rows: expected a divisor of the batch's {total} rows, got {count}")
    part = jax.tree.map(lambda field: lax.dynamic_slice_in_dim(field, start, count), batch)
    spreads = rows is not None and count % (total // rows.shard_shape((total,))[0]) == 0
    return lax.with_sharding_constraint(part, rows) if spreads else part
