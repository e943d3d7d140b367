"""Log-probabilities in every form: the formula, alignment, temperature, chunks that change nothing, no [B, T, V]."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.kernels.head import make_head, make_plan
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.recipes.plan import hlo

FORMS = ["two_pass", "checkpointed"]  # "pallas" has a file of its own
SETTINGS = {"temperature": 0.7, "soft_cap": 3.0}


@cache
def compiled(form, chunk, **options):
    return jax.jit(partial(token_logprobs, form=form, chunk=chunk, entropy=True, **SETTINGS, **options))


@cache
def gradients(form, chunk, entropy=True, **options):
    """(hidden, head, columns, pull, push) -> gradients of sum(pull * logprobs + push * entropy)."""

    def total(hidden, head, columns, pull, push):
        scored = token_logprobs(hidden, head, *columns, form=form, chunk=chunk, entropy=entropy, **SETTINGS, **options)
        return jnp.sum(scored[0] * pull) + (jnp.sum(scored[1] * push) if entropy else 0.0)

    return jax.jit(jax.grad(total, argnums=(0, 1)))


def pulls(shape=(3, 7), seed=5):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for _ in range(2)]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.sampled_from(FORMS), st.sampled_from([1, 9]), st.sampled_from([0.0, 0.3, 1.0]))
def test_values_and_gradients_for_any_mask_form_and_chunk(draw, exact, seed, form, chunk, actions):
    sample, (pull, push) = draw(seed, actions), pulls()
    found = *compiled(form, chunk)(*sample.arrays), *gradients(form, chunk)(*sample[:2], sample.columns, pull, push)
    expected = exact(sample, **SETTINGS, pull=pull, push=push)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=3e-6)
    assert not np.any(np.asarray(found[0])[~sample.mask]) and not np.any(np.asarray(found[1])[~sample.mask])


@pytest.mark.parametrize("form", FORMS)
def test_gradients_without_entropy(draw, exact, form):
    sample, (pull, push) = draw(3), pulls()
    found = gradients(form, 6, entropy=False)(*sample[:2], sample.columns, pull, push)
    for ours, theirs in zip(found, exact(sample, **SETTINGS, pull=pull)[2:], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_without_a_soft_cap_logits_are_not_bent(draw, exact):
    sample = draw(4)
    found = jax.jit(partial(token_logprobs, entropy=True))(*sample.arrays)
    for ours, theirs in zip(found, exact(sample)[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_inputs_are_summed_in_f32(draw, exact, form):
    sample, (pull, push) = draw(6, vocabulary=501, width=32), pulls()
    half = [jnp.asarray(x, jnp.bfloat16) for x in sample[:2]]
    rounded = sample._replace(hidden=np.asarray(half[0], np.float64), head=np.asarray(half[1], np.float64))
    expected = exact(rounded, **SETTINGS, pull=pull, push=push)
    found = compiled(form, 8)(*half, *sample.columns)
    for ours, theirs in zip(found, expected[:2], strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(form, 8)(*half, sample.columns, pull, push), expected[2:], strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=0.02, atol=0.02)


def test_an_f32_accumulator_loses_nothing_between_chunks(draw, exact):
    sample, pull = draw(7, 1.0, rows=1, length=200), np.ones((1, 200), np.float32)
    half = [jnp.asarray(x, jnp.bfloat16) for x in sample[:2]]
    rounded = sample._replace(hidden=np.asarray(half[0], np.float64), head=np.asarray(half[1], np.float64))
    expected = exact(rounded, **SETTINGS, pull=pull)[3]

    def error(accumulator):
        found = gradients("two_pass", 1, entropy=False, accumulator=accumulator)(*half, sample.columns, pull, pull)[1]
        return np.abs(np.asarray(found, np.float64) - expected).mean()

    assert error(jnp.float32) < 0.3 * error(None)


@pytest.mark.parametrize("form", FORMS)
def test_p09_the_mask_speaks_of_the_token_and_the_gradient_lands_on_its_parent(draw, form):
    hidden, head = draw().arrays[:2]
    tokens = jnp.asarray([[1, 2, 3, 4]], jnp.int32)  # p p r1 r2
    parents = jnp.asarray([[-1, 0, 1, 2]], jnp.int32)
    mask = jnp.asarray([[False, False, True, True]])
    total = lambda h: token_logprobs(h, head, tokens, parents, mask, form=form)[0].sum()  # noqa: E731
    touched = np.abs(np.asarray(jax.grad(total)(hidden[:1, :4]))).sum(-1)[0] > 0
    assert touched.tolist() == [False, True, True, False]


@pytest.mark.parametrize("form", FORMS)
def test_p36_temperature_is_part_of_the_policy(form):
    hidden, head = jnp.ones((1, 2, 1), jnp.float32), jnp.asarray([[1.0], [0.0], [0.0]])
    zeros, parents, mask = jnp.zeros((1, 2), jnp.int32), jnp.asarray([[-1, 0]], jnp.int32), jnp.asarray([[False, True]])
    logprobs = partial(token_logprobs, hidden, head, zeros, parents, mask, form=form)
    sampled = logprobs(temperature=0.5)[0][0, 1]
    assert logprobs()[1] is None
    assert np.exp(sampled) == pytest.approx(0.787, abs=5e-4)
    assert np.exp(logprobs()[0][0, 1]) == pytest.approx(0.576, abs=5e-4)
    assert np.exp(logprobs()[0][0, 1] - sampled) == pytest.approx(0.732, abs=5e-4)
    assert np.exp(logprobs(temperature=0.5)[0][0, 1] - sampled) == 1.0


@pytest.mark.parametrize("form", FORMS)
def test_garbage_off_actions_reaches_neither_value_nor_gradient(draw, form):
    hidden, head, tokens, _, mask = draw().arrays
    parents = jnp.broadcast_to(jnp.arange(-1, 6, dtype=jnp.int32)[None], tokens.shape)
    mask = jnp.zeros_like(mask).at[:, 2].set(True)
    broken = jnp.full_like(hidden, jnp.nan).at[:, 1].set(hidden[:, 1])
    pull = jnp.where(mask, 1.0, jnp.nan)  # where nobody acted, nobody's gradient counts

    def total(hidden, head):
        logprobs, entropy = token_logprobs(hidden, head, tokens, parents, mask, entropy=True, form=form)
        return jnp.sum(jnp.where(mask, logprobs + entropy, pull))

    grads = jax.grad(total, argnums=(0, 1))(broken, head)
    assert all(np.all(np.isfinite(g)) for g in grads)


@pytest.mark.parametrize("shares", [1, 3])
def test_as_many_chunks_are_visited_as_the_fullest_share_of_the_rows_needs(draw, shares):
    for actions, chunk in ((0.0, 6), (0.4, 6), (1.0, 6), (1.0, 1000)):
        sample = draw(2, actions)
        head = make_head("test", (3, 7), chunk, 1.0, None, False, None, shares=shares)
        most = sample.mask.reshape(shares, -1).sum(1).max()
        assert int(make_plan(head, *sample.columns).chunks) == -(-most // min(21 // shares, chunk))


def test_only_the_reference_is_differentiated_twice(draw):
    hidden, head, *columns = draw().arrays
    total = lambda form, head: token_logprobs(hidden, head, *columns, form=form)[0].sum()  # noqa: E731
    product = jax.jvp(jax.grad(partial(total, "checkpointed")), (head,), (head,))[1]
    nudged = (jax.grad(partial(total, "two_pass"))(head * (1 + sign * 1e-2)) for sign in (1, -1))
    np.testing.assert_allclose(product, np.subtract(*nudged) / 2e-2, atol=2e-3)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0}, {"chunk": 0}, {"soft_cap": -1.0}, {"form": "quick"}, {"accumulator": jnp.int32},
        {"accumulator": jnp.float32, "form": "checkpointed"},
    ],
)  # fmt: skip
def test_settings_without_a_meaning_are_refused(draw, setting):
    with pytest.raises(ValueError, match=f"token_logprobs: {next(iter(setting))}"):
        token_logprobs(*draw().arrays, **setting)


def test_arrays_that_do_not_fit_are_named(draw):
    hidden, head, tokens, parents, mask = draw().arrays
    for arrays, word in (
        ((hidden[0], head, tokens, parents, mask), "hidden"),
        ((hidden, head.T, tokens, parents, mask), "unembedding"),
        ((hidden, head, tokens[:, 1:], parents, mask), "tokens"),
        ((hidden, head, tokens, parents[:2], mask), "parents"),
        ((hidden, head, tokens, parents, mask.astype(jnp.float32)), "action_mask: expected bool"),
    ):
        with pytest.raises(ValueError, match=word):
            token_logprobs(*arrays)


@pytest.mark.parametrize("form", ["two_pass", "checkpointed"])
@pytest.mark.parametrize(("length", "vocabulary", "width", "chunk"), [(2048, 4096, 32, 128), (32768, 151936, 64, 1024)])
def test_p52_no_logits_of_the_whole_row_forward_or_backward(form, length, vocabulary, width, chunk):
    shape = jax.ShapeDtypeStruct
    ids, mask = shape((1, length), jnp.int32), shape((1, length), jnp.bool_)
    arrays = shape((1, length, width), jnp.float32), shape((vocabulary, width), jnp.float32), ids, ids, mask
    loss = lambda *a: token_logprobs(*a, chunk=chunk, form=form)[0].sum()  # noqa: E731
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    logits, linear = chunk * vocabulary * 4, (length + vocabulary) * width * 4
    assert program.memory_analysis().temp_size_in_bytes < 2 * 1.6 * logits + 3 * linear
    assert hlo.largest_buffer(program.as_text()) <= chunk * vocabulary < length * vocabulary
