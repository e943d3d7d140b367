"""Optimizers as compositions of optax transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from agentrl_jax.models.matrices import flattened, is_stacked, matrix_of
from agentrl_jax.models.orthogonal import orthogonal

Schedule = Literal["constant", "cosine"]
_MUON_RMS = 0.2  # of an update, in units of the rate: as large as AdamW's usually is


def adamw(
    learning_rate: float,
    *,
    warmup: int = 0,
    total: int | None = None,
    schedule: Schedule = "constant",
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    decay_mask: Any = None,
    moment_dtype: Any = None,
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
      moment_dtype: of the first moment; None is that of the params. The second, of a wider range, stays.

    Raises:
      ValueError: a setting is out of range, or a cosine has no room after its warm-up.

    Loshchilov & Hutter 2019 (https://arxiv.org/abs/1711.05101).
    """
    rate = _rate("adamw", learning_rate, warmup, total, schedule, max_grad_norm)
    adam = optax.adamw(
        rate, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay, mask=decay_mask, mu_dtype=moment_dtype
    )
    return _clipped(max_grad_norm, adam)


def adafactor(
    learning_rate: float,
    *,
    warmup: int = 0,
    total: int | None = None,
    schedule: Schedule = "constant",
    decay: float = 0.8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    factored_from: int = 128,
) -> optax.GradientTransformation:
    """Adafactor: of each matrix of second moments [in, out] two vectors alone are kept, means over rows and columns.

    `u = g / sqrt(row col / mean(row))`, `u / max(1, rms(u))`, times the rate: as with AdamW, a rate is about what a
    parameter moves by, whatever its own size. There is no first moment. Matrices are those of one layer, all heads of a
    projection in one; rms is taken of each as well.

    Args as in `adamw`, and:
      decay: update t lets the second moment decay by `1 - t^-decay`.
      factored_from: a matrix with a side shorter than this keeps its second moments whole.

    Shazeer & Stern 2018 (https://arxiv.org/abs/1804.04235).
    """
    rate = _rate("adafactor", learning_rate, warmup, total, schedule, max_grad_norm)
    scaled = optax.scale_by_factored_rms(decay_rate=decay, min_dim_size_to_factor=factored_from)
    return _clipped(
        max_grad_norm,
        _on_matrices(scaled),
        _for_each(_unit_rms),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def muon(
    learning_rate: float,
    *,
    warmup: int = 0,
    total: int | None = None,
    schedule: Schedule = "constant",
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    moment_dtype: Any = None,
) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, `adamw` for embeddings, head, norms and biases.

    The step of a matrix [in, out] is its momentum `g + b m, m = g + b m` made orthogonal, all its singular values near
    1 (`models.orthogonal`), times `0.2 sqrt(max(in, out))`: about as large as AdamW's, so that one rate serves
    both. Each layer, and each expert, is made orthogonal for itself; all heads of a projection are one matrix.

    Args as in `adamw`, and:
      momentum: b, the decay of the matrices' momentum (Nesterov's).

    Jordan 2024 (https://kellerjordan.github.io/posts/muon/); the scale: Liu et al. 2025 (https://arxiv.org/abs/2502.16982).
    """
    rate = _rate("muon", learning_rate, warmup, total, schedule, max_grad_norm)
    matrices = optax.chain(
        optax.trace(momentum, nesterov=True, accumulator_dtype=moment_dtype),
        _for_each(_step),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    rest = optax.adamw(rate, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay, mu_dtype=moment_dtype)
    return _clipped(max_grad_norm, optax.partition({"matrix": matrices, "rest": rest}, _labels))


def _labels(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, x: "matrix" if matrix_of(path, x.ndim) else "rest", params)


def _step(path: Any, momentum: Any) -> Any:
    x, found = flattened(path, momentum), matrix_of(path, momentum.ndim)
    assert found is not None  # `_labels`
    scale = _MUON_RMS * max(x.shape[-2:]) ** 0.5
    return (jnp.asarray(scale, x.dtype) * orthogonal(x, found.logical)).reshape(momentum.shape)


def _on_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on the params as `matrices.flattened` gives them. State that it keeps has those shapes."""
    flat = lambda tree: jax.tree.map_with_path(flattened, tree)  # noqa: E731

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        found, state = inner.update(flat(updates), state, None if params is None else flat(params))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), found, updates), state

    return optax.GradientTransformation(lambda params: inner.init(flat(params)), update)


def _for_each(function: Callable[[tuple[Any, ...], Any], Any]) -> optax.GradientTransformation:
    """The transformation without state that maps every update, given its path."""
    return optax.stateless(lambda updates, params: jax.tree.map_with_path(function, updates))


def _unit_rms(path: Any, update: Any) -> Any:
    """The update of each matrix, or vector of a layer, divided by its root-mean-square where that is above 1."""
    found = matrix_of(path, update.ndim)
    stacked = found.stacked if found else int(is_stacked(path))
    rms = jnp.sqrt(jnp.mean(jnp.square(update), axis=tuple(range(stacked, update.ndim)), keepdims=True))
    return update / jnp.maximum(1.0, rms)


def _clipped(max_grad_norm: float | None, *parts: optax.GradientTransformation) -> optax.GradientTransformation:
    clips = () if max_grad_norm is None else (_clip(max_grad_norm),)
    return optax.chain(*clips, *parts)


def _rate(
    name: str, rate: float, warmup: int, total: int | None, schedule: str, max_grad_norm: float | None
) -> optax.ScalarOrSchedule:
    _check(name, rate, warmup, total, schedule, max_grad_norm)
    after = (
        optax.constant_schedule(rate)
        if schedule == "constant" or total is None
        else optax.cosine_decay_schedule(rate, total - warmup)
    )
    # One step short of `warmup`, so that the first update already moves the params.
    ramp = optax.linear_schedule(rate / max(warmup, 1), rate, max(warmup - 1, 1))
    return optax.join_schedules([ramp, after], [warmup]) if warmup else after


def _clip(most: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with one division for all: a compiler repeats a product wherever it is read, but
    keeps a quotient, which here would be a second copy of the gradients."""

    def clip(grads: Any, params: Any) -> Any:
        del params
        norm = optax.tree.norm(grads)
        factor = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)

    return optax.stateless(clip)


def _check(name: str, rate: float, warmup: int, total: int | None, schedule: str, max_grad_norm: float | None) -> None:
    if not rate > 0:
        raise ValueError(f"{name}: learning_rate: expected a number above 0, got {rate}")
    if schedule not in ("constant", "cosine"):
        raise ValueError(f"{name}: schedule: expected 'constant' or 'cosine', got {schedule!r}")
    if warmup < 0:
        raise ValueError(f"{name}: warmup: expected 0 or more updates, got {warmup}")
    if schedule == "cosine" and (total is None or total <= warmup):
        raise ValueError(f"{name}: schedule='cosine' needs total > warmup={warmup}, got total={total}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"{name}: max_grad_norm: expected a number above 0, or None, got {max_grad_norm}")
