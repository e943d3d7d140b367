"""Arithmetic whose bits do not depend on how many rows stand in a batch.

XLA's CPU backend writes a loop over fewer than 4096 elements in another way than a longer one, and a matrix library
orders its sums by the shape of the product: the last bit of a row would depend on how many others are in the batch.
So the small steps of a decode batch are computed on one number of rows whatever its size. The engine tries out
that batches of different size agree; this is what makes them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

ROWS = 32


def pad_rows(x: jax.Array, rows: int = ROWS) -> jax.Array:
    """x [R, ...] with zero rows added up to `rows`; a fence for the compiler, which would fuse across it."""
    missing = max(rows - x.shape[0], 0)
    return jax.lax.optimization_barrier(jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))))


def steady(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """f(x) for an f of each last axis by itself, computed on at least 32 of them. x [..., D]."""
    rows = x.reshape(-1, x.shape[-1])
    return jax.lax.optimization_barrier(f(pad_rows(rows)))[: rows.shape[0]].reshape(x.shape)
