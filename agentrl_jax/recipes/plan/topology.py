"""The machines that a plan is made for: what each chip holds and can do, and how the chips hang together."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from agentrl_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")  # of `sharding.AXES`, those that a plan spreads dense models over


class Chip(NamedTuple):
    """One kind of TPU. A device is what JAX counts and what a program's memory is limited by."""

    gib: float  # per device, as the compiler enforces it: below what the vendor names
    tflops: float  # of bf16, a device
    gbytes: float  # HBM bandwidth of a device, GB/s
    link: float  # bytes/s of one torus axis, both ways
    clock: float  # Hz; derived from peak and matrix units, v6e and tpu7x unverified
    attention: float  # share of the peak that tiled attention reaches, from static schedules of blocks of 1024
    devices: int = 1  # on a chip


CHIPS = {
    "v4": Chip(15.25, 137.5, 614.0, 0.9e11, 1.05e9, 0.75, devices=2),
    "v5e": Chip(15.75, 197.0, 819.0, 0.9e11, 1.5e9, 0.75),
    "v5p": Chip(95.73, 459.0, 2765.0, 1.8e11, 1.75e9, 0.85),
    "v6e": Chip(31.24, 918.0, 1640.0, 1.8e11, 1.75e9, 0.33),
    "tpu7x": Chip(94.74, 1153.5, 3690.0, 1.8e11, 2.2e9, 0.33, devices=2),
}


@dataclass(frozen=True)
class Topology:
    """`name` as libtpu takes it, such as v5p:4x4x4; `shape` counts chips along each axis of the torus."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    @property
    def host_devices(self) -> int:
        """Devices of one host of a slice of many: of four chips."""
        return min(self.chips, 4) * self.chip.devices

    @property
    def hosts(self) -> int:
        return self.devices // self.host_devices


def parse_topology(name: str) -> Topology:
    """The topology of a name such as `v5p:4x4x4`. Raises `UserError`."""
    kind, _, shape = name.partition(":")
    kinds = {kind.lower(): kind for kind in CHIPS}
    if kind.lower() not in kinds or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        raise UserError(
            f"--topology {name}: expected a TPU ({', '.join(CHIPS)}) and its chips along each axis, such as v5p:4x4x4 "
            "or v5e:4x4; names that count cores (v5p-128) say nothing of the shape"
        )
    return Topology(name, kinds[kind.lower()], tuple(map(int, shape.split("x"))))


def parse_mesh(text: str | None, devices: int) -> dict[str, int]:
    """`data=4,fsdp=16,tensor=1` over all devices; an axis left out is 1, one of -1 takes the rest.

    None: rows over all devices, parameters whole on each. Raises `UserError`.
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in [] if text is None else text.split(","):
        found = re.fullmatch(r"(\w+)=(-1|[1-9]\d*)", part.strip())
        if found is None or found[1] not in AXES:
            raise UserError(f"--mesh {text}: expected sizes of {', '.join(AXES)}, such as data=4,fsdp=16")
        sizes[found[1]] = int(found[2])
    free = ["data"] if text is None else [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for axis, size in sizes.items() if axis not in free)
    if len(free) == 1 and devices % known == 0:
        sizes[free[0]] = devices // known
    if len(free) > 1 or math.prod(sizes.values()) != devices:
        raise UserError(f"--mesh {text}: the axes multiply to {abs(math.prod(sizes.values()))}, not {devices} devices")
    return sizes


def spans_torus(topology: Topology, mesh: dict[str, int]) -> bool:
    """Whether one fsdp axis runs over a whole 3-D torus, or over 256 chips of a flat one: weights (on the flat one
    those below some 20 MB) are gathered by all-reduces of twice the bytes."""
    solid = len(topology.shape) == 3 and min(topology.shape) > 1
    return mesh["fsdp"] == topology.devices and (solid or topology.devices >= 256)
