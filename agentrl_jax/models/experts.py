"""A mixture of experts in place of an MLP: each token goes through the k experts that its router prefers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from agentrl_jax.models.config import DecoderConfig

Activation = Callable[[jax.Array], jax.Array]


def mixture(
    config: DecoderConfig, p: dict[str, jax.Array], x: jax.Array, activation: Activation, *, fixed_places: bool = False
) -> jax.Array:
    """sum_e w[e] * down_e(activation(gate_e(x)) * up_e(x)) over the k experts of each token. x [B, T, D] -> [B, T, D].

    w = the k largest of softmax(x @ router) (f32), divided by their sum where `normalize_experts`. No expert has a
    capacity and no token is dropped, so a token's result does not depend on its batch. Shazeer et al. 2017,
    arXiv:1701.06538.

    Two ways to the same sum. *dense*: every expert multiplies every token and w is 0 elsewhere: E / k times the
    products, each at a fixed place, so a token's result is the same to the bit in any batch. *ragged*: tokens sorted
    by expert, one product a group (`jax.lax.ragged_dot`): on a TPU the cost of the chosen experts alone; elsewhere
    JAX expands it to E times the rows, so the default there is dense. `fixed_places` asks for dense.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = route(config, p["router"], flat)
    way = config.expert_dispatch or ("ragged" if jax.default_backend() == "tpu" else "dense")
    run = _ragged if way == "ragged" and not fixed_places else _dense
    return run(p, flat, weights, chosen, activation).astype(x.dtype).reshape(x.shape)


def route(config: DecoderConfig, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weights f32[N, k], experts i32[N, k]) of tokens x [N, D], the largest first."""
    logits = jnp.einsum("nd,de->ne", x, router, preferred_element_type=jnp.float32)
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.experts_per_token)
    if config.normalize_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, chosen


def _dense(
    p: dict[str, jax.Array], x: jax.Array, weights: jax.Array, chosen: jax.Array, activation: Activation
) -> jax.Array:
    experts = jnp.arange(p["down"].shape[0], dtype=chosen.dtype)
    hit = chosen[..., None] == experts[None, None]
    share = jnp.sum(jnp.where(hit, weights[..., None], 0.0), axis=1)  # f32[N, E]
    if "gate_up" in p:
        gate, up = jnp.split(jnp.einsum("nd,edf->enf", x, p["gate_up"]), 2, axis=-1)
    else:
        gate, up = jnp.einsum("nd,edf->enf", x, p["gate"]), jnp.einsum("nd,edf->enf", x, p["up"])
    inner = activation(gate) * up * share.T[..., None].astype(x.dtype)
    return jnp.einsum("enf,efd->nd", inner, p["down"])


def _ragged(
    p: dict[str, jax.Array], x: jax.Array, weights: jax.Array, chosen: jax.Array, activation: Activation
) -> jax.Array:
    tokens, k = chosen.shape
    order = jnp.argsort(chosen.reshape(-1), stable=True)  # pairs (token, choice) by expert
    rows = order // k
    sizes = jnp.zeros(p["down"].shape[0], jnp.int32).at[chosen.reshape(-1)].add(1)
    sorted_x = x[rows]
    if "gate_up" in p:
        gate, up = jnp.split(jax.lax.ragged_dot(sorted_x, p["gate_up"], sizes), 2, axis=-1)
    else:
        gate, up = (jax.lax.ragged_dot(sorted_x, p[name], sizes) for name in ("gate", "up"))
    out = jax.lax.ragged_dot(activation(gate) * up, p["down"], sizes)
    out = out.astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    return jnp.zeros((tokens, x.shape[-1]), jnp.float32).at[rows].add(out)
