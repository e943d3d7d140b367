"""Scalar heads: what is read where, against plain indexing; and the gradient goes nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.models import heads

HIDDEN = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 4)), jnp.float32)
PARENTS = jnp.asarray([[-1, 0, 1, 1, -1, -1], [-1, 0, 1, 2, 3, 4]], jnp.int32)
TRAJECTORIES = jnp.asarray([[4, 4, 0, 1, 4, 4], [2, 2, 2, 2, 2, 2]], jnp.int32)  # 3 has no token of its own


def head():
    return {**heads.init(4, jax.random.key(0)), "bias": jnp.float32(0.5)}


def expected(hidden):
    return np.asarray(hidden) @ np.asarray(head()["kernel"]) + 0.5


def test_a_value_belongs_to_the_prefix_before_its_token():
    found = heads.values(head(), HIDDEN, PARENTS)
    scalars = expected(HIDDEN)
    for b, t in np.ndindex(2, 6):
        parent = int(PARENTS[b, t])
        np.testing.assert_allclose(found[b, t], scalars[b, parent] if parent >= 0 else 0.0, atol=1e-6)


def test_a_reward_is_read_at_the_trajectorys_last_token():
    at = heads.last_tokens(TRAJECTORIES, 4)
    assert at.tolist() == [2, 3, 11, -1]
    found = heads.rewards(head(), HIDDEN, at)
    np.testing.assert_allclose(found, [*expected(HIDDEN).reshape(-1)[[2, 3, 11]], 0.0], atol=1e-6)


def test_gradient_reaches_the_columns_that_were_read_only():
    at = heads.last_tokens(TRAJECTORIES, 4)
    grad = jax.grad(lambda hidden: jnp.sum(heads.rewards(head(), hidden, at)))(HIDDEN)
    assert np.flatnonzero(np.abs(grad).sum(-1).reshape(-1)).tolist() == [2, 3, 11]


def test_half_precision_states_are_read_in_f32_and_the_axes_match():
    params = heads.init(4, jax.random.key(0), "bfloat16")
    assert heads.scalars(params, HIDDEN.astype(jnp.bfloat16)).dtype == jnp.float32
    assert jax.tree.map(lambda x: x.ndim, params) == {"kernel": 1, "bias": 0}
    assert heads.logical_axes() == {"kernel": ("width",), "bias": ()}
