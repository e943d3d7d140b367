"""`policy.compute_dtype=bfloat16`: f32 params, half the numbers of everything that is computed from them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.cli.configs import apply_overrides
from agentrl_jax.errors import UserError
from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.state import init_state
from agentrl_jax.learner.update import make_update
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.checks import check
from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.demonstrations import packed, take
from agentrl_jax.recipes.dry_run import dry_run
from agentrl_jax.rl.imitation import imitation_loss
from agentrl_jax.runtime.publish import publish

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import small_config

PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def config(dtype: Any = "bfloat16") -> RunConfig:
    small = small_config.config()
    return replace(small, policy=replace(small.policy, compute_dtype=dtype))


def stepped(dtype: str) -> tuple[Any, Any, Any]:
    """(params before, state after, loss) of one supervised step."""
    made = config(dtype)
    assert made.sft is not None
    policy = policies.describe(made, made.environment.load())
    params = policies.initial_params(made, policy, PLACE)
    batch = take(packed(made.environment, policy.renderer, made.sft, 0), np.arange(8))
    batch = batch._replace(weights=batch.action_mask / np.float32(batch.action_mask.sum()))
    optimizer = adamw(1e-3, warmup=0, total=4, schedule="constant", weight_decay=0.0, max_grad_norm=1.0)
    update = make_update(policies.scorer(made, policy), imitation_loss, optimizer, micro_rows=4)
    state = init_state(optimizer, jax.tree.map(jnp.copy, params))
    state, info = update.step(state, jax.device_put(batch, PLACE), range(0, 8, 4))
    return params, state, info.to_host()


def test_an_update_keeps_f32_params_and_stays_near_that_of_f32() -> None:
    params, half, figures = stepped("bfloat16")
    _, full, expected = stepped("float32")
    assert {x.dtype.name for x in jax.tree.leaves((half.params, half.opt_state)) if x.ndim} == {"float32"}
    assert figures["loss"] != expected["loss"]
    assert figures["loss"] == pytest.approx(expected["loss"], rel=5e-3)
    assert figures["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    moved, also = (jax.tree.map(lambda a, b: a - b, state.params, params) for state in (half, full))
    for one, other in zip(jax.tree.leaves(moved), jax.tree.leaves(also), strict=True):
        assert float(jnp.vdot(one, other)) > 0.8 * float(jnp.linalg.norm(one) * jnp.linalg.norm(other))


def test_the_sampler_gets_params_of_that_dtype_and_a_dry_run_counts_them() -> None:
    made = config()
    policy = policies.describe(made, made.environment.load())
    params = publish(policy.model, policies.initial_params(made, policy, PLACE))
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    half, full = (dry_run(config(dtype))["estimated_memory_bytes"] for dtype in ("bfloat16", "float32"))
    for part in ("sampler", "cache", "activations"):
        assert 2 * half[part] == full[part], part
    assert half["learner"] == full["learner"] and half["logits"] == full["logits"]


def test_another_dtype_is_one_line() -> None:
    with pytest.raises(UserError, match=r"policy.compute_dtype='float16': expected one of float32, bfloat16"):
        check(config("float16"))
    with pytest.raises(UserError, match=r"policy.compute_dtype=half: expected one of 'float32', 'bfloat16'"):
        apply_overrides(config(), ["policy.compute_dtype=half"])
