"""Which devices of a slice hold what: all of them everything, or, of a split run, some learn and the others sample."""

from __future__ import annotations

import math
from typing import Any

from agentrl_jax.errors import UserError
from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.plan.topology import Topology

ALL, LEARNERS, SAMPLERS = "all", "learners", "samplers"
_SAMPLED = ("sampler weights", "KV pages", "adopt", "decode")  # what is resident, and programs, of those that sample


def sampling(config: RunConfig, topology: Topology) -> int:
    """Devices of the slice that sample and do not learn. Raises `UserError` where a host has not as many."""
    if config.placement != "split":
        return 0
    count, local, tensor = config.sampler_devices, topology.host_devices, config.rollout.tensor
    if count >= local:
        instead = f"set at most {local - 1}" if local > 1 else "set placement='colocated' and sampler_devices=0"
        raise UserError(f"sampler_devices={count} leaves none of a host's {local} devices to learn: {instead}")
    if count % tensor:
        raise UserError(
            f"rollout.tensor={tensor} does not divide the {count} devices that sample: set rollout.tensor="
            f"{math.gcd(tensor, count)}"
        )
    return count * topology.hosts


def names(config: RunConfig) -> tuple[str, ...]:
    return (LEARNERS, SAMPLERS) if config.placement == "split" else (ALL,)


def on(config: RunConfig, what: str) -> str:
    """The devices on which something is resident, or a program runs."""
    if config.placement != "split":
        return ALL
    return SAMPLERS if what in _SAMPLED else LEARNERS


def counts(config: RunConfig, topology: Topology) -> dict[str, int]:
    """Devices of each group."""
    some = sampling(config, topology)
    return {LEARNERS: topology.devices - some, SAMPLERS: some} if some else {ALL: topology.devices}


def fit(report: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Whether the program with the highest peak leaves room on the devices it runs on, with all that is resident there.

    Of the whole it is the group with the least room that is named.
    """
    limit, found = topology.chip.gib, []
    for group in report["groups"]:
        peak = max(row["gib"] for row in report["programs"] if row["on"] == group["on"])
        found.append(group | {"fits": peak <= limit, "peak_gib": peak, "headroom_gib": round(limit - peak, 3)})
    least = min(found, key=lambda group: group["headroom_gib"])
    told = {name: least[name] for name in ("fits", "peak_gib", "headroom_gib")}
    return {"groups": found, "limit_gib": limit, **told}
