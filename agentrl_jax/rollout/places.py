"""Which idle slots of a sampler the episodes of a group take."""

from __future__ import annotations

from collections.abc import Collection


def nearby(idle: Collection[int], count: int, near: int) -> list[int]:
    """`count` of the `idle` slots, where `near` slots in a row are on one device and share what is computed there.

    Those of the device with the most idle ones come first: a group lies on as few devices as have room for it, and
    few groups are spread over all devices. Fewer than `count` where no more are idle.
    """
    by_device: dict[int, list[int]] = {}
    for slot in sorted(idle):
        by_device.setdefault(slot // near, []).append(slot)
    freest = sorted(by_device.values(), key=len, reverse=True)  # stable: of equals the first
    return [slot for slots in freest for slot in slots][:count]
