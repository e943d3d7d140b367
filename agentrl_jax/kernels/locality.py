"""Is a loss local, so that its gradient can be formed for some tokens at a time? Read off its traced program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

# What a token's value may go through without meeting another token's.
_WORDS = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max
    min mul ne neg nextafter not or pow pvary reduce_precision rem reshard round rsqrt select_n sign sin sinh sqrt
    square stop_gradient sub tan tanh xor
"""
_ELEMENTWISE = frozenset(_WORDS.split())
_RESHAPES = frozenset(("broadcast_in_dim", "expand_dims", "reshape", "squeeze"))
_CALLS = frozenset(("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat"))
_REDUCES = frozenset(("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"))


def is_token_local(loss: Callable[..., tuple[Array, Any]], entropy: bool, data: Any, *used: tuple[int, int]) -> bool:
    """Whether `check_token_local` lets the loss pass."""
    try:
        check_token_local("is_token_local", loss, entropy, data, *used)
    except ValueError:
        return False
    return True


def check_token_local(
    name: str, loss: Callable[..., tuple[Array, Any]], entropy: bool, data: Any, *used: tuple[int, int]
) -> None:
    """Refuses, on behalf of the function `name`, a loss whose gradient at a token depends on other tokens.

    The gradient's program, traced on [3, 5] and [2, 7] tokens and on the shapes that are `used`, may consist of
    elementwise operations only, hold no array of its own, and no number that follows the shape (a mean divides by one).

    Raises:
      ValueError: it names the operation.
    """
    remedy = (
        "a single pass gives it some tokens at a time. Use form='two_pass' for what pools tokens (a sequence ratio, "
        "a mean), or pass the pooled figures (weights, denominators) in data"
    )
    numbers = []
    for shape in dict.fromkeys(((3, 5), (2, 7), *used)):
        closed = _gradient_program(name, loss, entropy, data, shape)
        live = list(_live(closed.jaxpr))
        if any(variable.aval.ndim for variable in closed.jaxpr.constvars if variable in _read(live)):
            raise ValueError(f"{name}: loss: its gradient reads an array that is not in data: {remedy}")
        for equation in live:
            if not _keeps_tokens_apart(equation, shape):
                why = f"depends on other tokens or on its place among them ({equation.primitive.name})"
                raise ValueError(f"{name}: loss: its gradient at a token {why}: {remedy}")
        numbers.append([float(v.val) for equation in live for v in equation.invars if hasattr(v, "val")])
    if any(found != numbers[0] for found in numbers):
        raise ValueError(f"{name}: loss: its gradient depends on how many tokens it is given: {remedy}")


def _gradient_program(
    name: str, loss: Callable[..., tuple[Array, Any]], entropy: bool, data: Any, shape: tuple[int, int]
) -> Any:
    scores = jax.ShapeDtypeStruct(shape, jnp.float32)
    columns = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(shape + leaf.shape[2:], leaf.dtype), data)

    def gradient(scored: tuple[Array, Array | None], data: Any) -> Any:
        return jax.grad(lambda scored: loss(*scored, data)[0])(scored)

    try:
        with jax.disable_jit():  # nested programs come out inlined
            return jax.make_jaxpr(gradient)((scores, scores if entropy else None), columns)
    except (TypeError, ValueError) as error:
        shapes = f"on {shape} of the tokens"
        raise ValueError(f"{name}: loss: cannot be differentiated {shapes}: {error}") from error


def _live(jaxpr: Any) -> Iterator[Any]:
    """The equations that the results need, last first; those of a nested program in the place of its call."""
    needed = {variable for variable in jaxpr.outvars if not hasattr(variable, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed |= _read([equation])
            inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
            if equation.primitive.name in _CALLS and not getattr(inner, "consts", ()):
                yield from _live(getattr(inner, "jaxpr", inner))
            else:
                yield equation


def _read(equations: list[Any]) -> set[Any]:
    """The variables among their operands; the others are numbers."""
    return {operand for equation in equations for operand in equation.invars if not hasattr(operand, "val")}


def _keeps_tokens_apart(equation: Any, tokens: tuple[int, int]) -> bool:
    name, shapes = equation.primitive.name, [variable.aval.shape for variable in equation.invars]
    if name in _ELEMENTWISE:
        return True
    if name not in _REDUCES | _RESHAPES:
        return False
    if not shapes or shapes[0] == ():
        return name in _RESHAPES
    before = _token_axes(shapes[0], tokens)
    if before is None or name in _REDUCES:
        return before is not None and not set(before).intersection(equation.params["axes"])
    after, places = _token_axes(equation.outvars[0].aval.shape, tokens), equation.params.get("broadcast_dimensions")
    return after is not None and (places is None or tuple(places[axis] for axis in before) == after)


def _token_axes(shape: tuple[int, ...], tokens: tuple[int, int]) -> tuple[int, ...] | None:
    """The axes that tell tokens apart, where they come first in an array of that shape; None where they do not.

    An axis of length 1 tells nothing apart, and traced programs drop it.
    """
    wide = tuple(axis for axis in range(2) if tokens[axis] > 1)
    if shape[:2] == tokens:
        return wide
    return tuple(range(len(wide))) if shape[: len(wide)] == tuple(tokens[axis] for axis in wide) else None
