"""The TPU kernel, interpreted: any vocabulary and number of tokens, running sums that survive any order of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.kernels.pallas.logprobs import score_columns


def draw(tokens, width, vocabulary, dtype=jnp.float32, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(scale * rng.normal(size=(tokens, width)), dtype)
    return hidden, jnp.asarray(rng.normal(size=(vocabulary, width)), dtype), rng.integers(0, vocabulary, tokens)


def exact(hidden, matrix, targets, temperature=1.0, soft_cap=None):
    raw = np.asarray(hidden, np.float64) @ np.asarray(matrix, np.float64).T
    logits = (raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)) / temperature
    normalizers = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    log_p = logits - normalizers[:, None]
    return log_p[np.arange(len(targets)), targets], normalizers, -(np.exp(log_p) * log_p).sum(1)


def check(inputs, tolerance=3e-6, **settings):
    tiles = settings.pop("tiles", (8, 128, 128))
    found = score_columns(*inputs[:2], jnp.asarray(inputs[2], jnp.int32), tiles=tiles, interpret=True, **settings)
    for ours, theirs in zip(found, exact(*inputs, **settings), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary"),
    [(16, 8, 256), (16, 8, 257), (16, 8, 383), (13, 8, 128), (3, 8, 5), (9, 256, 300)],
    ids=["whole tiles", "one column over", "one column short", "tokens over", "less than a tile", "tiles of features"],
)
def test_any_number_of_tokens_columns_and_features(tokens, width, vocabulary):
    check(draw(tokens, width, vocabulary))


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"soft_cap": 2.0}, {"temperature": 1.7, "soft_cap": 4.0}])
def test_temperature_and_soft_cap(settings):
    check(draw(16, 8, 300, seed=1), **settings)


def test_half_precision_inputs_are_summed_in_f32_and_padding_counts_for_nothing():
    check(draw(16, 16, 1187, jnp.bfloat16, seed=2), tolerance=1e-5)


def test_running_sums_survive_growing_shrinking_and_extreme_logits():
    hidden = jnp.asarray([[1.0], [-1.0], [80.0], [0.0]])
    matrix = jnp.linspace(-9.0, 9.0, 500)[:, None]
    check((hidden, matrix, np.asarray([499, 0, 250, 7])), tolerance=2e-5)


def test_shapes_and_dtypes_that_do_not_fit_are_named():
    hidden, matrix, targets = draw(4, 8, 16)
    targets = jnp.asarray(targets, jnp.int32)
    for inputs, word in (
        ((hidden[:, :4], matrix, targets), "hidden"),
        ((hidden.astype(jnp.bfloat16), matrix, targets), "hidden: expected float32"),
        ((hidden, matrix, targets[:2]), "targets"),
    ):
        with pytest.raises(ValueError, match=f"score_columns: .*{word}"):
            score_columns(*inputs, interpret=True)


def test_off_tpus_the_form_pallas_is_two_passes():
    rng = np.random.default_rng(3)
    hidden, matrix = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 6, 4), (11, 4)))
    tokens = jnp.asarray(rng.integers(0, 11, (2, 6)), jnp.int32)
    parents = jnp.broadcast_to(jnp.arange(-1, 5, dtype=jnp.int32)[None], (2, 6))

    def scored(matrix, form):
        logprobs, entropy = token_logprobs(hidden, matrix, tokens, parents, parents > 0, form=form, entropy=True)
        return jnp.sum(logprobs + entropy), (logprobs, entropy)

    pallas, two = (jax.value_and_grad(scored, has_aux=True)(matrix, form) for form in ("pallas", "two_pass"))
    jax.tree.map(np.testing.assert_array_equal, pallas, two)
