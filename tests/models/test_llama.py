"""The decoder: shapes, axes, counts, forest rows equal to separate rows, the sampler's layout equal to the forward."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import sharding
from agentrl_jax.models import llama
from agentrl_jax.models.layers import rms_norm
from agentrl_jax.models.rotary import rotate, rotations

CONFIG = llama.LlamaConfig(vocab_size=37, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=48)


@pytest.fixture(scope="module")
def params():
    return llama.init(CONFIG, jax.random.key(0))


@pytest.mark.parametrize("tied", [True, False])
def test_count_and_axes_match_the_parameters(tied):
    config = replace(CONFIG, tied=tied)
    params = llama.init(config, jax.random.key(1))
    assert llama.param_count(config) == sum(x.size for x in jax.tree.leaves(params))
    axes = llama.logical_axes(config)
    jax.tree.map(lambda names, x: None if len(names) == x.ndim else pytest.fail(f"{names} {x.shape}"), axes, params,
                 is_leaf=lambda x: isinstance(x, tuple))  # fmt: skip
    assert sharding.shardings(sharding.make_mesh(), axes).keys() == params.keys()
    assert llama.unembedding(config, params).shape == (37, 32)


@pytest.mark.parametrize("field, value", [("kv_heads", 3), ("head_width", 7)])
def test_shapes_that_do_not_fit_are_named(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        replace(CONFIG, **{field: value})


def causal(rows):
    tokens = jnp.asarray(rows, jnp.int32)
    t = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), tokens.shape)
    return tokens, positions, jnp.full(tokens.shape, t, jnp.int32)


def forest():
    """One row: prompt [1 2 3] with branches [4 5] and [6 7 8], then an unrelated [9 10], then padding."""
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0]], jnp.int32)
    positions = jnp.asarray([[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 0]], jnp.int32)
    ends = jnp.asarray([[8, 8, 8, 5, 5, 8, 8, 8, 10, 10, 10]], jnp.int32)
    return tokens, positions, ends


@pytest.mark.parametrize("remat", [False, True])
def test_packed_forest_equals_separate_rows(params, remat):
    weights = jax.random.normal(jax.random.key(2), (37, 32))

    def packed(params):
        h = llama.hidden(CONFIG, params, *forest(), remat=remat)[0]
        return jnp.concatenate([h[:5], h[5:8], h[8:10]])

    def separate(params):
        a = llama.hidden(CONFIG, params, *causal([[1, 2, 3, 4, 5]]))[0]
        b = llama.hidden(CONFIG, params, *causal([[1, 2, 3, 6, 7, 8]]))[0, 3:]
        return jnp.concatenate([a, b, llama.hidden(CONFIG, params, *causal([[9, 10]]))[0]])

    def loss(which):
        return lambda params: jnp.sum(jnp.sin(which(params) @ weights.T))

    np.testing.assert_allclose(jax.jit(packed)(params), jax.jit(separate)(params), atol=1e-5)
    one, two = jax.jit(jax.grad(loss(packed)))(params), jax.jit(jax.grad(loss(separate)))(params)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(two))  # sums of thousands of such terms
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * largest, rtol=1e-4), one, two)


def test_padding_row_is_finite_in_value_and_gradient(params):
    tokens = jnp.zeros((1, 4), jnp.int32)
    ends = jnp.arange(4, dtype=jnp.int32)[None]

    def total(params):
        return jnp.sum(llama.hidden(CONFIG, params, tokens, tokens, ends))

    value, grads = jax.jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_rope_depends_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))
    config = replace(CONFIG, rope_theta=100.0)

    def score(i, j):
        turn = lambda x, p: rotate(x, rotations(config, jnp.asarray([p], jnp.int32))[0])  # noqa: E731
        return float(jnp.sum(turn(q, i) * turn(k, j)))

    assert score(7, 3) == pytest.approx(score(14, 10), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_rms_norm_against_numpy():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * 2
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.full(8, 2.0), 1e-5), expected, rtol=1e-5)


def test_bf16_compute_keeps_f32_parameters():
    config = replace(CONFIG, compute_dtype="bfloat16")
    params = llama.init(config, jax.random.key(0))
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}
    run = jax.jit(llama.hidden, static_argnums=0)
    full, half = (run(c, params, *causal([[1, 2, 3]])) for c in (CONFIG, config))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, full, atol=0.1)
