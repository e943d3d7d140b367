"""Devices of TPU slices that are not here, as far as a mesh is laid over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def torus(x: int, y: int) -> list[Any]:
    """The chips of a v5e slice in hosts of 2 x 2, a host after another, as `jax.devices()` has them."""
    chips = [(a, b) for b in range(y) for a in range(x)]
    found = [
        SimpleNamespace(
            id=place, coords=[a, b, 0], core_on_chip=0, platform="tpu", device_kind="TPU v5 lite",
            process_index=a // 2 + b // 2 * (x // 2),
        )
        for place, (a, b) in enumerate(chips)
    ]  # fmt: skip
    return sorted(found, key=lambda device: (device.process_index, device.id))
