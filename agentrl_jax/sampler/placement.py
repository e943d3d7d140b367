"""Where the sampler's arrays lie: whole on each device, or one copy over the devices of a mesh's `tensor` axis.

The mesh decides: over a `tensor` axis of n devices each holds 1/n of the heads, of the MLP's columns, of the
vocabulary, and of every page (its KV heads). What goes in and comes out, a few integers a row, is on all of them.
Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from agentrl_jax.models.config import DecoderConfig, layer_parameters, top_parameters
from agentrl_jax.sharding import shardings as by_rule
from agentrl_jax.sharding import spec

# What a decode step reads is never gathered: `width` stays whole, whatever learner shares the mesh.
_RULES = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "experts": None, "width": None}


def shares(sharding: Any) -> int:
    """Devices that one copy of the sampler is spread over, for the placement that is given to the engine."""
    return sharding.mesh.shape.get("tensor", 1) if isinstance(sharding, NamedSharding) else 1


def weights(config: DecoderConfig, sharding: Any) -> Any:
    """Placement of `decoder.unstack`'s result; the given one itself where nothing is split.

    Raises `ValueError` where the mesh's `tensor` axis does not divide the KV heads. Another dimension that it does not
    divide stays whole.
    """
    count = shares(sharding)
    if count == 1:
        return sharding
    if config.kv_heads % count:
        raise ValueError(f"sharding: a tensor axis of {count} devices must divide kv_heads={config.kv_heads}")
    split = {"vocab": config.vocab_size, "mlp": config.mlp_width, "heads": config.heads}
    rules = _RULES | {name: None for name, size in split.items() if size % count}

    def placed(parameters: dict[str, Any]) -> Any:
        return by_rule(sharding.mesh, {name: axes for name, (_, axes) in parameters.items()}, rules)

    return {**placed(top_parameters(config)), "layers": (placed(layer_parameters(config)),) * config.layers}


def pools(sharding: Any) -> Any:
    """Placement of `decode.Cache`'s arrays, [P, J, ...] each: split by KV heads."""
    if shares(sharding) == 1:
        return sharding
    return NamedSharding(sharding.mesh, spec((None, "kv_heads"), _RULES))


def whole(x: jax.Array) -> jax.Array:
    """x on every device, where the compiler decides: logits are gathered once before a token is chosen."""
    mesh = jax.typeof(x).sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if mesh.empty or mesh.shape.get("tensor", 1) == 1 or kinds["tensor"] != AxisType.Auto:
        return x
    if x.shape[-1] % mesh.shape["tensor"] == 0:  # unsaid, what is gathered may be the head instead, in every step
        split = PartitionSpec(*(None,) * (x.ndim - 1), "tensor")
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, split))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
