"""The TPU kernels of forest attention, interpreted, against the plain-JAX reference: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels import attention
from agentrl_jax.kernels.pallas import attention as tiled

# A prompt of 3 with branches of 6 and 5, an unrelated document, padding: no multiple of the tile, skipped tiles.
ENDS = np.asarray([[14] * 3 + [9] * 6 + [14] * 5 + [18] * 4 + [18], [19] * 19], np.int32)
POSITIONS = np.asarray([[0, 1, 2, *range(3, 9), *range(3, 8), *range(4), 0], range(19)], np.int32)


def draw(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, 19, heads, 8)), dtype) for heads in (4, 2, 2)]


def both(function, qkv):
    pull = jnp.asarray(np.random.default_rng(1).normal(size=qkv[0].shape), qkv[0].dtype)
    return jax.jit(lambda *x: (function(*x), jax.vjp(function, *x)[1](pull)))(*qkv)


@pytest.mark.parametrize("window, soft_cap", [(None, None), (4, 0.7)])
def test_values_and_gradients_are_those_of_the_reference(window, soft_cap):
    settings = {"scale": 0.5, "positions": jnp.asarray(POSITIONS), "window": window, "soft_cap": soft_cap}
    found = both(lambda *x: tiled.forest_attention(*x, jnp.asarray(ENDS), tile=4, interpret=True, **settings), draw())
    expected = both(lambda *x: attention.forest_attention(*x, jnp.asarray(ENDS), **settings), draw())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


def test_extreme_scores_stay_finite_and_half_precision_keeps_its_dtype():
    qkv = [1e4 * x for x in draw(jnp.bfloat16)]
    out, grads = both(lambda *x: tiled.forest_attention(*x, jnp.asarray(ENDS), scale=0.5, tile=8, interpret=True), qkv)
    assert out.dtype == jnp.bfloat16
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in (out, *grads))


def test_a_window_needs_positions():
    with pytest.raises(ValueError, match="positions"):
        tiled.forest_attention(*draw(), jnp.asarray(ENDS), scale=0.5, window=3, interpret=True)
