"""A step whose rows are spread over a mapped axis gives what one device gives, under `jax.pmap` and under `shard_map`.

    def step(params, batch, rewards, valid, keep):
        batch = assign(objective, batch, rewards, valid, keep, axis_name="data")
        return value_and_grad(loss, axis_name="data")(params, batch)

    jax.pmap(step, axis_name="data", in_axes=(None, 0, None, None, None))
    jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P(), P(), P()), out_specs=P())

The weights carry the denominators of the whole step, so each device differentiates the sum over its own rows and the
devices add up afterwards. With the sum *inside* what is differentiated, `jax.pmap` and `shard_map(check_vma=False)`
return the right loss and wrong gradients. Under `jax.jit` with sharded inputs one program sees all rows, and
`jax.value_and_grad` needs no help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.extend.core import Jaxpr, Var, jaxprs_in_params

from agentrl_jax.rl.types import Metrics

LossAndMetrics = Callable[..., tuple[Array, Metrics]]


def value_and_grad(loss: LossAndMetrics, *, axis_name: str) -> Callable[..., tuple[tuple[Array, Metrics], Any]]:
    """`jax.value_and_grad` of a loss that is summed over the devices of a mapped axis, inside `pmap` or `shard_map`.

    `loss = sum_d loss_d`, `grads = sum_d d loss_d / d params`, both summed after differentiation.

    Args:
      loss: (params, *args) -> (sum over the rows of this device, Metrics of them). What it divides by may be a
        sum over the axis; its value may not.
      axis_name: the mapped axis.

    Returns:
      (params, *args) -> ((loss, metrics), grads), the same on every device. `params` is differentiated, and is the
      same on every device.

    Raises:
      ValueError: every path from `params` to the value of `loss` visibly runs through a `psum` over the axis (`pmean`
        too), or there is none. Calls such as `jit` and `checkpoint` are looked into. Not noticed: a sum inside a
        loop or a branch, one by `all_gather` or another collective, and one of a part of the value only.
    """

    def evaluate(params: Any, *args: Any) -> tuple[tuple[Array, Metrics], Any]:
        # Varying, so that shard_map's own tracking leaves this device's part of the gradient alone.
        params = jax.tree.map(lambda leaf: lax.pcast(leaf, axis_name, to="varying"), params)
        _refuse_sum(lambda candidate: loss(candidate, *args)[0], params, axis_name)
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, *args)
        value, sums, grads = lax.psum((value, metrics.sums, grads), axis_name)
        return (value, Metrics(sums, lax.pmax(metrics.maxima, axis_name))), grads

    return evaluate


def _refuse_sum(value: Callable[[Any], Array], params: Any, axis_name: str) -> None:
    """A safeguard against the likely mistake, not a proof: see what `value_and_grad` says is not noticed."""
    jaxpr = jax.make_jaxpr(value)(params).jaxpr
    if not any(_own(jaxpr, [True] * len(jaxpr.invars), axis_name)):
        raise ValueError(
            f"value_and_grad: loss: expected the sum over this device's rows, got a psum over axis {axis_name!r}, or "
            "a value without params: value_and_grad adds up over the axis, and would do so twice. Return this device's "
            "part"
        )


def _own(jaxpr: Jaxpr, given: Sequence[bool], axis_name: str) -> list[bool]:
    """Which outputs depend on the given inputs otherwise than through a sum over the axis."""
    own = {var for var, is_given in zip(jaxpr.invars, given, strict=True) if is_given}
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, list(jaxprs_in_params(equation.params))
        if name.startswith("psum") and axis_name in equation.params["axes"]:
            continue
        reached = [isinstance(var, Var) and var in own for var in equation.invars]
        if len(inner) == 1 and len(inner[0].invars) == len(reached) and name != "scan":
            found = _own(inner[0], reached, axis_name)
        else:  # a loop or a choice is not looked into
            found = [any(reached)] * len(equation.outvars)
        own |= {var for var, is_own in zip(equation.outvars, found, strict=True) if is_own}
    return [isinstance(var, Var) and var in own for var in jaxpr.outvars]
