"""Optimizers as compositions of optax transformations."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax


def adamw(
    learning_rate: float,
    *,
    warmup: int = 0,
    total: int | None = None,
    schedule: Literal["constant", "cosine"] = "constant",
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    decay_mask: Any = None,
) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, with linear warm-up.

    The rate rises linearly from `learning_rate / warmup` at the first update to `learning_rate` at update
    `warmup`, then stays ("constant") or follows half a cosine down to 0 at update `total` ("cosine").

    Args:
      learning_rate: peak rate.
      warmup: updates of linear warm-up.
      total: updates of the whole run; only a cosine needs it.
      schedule: "constant" or "cosine".
      betas: decay of the first and of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled, multiplied by the current rate.
      max_grad_norm: global norm to clip to; None clips nothing.
      decay_mask: tree of booleans, or function of the params to one, saying what decays; None is all.

    Raises:
      ValueError: a setting is out of range, or a cosine has no room after its warm-up.

    Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101).
    """
    _check(learning_rate, warmup, total, schedule, max_grad_norm)
    after = (
        optax.constant_schedule(learning_rate)
        if schedule == "constant" or total is None
        else optax.cosine_decay_schedule(learning_rate, total - warmup)
    )
    # One step short of `warmup`, so that the first update already moves the params.
    ramp = optax.linear_schedule(learning_rate / max(warmup, 1), learning_rate, max(warmup - 1, 1))
    rate = optax.join_schedules([ramp, after], [warmup]) if warmup else after
    adam = optax.adamw(rate, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay, mask=decay_mask)
    return adam if max_grad_norm is None else optax.chain(_clip(max_grad_norm), adam)


def _clip(most: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with one division for all: a compiler repeats a product wherever it is read, but
    keeps a quotient, which here would be a second copy of the gradients."""

    def clip(grads: Any, params: Any) -> Any:
        del params
        norm = optax.tree.norm(grads)
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)

    return optax.stateless(clip)


def _check(rate: float, warmup: int, total: int | None, schedule: str, max_grad_norm: float | None) -> None:
    if not rate > 0:
        raise ValueError(f"adamw: learning_rate: expected a number above 0, got {rate}")
    if schedule not in ("constant", "cosine"):
        raise ValueError(f"adamw: schedule: expected 'constant' or 'cosine', got {schedule!r}")
    if warmup < 0:
        raise ValueError(f"adamw: warmup: expected 0 or more updates, got {warmup}")
    if schedule == "cosine" and (total is None or total <= warmup):
        raise ValueError(f"adamw: schedule='cosine' needs total > warmup={warmup}, got total={total}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"adamw: max_grad_norm: expected a number above 0, or None, got {max_grad_norm}")
