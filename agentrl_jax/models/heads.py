"""Scalar heads on hidden states: a critic's values, a reward model's scores. One linear map, read in two places."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def init(width: int, key: jax.Array, dtype: str = "float32") -> Params:
    """A random head for hidden states of this width: weights of deviation 1 / sqrt(D + 1), bias 0.

    Stiennon et al. 2020, arXiv:2009.01325.
    """
    scale = jnp.asarray((width + 1) ** -0.5, dtype)
    return {"kernel": scale * jax.random.normal(key, (width,), jnp.dtype(dtype)), "bias": jnp.zeros((), dtype)}


def logical_axes() -> dict[str, Any]:
    """The logical axis names of the head's parameters."""
    return {"kernel": ("width",), "bias": ()}


def scalars(params: Params, hidden: jax.Array) -> jax.Array:
    """hidden . kernel + bias in f32: hidden [..., D] -> f32[...]."""
    kernel, bias = params["kernel"].astype(jnp.float32), params["bias"].astype(jnp.float32)
    return jnp.einsum("...d,d->...", hidden.astype(jnp.float32), kernel) + jnp.broadcast_to(bias, hidden.shape[:-1])


def values(params: Params, hidden: jax.Array, parents: jax.Array) -> jax.Array:
    """V of the prefix before each token, f32[B, T]: the scalar at the column it continues, `parents` i32[B, T].

    0 at a root and on padding (parent -1), before which nothing was read. hidden [B, T, D]. What
    `rl.credit.gae` and `rl.values.clipped_value_loss` take.
    """
    before = jnp.take_along_axis(scalars(params, hidden), jnp.maximum(parents, 0), axis=1)
    return jnp.where(parents >= 0, before, 0.0)


def rewards(params: Params, hidden: jax.Array, at: jax.Array) -> jax.Array:
    """The score of each trajectory, f32[N]: the scalar at its column `at` i32[N] of the batch's flat B * T columns.

    0 where `at` is -1. hidden [B, T, D]. See `last_tokens`; only the read columns are projected.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    return jnp.where(at >= 0, scalars(params, flat[jnp.maximum(at, 0)]), 0.0)


def last_tokens(trajectory_ids: jax.Array, trajectories: int) -> jax.Array:
    """The flat column b * T + t of each trajectory's last token, i32[N]; -1 for one without a token of its own.

    trajectory_ids i32[B, T], N where shared or padding.
    """
    columns = jnp.arange(trajectory_ids.size, dtype=jnp.int32)
    last = jnp.full(trajectories + 1, -1, jnp.int32).at[trajectory_ids.reshape(-1)].max(columns)
    return last[:trajectories]
