"""Chunked log-probabilities: alignment, temperature, chunks that change nothing, and no [B, T, V] anywhere."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.kernels.logprobs import token_logprobs

B, T, D, V = 3, 7, 4, 11


def draw(seed=0, action_rate=0.6):
    rng = np.random.default_rng(seed)
    parents = np.stack([[rng.integers(-1, t) if t else -1 for t in range(T)] for _ in range(B)]).astype(np.int32)
    mask = (rng.random((B, T)) < action_rate) & (parents >= 0)
    hidden, head = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    return tuple(map(jnp.asarray, (hidden, head, tokens, parents, mask)))


def naive(hidden, head, tokens, parents, mask, temperature=1.0):
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    logprobs, entropy = np.zeros((B, T)), np.zeros((B, T))
    for b, t in np.argwhere(np.asarray(mask)):
        logits = head @ hidden[b, parents[b, t]] / temperature
        distribution = logits - np.log(np.exp(logits).sum())
        logprobs[b, t] = distribution[tokens[b, t]]
        entropy[b, t] = -(np.exp(distribution) * distribution).sum()
    return logprobs, entropy


@cache
def chunked(chunk):
    return jax.jit(partial(token_logprobs, chunk=chunk, entropy=True, temperature=0.7))


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 9, 1000]), st.sampled_from([0.0, 0.3, 1.0]))
def test_second_route_for_any_mask_and_chunk(seed, chunk, rate):
    arrays = draw(seed, rate)
    logprobs, entropy = chunked(chunk)(*arrays)
    for found, expected in zip((logprobs, entropy), naive(*arrays, temperature=0.7), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert not np.any(np.asarray(logprobs)[~np.asarray(arrays[4])])


@pytest.mark.parametrize("chunk", [6, 100])
def test_gradients_against_the_unchunked_formula(chunk):
    hidden, head, tokens, parents, mask = draw(3)
    rng = np.random.default_rng(5)
    pull, push = (jnp.asarray(rng.normal(size=(B, T)), jnp.float32) for _ in range(2))

    def plain(hidden, head):
        read = jnp.take_along_axis(hidden, jnp.maximum(parents, 0)[:, :, None], axis=1)
        every = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", read, head))
        entropy = -jnp.sum(jnp.exp(every) * every, -1)
        chosen = jnp.take_along_axis(every, tokens[:, :, None], axis=-1)[:, :, 0]
        return jnp.sum(jnp.where(mask, chosen * pull + entropy * push, 0.0))

    def in_chunks(hidden, head):
        logprobs, entropy = token_logprobs(hidden, head, tokens, parents, mask, chunk=chunk, entropy=True)
        return jnp.sum(logprobs * pull + entropy * push)

    found, expected = (jax.grad(f, argnums=(0, 1))(hidden, head) for f in (in_chunks, plain))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)


def test_p09_the_mask_speaks_of_the_token_and_the_gradient_lands_on_its_parent():
    hidden, head, *_ = draw()
    tokens = jnp.asarray([[1, 2, 3, 4]], jnp.int32)  # p p r1 r2
    parents = jnp.asarray([[-1, 0, 1, 2]], jnp.int32)
    mask = jnp.asarray([[False, False, True, True]])
    total = lambda h: token_logprobs(h, head, tokens, parents, mask)[0].sum()  # noqa: E731
    touched = np.abs(np.asarray(jax.grad(total)(hidden[:1, :4]))).sum(-1)[0] > 0
    assert touched.tolist() == [False, True, True, False]


def test_p36_temperature_is_part_of_the_policy():
    hidden, head = jnp.ones((1, 2, 1), jnp.float32), jnp.asarray([[1.0], [0.0], [0.0]])
    arrays = (
        hidden,
        head,
        jnp.zeros((1, 2), jnp.int32),
        jnp.asarray([[-1, 0]], jnp.int32),
        jnp.asarray([[False, True]]),
    )
    sampled = token_logprobs(*arrays, temperature=0.5)[0][0, 1]
    assert token_logprobs(*arrays)[1] is None
    assert np.exp(sampled) == pytest.approx(0.787, abs=5e-4)
    assert np.exp(token_logprobs(*arrays)[0][0, 1]) == pytest.approx(0.576, abs=5e-4)
    assert np.exp(token_logprobs(*arrays, temperature=0.5)[0][0, 1] - sampled) == 1.0


def test_garbage_off_actions_reaches_neither_value_nor_gradient():
    hidden, head, tokens, _, _ = draw()
    parents = jnp.broadcast_to(jnp.arange(-1, T - 1, dtype=jnp.int32)[None], (B, T))
    mask = jnp.zeros((B, T), jnp.bool_).at[:, 2].set(True)
    broken = jnp.full_like(hidden, jnp.nan).at[:, 1].set(hidden[:, 1])
    total = lambda h, u: token_logprobs(h, u, tokens, parents, mask, entropy=True)[0].sum()  # noqa: E731
    value, grads = jax.value_and_grad(total, argnums=(0, 1))(broken, head)
    assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in grads)


def test_settings_without_a_meaning_are_refused():
    for setting in ({"temperature": 0.0}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            token_logprobs(*draw(), **setting)


@pytest.mark.parametrize(
    ("length", "vocabulary", "width", "chunk"),
    [(2048, 4096, 32, 128), (32768, 151936, 64, 1024)],
)
def test_p52_no_logits_of_the_whole_row_forward_or_backward(length, vocabulary, width, chunk):
    shape = jax.ShapeDtypeStruct
    ids = shape((1, length), jnp.int32)
    arrays = (
        shape((1, length, width), jnp.float32), shape((vocabulary, width), jnp.float32), ids, ids,
        shape((1, length), jnp.bool_),
    )  # fmt: skip
    loss = lambda *a: token_logprobs(*a, chunk=chunk)[0].sum()  # noqa: E731
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    logits, linear = chunk * vocabulary * 4, (length + vocabulary) * width * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 1.6 * logits + 3 * linear
    sizes = [np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())]
    assert max(sizes) <= chunk * vocabulary < length * vocabulary
