"""Which devices sample and which learn: the same in turn, or some of each process for either."""

from __future__ import annotations

from typing import Any

import jax

from agentrl_jax.errors import UserError
from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.runtime.fleet import spread


def samplers(config: RunConfig) -> list[jax.Device]:
    """The devices of this process that sample: all, or with `placement="split"` the last `sampler_devices`."""
    local = jax.local_devices()
    return local[-config.sampler_devices :] if config.placement == "split" else local


def learners(config: RunConfig) -> list[jax.Device]:
    """The devices of all processes that learn, in JAX's order."""
    if config.placement != "split":
        return jax.devices()
    count = jax.process_count()
    local = [jax.local_devices(process_index=index)[: -config.sampler_devices] for index in range(count)]
    kept = {device for devices in local for device in devices}
    return [device for device in jax.devices() if device in kept]


def sampler_sharding(config: RunConfig) -> Any:
    """The engine's placement: its slots spread over the devices that sample."""
    return spread(samplers(config))


def check_placement(config: RunConfig, local: int) -> None:
    """Refuse what the `local` devices of a process cannot do. Raises `UserError`."""
    if config.external.url is not None:
        return
    split, count = config.placement == "split", config.sampler_devices
    if split and count >= local:
        raise UserError(
            f"sampler_devices={count} leaves the learner none of the {local} devices of a process: "
            + (f"set at most {local - 1}" if local > 1 else "set placement='colocated' sampler_devices=0")
        )
    slots, devices = config.rollout.slots, count if split else local
    if slots % devices:
        raise UserError(
            f"rollout.slots={slots} must be a multiple of the {devices} devices that sample: set rollout.slots="
            f"{-(-slots // devices) * devices}"
        )
