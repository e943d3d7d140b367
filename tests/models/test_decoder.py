"""Every family: packed forests equal separate rows, remat changes nothing, bf16 runs, both ways of a mixture agree."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ONE_EACH, config_of, params_of

from agentrl_jax import sharding
from agentrl_jax.models import decoder, experts, layers

# Prompt [1 2 3] with branches [4 5] and [6 7 8 9 10], an unrelated [11 12], then padding. Windows of 4 and 5 end there.
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0]
POSITIONS = [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 0, 1, 0]
ENDS = [10, 10, 10, 5, 5, 10, 10, 10, 10, 10, 12, 12, 12]
# The same as rows of their own: (tokens, first column that is compared).
BRANCHES = [([1, 2, 3, 4, 5], 0), ([1, 2, 3, 6, 7, 8, 9, 10], 3), ([11, 12], 0)]


ROWS, LENGTH = len(BRANCHES), len(TOKENS)  # of both layouts, so that one compiled function serves them


def arrays(rows):
    """(tokens, positions, ends) of rows that are filled up with padding, which nothing reads."""
    rows = [*rows, *[[]] * (ROWS - len(rows))]
    filled = np.asarray([[*row, *[(0, 0, t) for t in range(len(row), LENGTH)]] for row in rows], np.int32)
    return tuple(jnp.asarray(filled[:, :, i]) for i in range(3))


def packed():
    return arrays([list(zip(TOKENS, POSITIONS, ENDS, strict=True))])


def separate():
    return arrays([[(token, t, len(row)) for t, token in enumerate(row)] for row, _ in BRANCHES])


def places(rows):
    """(row, column) of what is compared, in one order for both layouts."""
    if rows is packed:
        return jnp.zeros(12, jnp.int32), jnp.arange(12, dtype=jnp.int32)
    found = [(row, t) for row, (tokens, first) in enumerate(BRANCHES) for t in range(first, len(tokens))]
    return tuple(jnp.asarray(np.transpose(found), jnp.int32))


@pytest.fixture(autouse=True)
def _scanned(monkeypatch):
    """Layers are scanned, as those of every model that is not tiny; the parity tests have them one after another."""
    monkeypatch.setattr(decoder, "_SHALLOW", 0)


@functools.cache
def compiled(case, shallow, remat=False, **changes):
    """(params, arrays, places) -> ((loss, states), gradients); the loss takes every compared state into account."""
    del shallow  # it is read when the function is traced
    config = replace(config_of(case), **changes)
    pull = jnp.asarray(np.random.default_rng(1).normal(size=(12, config.width)), jnp.float32)

    def loss(params, given, where):
        states = decoder.hidden(config, params, *given, remat=remat)[where]
        return jnp.sum(jnp.sin(states) * pull), states

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(case, rows, **changes):
    """(states, gradients)."""
    (_, states), grads = compiled(case, decoder._SHALLOW, **changes)(params_of(case), rows(), places(rows))
    return np.asarray(states), jax.device_get(grads)


def assert_same(one, two, atol=2e-5):
    np.testing.assert_allclose(one[0], two[0], atol=atol)
    for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(two[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=atol * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("case", ONE_EACH)
def test_packed_branched_forest_equals_its_branches_one_by_one(case):
    assert_same(run(case, packed), run(case, separate))


def test_scanned_layers_give_the_numbers_of_layers_one_after_another(monkeypatch):
    case = "gemma3, untied, soft caps"
    scanned = run(case, packed)
    monkeypatch.setattr(decoder, "_SHALLOW", 3)
    assert_same(run(case, packed), scanned)


@pytest.mark.parametrize("remat", ["full", "dots_saveable"])
def test_remat_gives_the_same_numbers(remat):
    case = "gemma3, untied, soft caps"
    assert_same(run(case, packed, remat=remat), run(case, packed), atol=1e-5)


def test_unknown_remat_is_named():
    with pytest.raises(ValueError, match="remat: 'most', expected one of none, full, dots_saveable"):
        decoder.hidden(config_of(ONE_EACH[0]), params_of(ONE_EACH[0]), *packed(), remat="most")


@pytest.mark.parametrize("case", ONE_EACH)
def test_bf16_compute_runs_and_stays_near(case):
    config, params = replace(config_of(case), compute_dtype="bfloat16"), params_of(case)
    states = jax.jit(lambda params: decoder.hidden(config, params, *packed()))(params)
    assert states.dtype == jnp.float32
    exact = run(case, packed)[0]
    assert np.abs(states[places(packed)] - exact).mean() < 0.05 * np.abs(exact).mean()


@pytest.mark.parametrize("case", ONE_EACH)
def test_counts_shapes_and_axes_match_the_parameters(case):
    config = config_of(case)
    drawn = jax.eval_shape(lambda key: decoder.init(config, key), jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn) == jax.tree.map(
        lambda x: (x.shape, x.dtype), decoder.shapes(config)
    )
    assert decoder.param_count(config) == sum(x.size for x in jax.tree.leaves(drawn))
    axes = decoder.logical_axes(config)
    assert jax.tree.map(len, axes, is_leaf=lambda x: isinstance(x, tuple)) == jax.tree.map(lambda x: x.ndim, drawn)
    sharding.shardings(sharding.make_mesh(), axes)


def test_initial_norms_do_nothing_and_biases_are_zero():
    config = replace(config_of("gemma3, untied, soft caps"), qkv_bias=True)
    drawn = decoder.init(config, jax.random.key(0))["layers"]
    x = jnp.asarray(np.random.default_rng(3).normal(size=(3, config.width)), jnp.float32)
    scaled = layers.norm(config, x, drawn["mlp_norm"][0])
    np.testing.assert_allclose(jnp.mean(jnp.square(scaled), axis=-1), np.ones(3), rtol=1e-4)
    assert not np.any(drawn["query_bias"]) and np.std(drawn["query"]) > 0.1


# -- mixtures of experts ---------------------------------------------------------------------------------------------


def mixture_case():
    case = "qwen3_moe, tied, shares not normalised"
    p = {name: jnp.asarray(x[0]) for name, x in params_of(case)["layers"].items()}
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 5, 16)), jnp.float32)
    return config_of(case), p, x


def test_mixture_against_a_loop_over_tokens():
    config, p, x = mixture_case()
    for normalize in (False, True):
        config = replace(config, normalize_experts=normalize)
        found = experts.mixture(config, p, x, jax.nn.silu)
        for index in np.ndindex(2, 5):
            y = np.asarray(x[index], np.float64)
            logits = y @ np.asarray(p["router"], np.float64)
            shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            chosen = np.argsort(-shares)[: config.experts_per_token]
            total = shares[chosen].sum() if normalize else 1.0
            expected = np.zeros(16)
            for e in chosen:
                gate, up = y @ np.asarray(p["gate"][e]), y @ np.asarray(p["up"][e])
                expected += shares[e] / total * ((gate / (1 + np.exp(-gate)) * up) @ np.asarray(p["down"][e]))
            np.testing.assert_allclose(found[index], expected, atol=1e-5)


def test_dense_and_ragged_mixtures_agree_in_values_and_gradients():
    config, p, x = mixture_case()

    def loss(config):
        return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(experts.mixture(config, p, x, jax.nn.silu))),
                                          argnums=(0, 1)))(p, x)  # fmt: skip

    dense, ragged = (loss(replace(config, expert_dispatch=way)) for way in ("dense", "ragged"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), dense, ragged)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"activation": "relu"}, "activation='relu'"),
        ({"window": 4}, "window=4"),
        ({"window": 4, "window_layers": (True,)}, "window_layers"),
        ({"window": 0, "window_layers": (True, False, True)}, "window=0"),
        ({"experts": 4}, "experts_per_token=0"),
        ({"expert_dispatch": "sparse"}, "expert_dispatch='sparse'"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(config_of("qwen3, untied"), **changes)
