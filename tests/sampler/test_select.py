"""The draw is exact: right frequencies, right log-probabilities, never an impossible token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.kernels.kept import kept_logprobs, pack, unpack
from agentrl_jax.sampler.select import Cuts, choose

chosen = jax.jit(choose)


def cuts(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def column(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (n,))

    return Cuts(
        *(column(x, jnp.float32 if i != 1 else jnp.int32) for i, x in enumerate((temperature, top_k, top_p, min_p)))
    )


def draw(logits, uniforms, temperature):
    return chosen(logits, uniforms, cuts(logits.shape[0], temperature))[:2]


def kept_by_sorting(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The cuts as everyone writes them: sort, cut, cut, cut."""
    p = np.exp(log_softmax(np.asarray(logits) / temperature))
    order = np.argsort(-p, kind="stable")
    order = order[: top_k or len(order)]
    mass = np.cumsum(p[order]) / p[order].sum()
    order = order[: int(np.searchsorted(mass, top_p - 1e-6)) + 1]
    order = order[p[order] >= min_p * p.max()]
    kept = np.zeros(len(p), bool)
    kept[order] = True
    return kept


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


SETTINGS = [
    {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 1}, {"top_p": 1e-4}, {"top_k": 1000, "top_p": 0.999, "temperature": 3.0},
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [33, 600])
def test_a_uniform_grid_draws_the_cut_distribution(setting, vocab):
    """With n evenly spaced uniforms a token of probability p is drawn n p times, give or take one a lane."""
    logits, n = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2, 8192
    got = chosen(
        jnp.broadcast_to(jnp.asarray(logits), (n, vocab)),
        (jnp.arange(n, dtype=jnp.float32) + 0.5) / n,
        cuts(n, **setting),
    )
    kept = kept_by_sorting(logits, **setting)
    scaled = logits / setting.get("temperature", 1.0)
    expected = np.where(kept, np.exp(log_softmax(np.where(kept, scaled, -np.inf))), 0.0)
    counts = np.bincount(np.asarray(got.tokens), minlength=vocab)
    assert np.abs(counts - n * expected).max() <= 2.1
    np.testing.assert_array_equal(unpack(got.kept[0], vocab), kept)
    tokens = np.asarray(got.tokens)
    np.testing.assert_allclose(np.exp(got.logprobs), expected[tokens], rtol=2e-5)
    np.testing.assert_allclose(got.raw_logprobs, log_softmax(logits)[tokens], atol=2e-5)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000), st.sampled_from([0, 1, 3, 50]), st.floats(0.015625, 1.0, width=32),
    st.sampled_from([0.0, 1e-9, 0.1, 0.9]),
    st.sampled_from([0.3, 1.0, 2.0]),
)  # fmt: skip
def test_the_learner_reproduces_the_behaviour_logprob_from_the_kept_set(seed, top_k, top_p, min_p, temperature):
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(6, 50)) * 3, jnp.float32)
    uniforms = jax.random.uniform(jax.random.key(seed), (6,))
    got = chosen(logits, uniforms, cuts(6, temperature, top_k, top_p, min_p))
    was_cut = bool(top_k or top_p < 1 or min_p > 0)
    bits = got.kept if was_cut else pack(jnp.ones((6, 50), bool))
    again = kept_logprobs(logits, got.tokens, jnp.full(6, temperature, jnp.float32), bits)
    np.testing.assert_allclose(again, got.logprobs, atol=1e-5)
    assert was_cut == bool(np.asarray(got.kept).any())


def test_p36_a_temperature_is_part_of_the_behaviour():
    logits = jnp.asarray([[1.0, 0.0, 0.0]], jnp.float32)
    got = chosen(logits, jnp.zeros(1), cuts(1, 0.5))
    np.testing.assert_allclose(np.exp([got.logprobs[0], got.raw_logprobs[0]]), [0.787, 0.576], atol=5e-4)
    rescored = kept_logprobs(logits, got.tokens, jnp.full(1, 0.5), pack(jnp.ones((1, 3), bool)))
    np.testing.assert_allclose(np.exp(rescored - got.logprobs), 1.0, atol=1e-6)
    assert float(jnp.exp(got.raw_logprobs - got.logprobs)[0]) == pytest.approx(0.732, abs=5e-4)


def test_p37_the_gap_of_a_cut_is_the_log_of_the_kept_mass():
    logits = jnp.log(jnp.asarray([[0.6, 0.3, 0.1]], jnp.float32))
    got = chosen(logits, jnp.zeros(1), cuts(1, top_p=0.9))
    np.testing.assert_allclose([got.logprobs[0], got.raw_logprobs[0]], [-0.405, -0.511], atol=5e-4)
    np.testing.assert_array_equal(unpack(got.kept, 3), [[True, True, False]])
    assert float((got.logprobs - got.raw_logprobs)[0]) == pytest.approx(-np.log(0.9), abs=1e-6)
    np.testing.assert_allclose(kept_logprobs(logits, got.tokens, jnp.ones(1), got.kept), got.logprobs, atol=1e-7)


def test_a_row_has_the_same_bits_whatever_its_neighbours_cut():
    logits = jnp.asarray(np.random.default_rng(5).normal(size=(8, 700)), jnp.float32)
    uniforms = jax.random.uniform(jax.random.key(1), (8,))
    alone = chosen(logits, uniforms, cuts(8))
    among = chosen(
        logits, uniforms, cuts(8, jnp.asarray([1, 0.5] * 4), jnp.asarray([0, 3] * 4), jnp.asarray([1, 0.9] * 4))
    )
    for field in ("tokens", "logprobs", "raw_logprobs"):
        np.testing.assert_array_equal(getattr(alone, field)[::2], getattr(among, field)[::2])
