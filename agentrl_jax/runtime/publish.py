"""Publication: the learner's params become the sampler's. Cast, laid out for decoding, copied, resharded."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.models.llama import LlamaConfig, unstack
from agentrl_jax.models.lora import merged
from agentrl_jax.sampler import placement


def publish(config: LlamaConfig, params: Any, sharding: Any = None, *, onto: Any = None) -> Any:
    """Params for the sampler that share no buffer with `params`: the learner may donate its own afterwards.

    Adapters are merged into the projections they belong to.

    `sharding` is the engine's: over a `tensor` axis of its mesh the result is split (`sampler.placement`). None: where
    the compiler leaves it. Where the engine's devices are not those of `params`, `onto` is the engine's: the result is
    whole on each device of `sharding`, laid out for the engine, which takes it from there.
    """
    return _publisher(config, sharding, onto)(params)


@lru_cache(maxsize=8)
def _publisher(config: LlamaConfig, sharding: Any, onto: Any) -> Any:
    fused = placement.shares(sharding if onto is None else onto) == 1

    def lay_out(params: Any) -> Any:
        # jit hands an untouched argument straight back, with the caller's buffer; copy forbids that.
        return jax.tree.map(jnp.copy, unstack(config, merged(params), fused=fused))

    if sharding is None:
        return jax.jit(lay_out)
    return jax.jit(lay_out, out_shardings=placement.weights(config, sharding) if onto is None else sharding)
