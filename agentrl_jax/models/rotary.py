"""Rotary positions: the frequencies of each kind of layer, the tables of a forward pass, and the rotation."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models.config import DecoderConfig, RopeScaling


class Rotation(NamedTuple):
    """Cosines and sines f32[..., 1, C/2] of tokens with positions [...]; one table serves every layer of its kind."""

    cos: jax.Array
    sin: jax.Array


def rotations(config: DecoderConfig, positions: jax.Array) -> tuple[Rotation, ...]:
    """The tables of these positions i32[...]: the layers', and the sliding layers' own where they have another base."""
    kinds = [(config.rope_theta, config.rope_scaling)]
    if config.window_rope_theta is not None:
        kinds.append((config.window_rope_theta, None))
    found = []
    for theta, scaling in kinds:
        turn = frequencies(theta, config.head_width, scaling)
        angle = positions.astype(jnp.float32)[..., None, None] * turn.reshape((1,) * (positions.ndim + 1) + turn.shape)
        factor = 1.0 if scaling is None else scaling.attention_factor
        found.append(Rotation(jnp.cos(angle) * factor, jnp.sin(angle) * factor))
    return tuple(found)


def kind_of(config: DecoderConfig, layer: int) -> int:
    """Which of `rotations` a layer uses."""
    return int(config.window_rope_theta is not None and config.window_of(layer) is not None)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Turn channel pairs (c, c + C/2) of x [..., H, C] by their angles, in f32. Su et al. 2021, arXiv:2104.09864."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def frequencies(theta: float, width: int, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position by which each of C/2 channel pairs turns: f32[C/2], theta^(-2c/C), stretched by `scaling`."""
    base = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if scaling is None:
        found = base
    elif scaling.kind == "linear":
        found = base / scaling.factor
    elif scaling.kind == "llama3":
        found = _llama3(base, scaling)
    else:
        found = _yarn(base, theta, width, scaling)
    return found.astype(np.float32)


def _llama3(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Slow channels divided by the factor, fast ones kept, a linear mixture between."""
    turns = scaling.original_context * base / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * base / scaling.factor + kept * base


def _yarn(base: np.ndarray, theta: float, width: int, scaling: RopeScaling) -> np.ndarray:
    """As llama3, with the ramp linear in the channel instead of in the frequency."""

    def channel(turns: float) -> float:
        return width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0.0
    stretched = np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
    return stretched * base / scaling.factor + (1 - stretched) * base
