"""Forest attention: a numpy loop as the second route, isolation, and padding that stays finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.kernels import attention
from agentrl_jax.kernels.attention import forest_attention

SCALE = 0.5
attend = jax.jit(lambda q, k, v, ends: forest_attention(q, k, v, ends, scale=SCALE))


def draw(rows, length, heads=4, groups=2, width=4, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(rows, length, n, width) for n in (heads, groups, groups)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def naive(q, k, v, ends):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, repeats = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        reads = [j for j in range(i + 1) if i < ends[b, j] or j == i]
        scores = np.exp(SCALE * k[b, reads, h // repeats] @ q[b, i, h])
        out[b, i, h] = scores / scores.sum() @ v[b, reads, h // repeats]
    return out


def forest(parents):
    """subtree_ends of a depth-first forest given by parents; None is padding."""
    ends = np.arange(len(parents), dtype=np.int32)
    for t, parent in enumerate(parents):
        ends[t] = t if parent is None else t + 1
        while parent is not None and parent >= 0:
            ends[parent], parent = t + 1, parents[parent]
    return ends


def test_second_route_on_a_tree_two_documents_and_padding():
    rows = np.stack([forest([-1, 0, 1, 2, 1, 4, 1]), forest([-1, 0, -1, 2, 3, None, None]), forest([None] * 7)])
    q, k, v = draw(3, 7)
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(rows)), naive(q, k, v, rows), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=9, max_size=9), st.integers(0, 9))
def test_second_route_on_any_forest(hops, padding):
    parents, stack = [], []
    for hop in hops[: 9 - padding]:
        stack = stack[: max(0, len(stack) - hop)]  # back up some levels, then continue from there
        parents.append(stack[-1] if stack else -1)
        stack = [*stack, len(parents) - 1]
    ends = forest(parents + [None] * padding)[None]
    q, k, v = draw(1, 9)
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(ends)), naive(q, k, v, ends), atol=1e-5)


def test_blocks_change_neither_values_nor_gradients(monkeypatch):
    ends = np.stack([forest([-1, *range(6), -1, *range(7, 13), None]), forest([-1, *range(14)])])
    q, k, v = draw(2, 15)

    def run():
        loss = lambda *qkv: jnp.sum(jnp.sin(forest_attention(*qkv, jnp.asarray(ends), scale=SCALE)))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    whole = run()
    for size in (4, 5):
        monkeypatch.setattr(attention, "_SMALLEST_BLOCK", size)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), run(), whole)


def test_gradient_against_automatic_differentiation():
    ends = jnp.asarray(np.stack([forest([-1, 0, 1, 1, 3, -1, 5, None])]))
    q, k, v = draw(1, 8)

    def plain(q, k, v):
        keys, values = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        scores = SCALE * jnp.einsum("bihc,bjhc->bhij", q, keys)
        scores = jnp.where(attention.readable(ends, 0, 8)[:, None], scores, -1e30)
        return jnp.einsum("bhij,bjhc->bihc", jax.nn.softmax(scores), values)

    pull = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)
    found = jax.vjp(lambda *x: forest_attention(*x, ends, scale=SCALE), q, k, v)[1](pull)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, jax.vjp(plain, q, k, v)[1](pull))


def test_extreme_scores_and_padding_stay_finite():
    ends = jnp.asarray(np.stack([forest([-1, 0, 1, None, None]), forest([None] * 5)]))
    q, k, v = (x * 1e4 for x in draw(2, 5))
    loss = lambda *qkv: jnp.sum(forest_attention(*qkv, ends, scale=SCALE))  # noqa: E731
    value, grads = jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in grads)


def test_half_precision_keeps_its_dtype_and_f32_scores():
    ends = jnp.asarray(forest([-1, *range(8)]))[None]
    q, k, v = draw(1, 9)
    half = attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)), ends)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), attend(q, k, v, ends), atol=0.05)


def test_shapes_that_do_not_fit_are_named():
    q, k, v = draw(1, 6, heads=3)
    with pytest.raises(ValueError, match="J must divide H"):
        forest_attention(q, k, v, jnp.ones((1, 6), jnp.int32), scale=1.0)
    q, k, v = draw(1, 6)
    with pytest.raises(ValueError, match="subtree_ends"):
        forest_attention(q, k, v, jnp.ones((1, 5), jnp.int32), scale=1.0)


# -- windows and soft caps -------------------------------------------------------------------------------------------

# A tree (prompt, two branches), two documents with padding, and one plain row.
ROWS = np.stack([
    forest([-1, 0, 1, 2, 3, 2, 5, 6, 7]), forest([-1, 0, 1, -1, 3, 4, 5, None, None]), forest([-1, *range(8)]),
])  # fmt: skip
POSITIONS = np.asarray([[0, 1, 2, 3, 4, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3, 0, 0], range(9)], np.int32)


def dense(q, k, v, window, soft_cap):
    """The same rule over the whole [T, T], for automatic differentiation."""
    keys, values = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
    scores = SCALE * jnp.einsum("bihc,bjhc->bhij", q, keys)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = attention.readable(jnp.asarray(ROWS), 0, 9)
    if window is not None:
        mask = mask & (jnp.asarray(POSITIONS[:, :, None] - POSITIONS[:, None]) < window)
    probabilities = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30))
    return jnp.einsum("bhij,bjhc->bihc", probabilities, values)


@pytest.mark.parametrize("window, soft_cap", [(3, None), (None, 0.7), (2, 0.7), (1, None), (100, None)])
def test_window_and_soft_cap_against_automatic_differentiation(window, soft_cap, monkeypatch):
    monkeypatch.setattr(attention, "_SMALLEST_BLOCK", 4)
    qkv = draw(3, 9, seed=3)
    pull = jnp.asarray(np.random.default_rng(4).normal(size=qkv[0].shape), jnp.float32)

    def both(function):
        return jax.jit(lambda *x: (function(*x), jax.vjp(function, *x)[1](pull)))(*qkv)

    found = both(lambda *x: forest_attention(
        *x, jnp.asarray(ROWS), scale=SCALE, positions=jnp.asarray(POSITIONS), window=window, soft_cap=soft_cap
    ))  # fmt: skip
    expected = both(lambda *x: dense(*x, window, soft_cap))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


def test_a_traced_window_compiles_once_and_a_wide_one_changes_no_bit():
    qkv, ends, positions = draw(3, 9), jnp.asarray(ROWS), jnp.asarray(POSITIONS)
    windowed = jax.jit(lambda window: forest_attention(*qkv, ends, scale=SCALE, positions=positions, window=window))
    near = windowed(jnp.int32(2))
    np.testing.assert_array_equal(windowed(jnp.int32(1 << 30)), jax.jit(lambda: attend(*qkv, ends))())
    assert windowed._cache_size() == 1
    # With a window of 1 a token reads itself alone.
    np.testing.assert_allclose(windowed(jnp.int32(1)), jnp.repeat(qkv[2], 2, axis=2), atol=1e-6)
    assert np.abs(near - windowed(jnp.int32(1))).max() > 0.1


def test_a_window_without_positions_and_a_cap_of_nothing_are_named():
    qkv, ends = draw(3, 9), jnp.asarray(ROWS)
    with pytest.raises(ValueError, match="positions: a window needs"):
        forest_attention(*qkv, ends, scale=1.0, window=3)
    with pytest.raises(ValueError, match="soft_cap"):
        forest_attention(*qkv, ends, scale=1.0, soft_cap=0.0)
