"""Adafactor and Muon on stacked layers, and masters in f32 of params in bf16: by hand, and matrix by matrix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import muon as plain_muon

from agentrl_jax.learner.masters import Masters, applied, masters_of, started, updated, with_masters
from agentrl_jax.learner.optimizers import adafactor, adamw, muon
from agentrl_jax.models import llama, lora
from agentrl_jax.models.matrices import Matrix, matrix_of

MOE = llama.LlamaConfig(
    vocab_size=23, width=8, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=12, context=32, tied=False,
    experts=3, experts_per_token=2, qkv_bias=True, qk_norm=True, model_type="qwen3_moe",
)  # fmt: skip
MATRICES = ("query", "key", "value", "out", "gate", "up", "down", "router")
RATE = 0.01


def tree(seed=0, config=MOE):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), llama.shapes(config))


def moves(optimizer, params, grads):
    """Updates of every step of `grads`, and the last state."""
    state, found, step = jax.jit(optimizer.init)(params), [], jax.jit(optimizer.update)
    with jax.numpy_dtype_promotion("standard"):
        for one in grads:
            update, state = step(one, state, params)
            found.append(update)
    return found, state


def matrices_of(name, x):
    """One layer's (and expert's) matrix [in, out] after another."""
    if name in ("gate", "up", "down") and x.ndim == 4:
        x = x.reshape(-1, *x.shape[2:])
    inputs = x.shape[1] * x.shape[2] if name == "out" else x.shape[1]
    return x.reshape(x.shape[0], inputs, -1)


def test_matrices_are_the_projections_of_layers_and_their_adapters():
    params = llama.shapes(MOE)
    found = {path[-1].key: matrix_of(path, x.ndim) for path, x in jax.tree.leaves_with_path(params)}
    assert {name for name, matrix in found.items() if matrix} == set(MATRICES)
    assert found["query"] == Matrix(1, 1, 2, ("width", "heads")) and found["out"] == Matrix(1, 2, 1, ("heads", "width"))
    assert found["gate"] == Matrix(2, 1, 1, ("width", "mlp")) and found["router"] == Matrix(1, 1, 1, ("width", None))
    dense = llama.shapes(
        llama.LlamaConfig(vocab_size=23, width=8, layers=2, heads=2, kv_heads=1, head_width=4, mlp_width=12)
    )
    settings = lora.Lora(rank=2, targets=("query", "out"))
    adapters = jax.eval_shape(partial(lora.init, settings), dense, jax.random.key(0)).adapters
    found = {(path[0].key, path[1].key): matrix_of(path, x.ndim) for path, x in jax.tree.leaves_with_path(adapters)}
    assert found[("query", "a")] == Matrix(1, 1, 1) and found[("query", "b")] == Matrix(1, 1, 2)
    assert found[("out", "a")] == Matrix(1, 2, 1) and found[("out", "b")] == Matrix(1, 1, 1)


def newton_schulz(g):
    x = g / (np.linalg.norm(g) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def test_muon_by_hand():
    params, grads = tree(), [tree(1), tree(2)]
    (first, second), _ = moves(muon(RATE, max_grad_norm=None, weight_decay=0.1), params, grads)
    g, h = (matrices_of("query", np.asarray(one["layers"]["query"], np.float64)) for one in grads)
    w = matrices_of("query", np.asarray(params["layers"]["query"]))
    nesterov = [g + 0.95 * g, h + 0.95 * (h + 0.95 * g)]
    for found, momentum in zip((first, second), nesterov, strict=True):
        expected = np.stack([0.2 * 16**0.5 * newton_schulz(m) for m in momentum])
        got = matrices_of("query", np.asarray(found["layers"]["query"]))
        np.testing.assert_allclose(got, -RATE * (expected + 0.1 * w), atol=1e-6)
        values = np.linalg.svd(got + RATE * 0.1 * w, compute_uv=False) / (RATE * 0.2 * 4)
        assert values.min() > 0.5 and values.max() < 1.3


def test_muon_of_a_stack_is_muon_of_each_matrix_and_adamw_of_the_rest():
    params, grads = tree(), [tree(1), tree(2)]
    settings = {"weight_decay": 0.1, "max_grad_norm": None}
    found, _ = moves(muon(RATE, **settings), params, grads)
    rest, _ = moves(adamw(RATE, **settings), params, grads)
    alone = plain_muon(RATE, weight_decay=0.1, consistent_rms=0.2)
    split = lambda x: {name: matrices_of(name, x["layers"][name])[-1] for name in MATRICES}  # noqa: E731
    (expected,), _ = moves(alone, split(params), [split(grads[0])])  # later, optax corrects its momentum's bias
    for name, matrix in split(found[0]).items():
        np.testing.assert_allclose(matrix, expected[name], rtol=1e-4, atol=1e-7, err_msg=name)
    for got, want in zip(found, rest, strict=True):
        for path, leaf in jax.tree.leaves_with_path(got):
            if path[-1].key not in MATRICES:
                reference = want["layers"][path[-1].key] if len(path) > 1 else want[path[-1].key]
                np.testing.assert_array_equal(leaf, reference)


def test_adafactor_by_hand_and_layer_by_layer():
    params, grads = tree(), [tree(1), tree(2)]
    optimizer = adafactor(RATE, max_grad_norm=None, weight_decay=0.1, factored_from=8)
    found, state = moves(optimizer, params, grads)
    row, col = 0.0, 0.0
    for t, (got, grad) in enumerate(zip(found, grads, strict=True), 1):
        g = matrices_of("query", np.asarray(grad["layers"]["query"], np.float64))  # [L, 8, 16]
        keep = 1 - t**-0.8
        row, col = keep * row + (1 - keep) * (g * g).mean(2), keep * col + (1 - keep) * (g * g).mean(1)
        u = g / np.sqrt(row[:, :, None] * col[:, None, :] / row.mean(1)[:, None, None])
        u = u / np.maximum(1, np.sqrt((u * u).mean((1, 2), keepdims=True)))
        expected = -RATE * (u + 0.1 * matrices_of("query", np.asarray(params["layers"]["query"])))
        np.testing.assert_allclose(matrices_of("query", np.asarray(got["layers"]["query"])), expected, atol=1e-7)
    factored = next(s for s in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "v_row")) if hasattr(s, "v_row"))
    assert factored.v_row["layers"]["query"].shape == (2, 8) and factored.v_col["layers"]["query"].shape == (2, 16)
    second = lambda x: {**x, "layers": jax.tree.map(lambda leaf: leaf[1:], x["layers"])}  # noqa: E731
    alone, _ = moves(optimizer, second(params), [second(grad) for grad in grads])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), second(found[1]), alone[1])


def size(state):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def test_what_each_keeps():
    model = llama.LlamaConfig(
        vocab_size=512, width=256, layers=2, heads=4, kv_heads=2, head_width=64, mlp_width=512, context=64
    )
    params = llama.shapes(model)
    count = llama.param_count(model)
    kept = {name: size(jax.eval_shape(make(RATE).init, params)) / count for name, make in (
        ("adamw", adamw), ("adafactor", adafactor), ("muon", muon), ("half", partial(adamw, moment_dtype="bfloat16")),
        ("half muon", partial(muon, moment_dtype="bfloat16")),
    )}  # fmt: skip
    top = 512 * 256 + 256 + 2 * 2 * 256
    assert kept["adamw"] == pytest.approx(8, abs=1e-3) and kept["half"] == pytest.approx(6, abs=1e-3)
    assert kept["muon"] == pytest.approx(4 + 4 * top / count, abs=1e-3)
    assert kept["half muon"] == pytest.approx(2 + 4 * top / count, abs=1e-3)
    assert kept["adafactor"] < 0.05


def bf16(params):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


@pytest.mark.parametrize("make", [adamw, adafactor, muon])
def test_masters_go_as_f32_params_do_and_the_params_are_their_rounding(make):
    settings = {"max_grad_norm": None, "weight_decay": 0.1}
    params = bf16(tree())
    optimizer, plain = with_masters(make(1e-4, **settings)), make(1e-4, **settings)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    state, reference = jax.jit(optimizer.init)(params), jax.jit(plain.init)(wide)
    step, theirs_step, stood = jax.jit(optimizer.update), jax.jit(plain.update), 0
    with jax.numpy_dtype_promotion("standard"):
        for seed in range(1, 4):
            grads, before = tree(seed), params
            updates, state = step(grads, state, params)
            params = applied(params, updates, state)
            theirs, reference = theirs_step(grads, reference, wide)
            wide = optax.apply_updates(wide, theirs)
            masters = updated(params, state)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9), masters, wide)
            jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), params, masters)
            stood += sum(int((a == b).sum()) for a, b in zip(*map(jax.tree.leaves, (before, params)), strict=True))
    assert stood > 0  # in bf16 alone those would never have moved
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}


def test_params_in_f32_have_no_masters_and_masters_outlive_a_stage():
    params, optimizer = tree(), with_masters(adamw(RATE))
    assert jax.tree.structure(optimizer.init(params)) == jax.tree.structure(adamw(RATE).init(params))
    half = bf16(params)
    state = optimizer.init(half)
    assert isinstance(state, Masters)
    finer = state._replace(params=jax.tree.map(lambda x: x * (1 + 2**-12), state.params))
    again = started(with_masters(muon(RATE)), half, masters_of(finer))
    jax.tree.map(np.testing.assert_array_equal, again.params, finer.params)
    jax.tree.map(np.testing.assert_array_equal, started(optimizer, half, None).params, state.params)
    assert jax.tree.structure(started(optimizer, params, masters_of(finer))) == jax.tree.structure(
        adamw(RATE).init(params)
    )


@pytest.mark.parametrize("make", [adafactor, muon])
def test_settings_that_contradict_are_named_with_the_optimizer(make):
    with pytest.raises(ValueError, match=rf"{make.__name__}: schedule='cosine' needs total"):
        make(RATE, schedule="cosine")
