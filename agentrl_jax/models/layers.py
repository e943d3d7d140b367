"""The arithmetic that decoder families share; the training forward and the sampler both call it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation in f32: x / sqrt(mean(x^2) + eps) * scale, over the last axis.

    x [..., D], scale [D]; the result has x's dtype. Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    gain = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (wide * gain).astype(x.dtype)


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding, halves convention: channel c pairs with c + C/2 at frequency theta^(-2c/C).

    x [..., H, C], positions i32[...]; angles and rotation in f32. Su et al. 2021, arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency.reshape((1,) * (positions.ndim + 1) + (half,))
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up. Shazeer 2020, arXiv:2002.05202."""
    return jax.nn.silu(gate) * up
