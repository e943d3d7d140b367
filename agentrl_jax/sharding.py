"""One mesh, logical-axis rules, and placement. Imports nothing else of the package.

Mesh axes: `data` (rows of the batch), `fsdp` (parameters, gathered when used), `tensor`
(heads, MLP columns, vocabulary), `expert`. A logical axis is the name a parameter's or
batch's dimension has in the model's own words; the rules say which mesh axis carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor", "expert")

Rules = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
    "rows": ("data", "fsdp"),
    "vocab": "tensor",
    "width": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "layers": None,
    "sequence": "tensor",  # columns of the residual stream, where a run asks for it
}


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over `devices` (all by default), `arranged`; an axis of -1 takes what the others leave.

    Raises `ValueError` when the axes do not multiply to the number of devices.
    """
    found = list(jax.devices() if devices is None else devices)
    shape = [data, fsdp, tensor, expert]
    if shape.count(-1) > 1:
        raise ValueError(f"mesh {dict(zip(AXES, shape, strict=True))}: at most one axis may be -1")
    if -1 in shape:
        shape[shape.index(-1)] = len(found) // max(1, int(np.prod([n for n in shape if n != -1])))
    if int(np.prod(shape)) != len(found):
        raise ValueError(
            f"mesh {dict(zip(AXES, shape, strict=True))} needs {int(np.prod(shape))} devices, found {len(found)}"
        )
    # Said rather than left to a default that differs between versions: the compiler places what the rules leave open.
    return Mesh(arranged(shape, found), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arranged(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """The devices of a mesh with axes of these sizes in the order of `AXES`: an axis runs along links of the torus.

    As they come where they have no coordinates (CPU, GPU), leave holes in the torus, or would share the rows of one
    position with devices of another process: each process brings rows of its own, see `row_owners`.
    """
    as_they_come = np.empty(len(devices), dtype=object)
    as_they_come[:] = devices
    as_they_come = as_they_come.reshape(shape)
    if devices[0].platform != "tpu":
        return as_they_come
    try:
        laid = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError):  # holes, several slices, or two devices a chip where it knows of one
        return as_they_come
    return as_they_come if None in row_owners(laid) else laid


def row_owners(devices: np.ndarray) -> list[int | None]:
    """The process that has the rows of each position along `data` and `fsdp`; None where several processes have."""
    places = devices.reshape(devices.shape[0] * devices.shape[1], -1)
    owners = [{device.process_index for device in place} for place in places]
    return [owner.pop() if len(owner) == 1 else None for owner in owners]


def spec(logical: Sequence[str | None], rules: Rules = RULES) -> PartitionSpec:
    """The partition of an array whose dimensions carry these logical names. A name without a rule is an error."""
    unknown = [name for name in logical if name is not None and name not in rules]
    if unknown:
        raise ValueError(f"logical axes {unknown} have no rule; known: {sorted(rules)}")
    return PartitionSpec(*(None if name is None else rules[name] for name in logical))


def axes_of(logical: str, rules: Rules = RULES) -> tuple[str, ...]:
    """The mesh axes that carry a logical axis."""
    return names(rules[logical])


def names(axes: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `PartitionSpec`."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def shardings(mesh: Mesh, logical_tree: Any, rules: Rules = RULES) -> Any:
    """A tree of `NamedSharding` for a tree whose leaves are tuples of logical axis names."""
    return jax.tree.map(
        lambda names: NamedSharding(mesh, spec(names, rules)), logical_tree, is_leaf=lambda x: isinstance(x, tuple)
    )


def gathered(x: Any, logical: Sequence[str | None], dtype: Any, rules: Rules = RULES) -> Any:
    """A parameter in `dtype`, whole along `fsdp`; the array itself where its mesh has no such axis.

    Said at the top of a layer, it makes one all-gather of each weight. Left unsaid, a compiler may split the product
    instead into a ring of slivers with a permutation between each two: 13,860 of them in a step of a 0.6 B model on 16
    chips, and twice the time. Cast first, so that half of the bytes travel.
    """
    mesh = _automatic_mesh(x)
    if mesh is None or mesh.shape.get("fsdp", 1) == 1:
        return x
    split = spec(logical, rules)
    whole = PartitionSpec(*(_without(axes, "fsdp") for axes in split))
    x = jax.lax.with_sharding_constraint(x.astype(dtype), NamedSharding(mesh, split))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, whole))


def by_rows(x: Any) -> Any:
    """Activations [B, ...] split by rows alone; the array itself where no mesh shards parameters."""
    mesh = _automatic_mesh(x)
    if mesh is None or mesh.shape.get("fsdp", 1) * mesh.shape.get("tensor", 1) == 1:
        return x
    count = np.prod([mesh.shape[axis] for axis in axes_of("rows")])
    return x if x.shape[0] % count else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(("rows",))))


def by_sequence(x: Any) -> Any:
    """Activations [B, T, ...] split by rows and by columns; as `by_rows` where the columns do not divide.

    Between the layers of a model a device then holds its share of a long row alone. What reads other columns asks
    for whole rows by `by_rows`: one gather before the projections, one scatter of their sums behind.
    """
    mesh = _automatic_mesh(x)
    axes = axes_of("sequence")
    if mesh is None or (count := int(np.prod([mesh.shape[axis] for axis in axes]))) == 1 or x.shape[1] % count:
        return by_rows(x)
    shares = np.prod([mesh.shape[axis] for axis in axes_of("rows")])
    split = spec(("rows" if x.shape[0] % shares == 0 else None, "sequence"))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, split))


def _automatic_mesh(x: Any) -> Any:
    """The mesh that x lies on, where the compiler decides how; None without one, and inside `shard_map`."""
    mesh = jax.typeof(x).sharding.mesh
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types)
    return mesh if set(AXES) <= set(mesh.axis_names) and automatic else None


def _without(axes: Any, axis: str) -> Any:
    kept = tuple(name for name in names(axes) if name != axis)
    return kept[0] if len(kept) == 1 else kept or None


def rows(mesh: Mesh) -> NamedSharding:
    """How batch rows [B, ...] are spread: over `data` and `fsdp`."""
    return NamedSharding(mesh, spec(("rows",)))


def mesh_of(x: Any) -> Mesh | None:
    """The mesh with these axes that a traced x lies on; None: on none, or where the compiler does not place."""
    return _automatic_mesh(x)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def put(tree: Any, sharding: Any) -> Any:
    """Explicit placement of a host tree that every process has: the one way arrays enter the device side.

    Where the devices of others belong to the sharding, each process gives its own devices their part, and no value
    travels. `sharding`: one for all, or a tree of them.
    """
    places = jax.tree.map(lambda _: sharding, tree) if isinstance(sharding, jax.sharding.Sharding) else sharding
    if all(place.is_fully_addressable for place in jax.tree.leaves(places)):
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda leaf, place: _put_part(np.asarray(leaf), place), tree, places)


def _put_part(array: np.ndarray, place: Any) -> jax.Array:
    return put_shards(array.shape, place, lambda index: array[index])


def put_shards(shape: tuple[int, ...], sharding: Any, part: Callable[[Any], Any]) -> jax.Array:
    """`jax.make_array_from_callback` with explicit transfers: each process gives its own devices their part."""
    places = sharding.addressable_devices_indices_map(shape)
    shards = jax.device_put([part(index) for index in places.values()], list(places))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
