"""The devices of a run: which sample and which learn, the learner's mesh, and where the parameters lie on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.models import llama, lora
from agentrl_jax.recipes.config import MeshShape, PretrainedPolicy, RunConfig, TinyPolicy


def sizes(shape: MeshShape, devices: int) -> dict[str, int]:
    """Devices along each axis of `sharding.AXES`. Raises `UserError` where they are not these `devices` in all."""
    asked = {axis: getattr(shape, axis) for axis in sharding.AXES}
    known = math.prod(size for size in asked.values() if size != -1)
    found = {axis: devices // known if size == -1 else size for axis, size in asked.items()}
    if math.prod(found.values()) != devices:
        said = ", ".join(f"mesh.{axis}={size}" for axis, size in asked.items())
        raise UserError(
            f"{said}: the axes take {known} devices, and {devices} are here: give sizes that multiply to {devices}, "
            f"such as mesh.data=-1 mesh.fsdp={devices} with the others 1"
        )
    return found


def make(config: RunConfig) -> jax.sharding.Mesh:
    """The mesh over the devices that learn."""
    found = learners(config)
    return sharding.make_mesh(**sizes(config.mesh, len(found)), devices=found)


def devices() -> list[Any]:
    """The devices that a run is spread over."""
    return jax.devices()


def samplers(config: RunConfig) -> list[Any]:
    """The devices of this process that sample: all of them, or the last `sampler_devices` where the run is split.

    Those that learn, too, are in the order of the learner's mesh: a publication then needs no step between.
    """
    split = config.placement == "split" or config.external.url is not None
    found = devices() if split else list(make(config).devices.flat)
    mine = [device for device in found if device.process_index == jax.process_index()]
    return mine[-config.sampler_devices :] if config.placement == "split" else mine


def learners(config: RunConfig) -> list[Any]:
    """The devices of all processes that learn."""
    return without_samplers(devices(), config.sampler_devices)


def without_samplers(found: Sequence[Any], count: int) -> list[Any]:
    """These devices without the last `count` of each process, which sample."""
    by_process: dict[int, list[Any]] = {}
    for device in found:
        by_process.setdefault(device.process_index, []).append(device)
    kept = {device for mine in by_process.values() for device in mine[: len(mine) - count]}
    return [device for device in found if device in kept]


def check_placement(config: RunConfig) -> None:
    """Refuses what the devices of a process cannot be shared out to. Raises `UserError`."""
    if config.external.url is not None:
        return
    local = sum(device.process_index == jax.process_index() for device in devices())
    split, count = config.placement == "split", config.sampler_devices
    if split and count >= local:
        instead = f"set at most {local - 1}" if local > 1 else "set placement='colocated' and sampler_devices=0"
        raise UserError(f"sampler_devices={count} leaves none of a process's {local} devices to learn: {instead}")
    slots, tensor, sampling = config.rollout.slots, config.rollout.tensor, count if split else local
    if sampling % tensor:
        raise UserError(
            f"rollout.tensor={tensor} does not divide the {sampling} devices that sample: set rollout.tensor="
            f"{math.gcd(tensor, sampling)}"
        )
    engines, what = sampling // tensor, "devices" if tensor == 1 else f"sets of {tensor} devices"
    if slots % engines:
        unit = math.lcm(engines, config.rollout.bank)  # slots are a multiple of the bank, too
        raise UserError(
            f"rollout.slots={slots} must be a multiple of the {engines} {what} that sample: set rollout.slots="
            f"{-(-slots // unit) * unit}"
        )


def check_mesh(config: RunConfig, model: llama.LlamaConfig) -> None:
    """Refuses a mesh that does not divide the devices, the model, or the rows of a step, and `check_placement`.

    Raises `UserError`.
    """
    check_placement(config)
    tensor = config.rollout.tensor
    if model.kv_heads % tensor:
        raise UserError(
            f"rollout.tensor={tensor} does not divide the policy's kv_heads={model.kv_heads}: set rollout.tensor="
            f"{math.gcd(tensor, model.kv_heads)}"
        )
    if tensor > 1 and config.placement != "split" and config.loop is not None and config.loop.max_lag:
        raise UserError(
            f"rollout.tensor={tensor} with loop.max_lag={config.loop.max_lag}: sampler and learner would wait for each "
            "other's exchanges on the same devices: set placement='split', or rollout.tensor=1"
        )
    found = sizes(config.mesh, len(learners(config)))
    if found["expert"] > 1 and not model.experts:
        raise UserError(f"mesh.expert={found['expert']}: the policy has no experts to split: set mesh.expert=1")
    splits = {
        "tensor": {name: getattr(model, name) for name in ("heads", "kv_heads", "mlp_width", "vocab_size")},
        "fsdp": {"width": model.width},
        "expert": {"experts": model.experts},
    }
    for axis, dimensions in splits.items():
        count = found[axis]
        for name, size in dimensions.items():
            if size % count:
                best = math.gcd(count, *dimensions.values())
                fewer = isinstance(config.policy, TinyPolicy) and name == "vocab_size"
                also = f", or policy.vocab_size={size - size % count}" if fewer else ""
                raise UserError(
                    f"mesh.{axis}={count} does not divide the policy's {name}={size}: set mesh.{axis}={best} and "
                    f"mesh.data=-1{also}"
                )
    _check_rows(config, found["data"] * found["fsdp"])
    if config.mesh.sequence:
        _check_columns(config, found["tensor"])


def _check_rows(config: RunConfig, shares: int) -> None:
    batches = {} if config.sft is None else {"sft.rows": config.sft.rows}
    if config.loop is not None:
        batches["loop.tasks x loop.group"] = config.loop.tasks * config.loop.group
    for name, rows in batches.items():
        if rows % shares:
            raise UserError(
                f"{name}={rows} must be a multiple of the {shares} devices that share the rows (data x fsdp): set it "
                f"to {-(-rows // shares) * shares}, or give devices to mesh.tensor"
            )


def _check_columns(config: RunConfig, count: int) -> None:
    if count == 1:
        raise UserError("mesh.sequence=True has no effect at mesh.tensor=1: set mesh.tensor=2, or mesh.sequence=false")
    for name, stage in (("sft", config.sft), ("loop", config.loop)):
        if stage is not None and stage.width % count:
            raise UserError(
                f"{name}.width={stage.width} does not divide over mesh.tensor={count}, as mesh.sequence=True asks: set "
                f"{name}.width={-(-stage.width // count) * count}"
            )


def placement(config: RunConfig, model: llama.LlamaConfig, mesh: Any) -> Any:
    """`NamedSharding` of every parameter of a run, as a tree like its params: by the rules of `sharding.RULES`.

    Adapters are whole on every device. `mesh` may be abstract.
    """
    base = sharding.shardings(mesh, llama.logical_axes(model))
    chosen = config.policy.lora if isinstance(config.policy, PretrainedPolicy) else None
    if chosen is None:
        return base
    shapes = jax.eval_shape(partial(lora.init, chosen), llama.shapes(model), jax.random.key(0))
    # A projection in few bits is values of its shape, and scales of a block of inputs each.
    fitted = jax.tree.map(lambda place, part: jax.tree.map(partial(_fitting, place), part), base, shapes.base)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return lora.LoraParams(jax.tree.map(lambda _: everywhere, shapes.adapters), fitted, shapes.scale)


def _fitting(place: NamedSharding, leaf: Any) -> NamedSharding:
    """`place` without the axes that do not divide the leaf's dimensions."""
    counts = [math.prod(place.mesh.shape[axis] for axis in sharding.names(part)) for part in place.spec]
    fits = [size % count == 0 for size, count in zip(leaf.shape, counts, strict=False)]
    kept = (part if fit else None for part, fit in zip(place.spec, fits, strict=False))
    return NamedSharding(place.mesh, PartitionSpec(*kept))
