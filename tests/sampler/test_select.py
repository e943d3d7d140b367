"""The draw is exact: right frequencies, right log-probabilities, never an impossible token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.sampler.select import choose

draw = jax.jit(choose)


def log_softmax(x):
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("vocab, temperature", [(7, 1.0), (300, 0.5), (1000, 2.0)])
def test_frequencies_by_chi_square(vocab, temperature):
    rng = np.random.default_rng(0)
    n = 40_000
    logits = rng.normal(size=vocab).astype(np.float32) * 2
    rows = jnp.broadcast_to(jnp.asarray(logits), (n, vocab))
    uniforms = jax.random.uniform(jax.random.key(3), (n,))
    tokens, _ = draw(rows, uniforms, jnp.full(n, temperature, jnp.float32))
    expected = np.exp(log_softmax(logits / temperature)) * n
    counts = np.bincount(np.asarray(tokens), minlength=vocab).astype(np.float64)
    rare = expected < 5
    observed, wanted = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    statistic = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    freedom = len(wanted) - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([2, 33, 400]), st.sampled_from([0.0, 0.3, 1.0, 4.0]))
def test_logprobs_and_greedy(seed, vocab, temperature):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(5, vocab)) * 3).astype(np.float32)
    uniforms = jnp.asarray([0.0, 0.25, 0.5, 0.999, np.nextafter(np.float32(1), np.float32(0))], jnp.float32)
    tokens, logprobs = draw(jnp.asarray(logits), uniforms, jnp.full(5, temperature, jnp.float32))
    expected = log_softmax(logits / (temperature or 1.0))[np.arange(5), np.asarray(tokens)]
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)
    if temperature == 0.0:
        np.testing.assert_array_equal(tokens, logits.argmax(-1))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True, width=32))
def test_a_token_without_probability_is_never_drawn(seed, uniform):
    rng = np.random.default_rng(seed)
    allowed = rng.random((4, 100)) < 0.05
    allowed[:, rng.integers(100)] = True
    logits = jnp.asarray(np.where(allowed, rng.normal(size=allowed.shape), -np.inf), jnp.float32)
    top = np.float32(np.nextafter(np.float32(1), np.float32(0)))
    tokens, logprobs = draw(logits, jnp.asarray([uniform, 0.0, top, uniform], jnp.float32), jnp.ones(4))
    assert allowed[np.arange(4), np.asarray(tokens)].all() and np.isfinite(logprobs).all()


def test_each_row_has_its_own_temperature():
    logits = jnp.broadcast_to(jnp.asarray([1.0, 0.0, 0.0], jnp.float32), (3, 3))
    tokens, logprobs = draw(logits, jnp.zeros(3), jnp.asarray([0.5, 1.0, 0.0], jnp.float32))
    assert tokens.tolist() == [0, 0, 0]
    np.testing.assert_allclose(np.exp(logprobs), [0.787, 0.576, 0.576], atol=5e-4)
