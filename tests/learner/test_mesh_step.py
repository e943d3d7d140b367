"""The step on meshes: the numbers of one device, and of compiled programs what crosses devices and what never does."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from agentrl_jax import sharding
from agentrl_jax.batch import TokenBatch
from agentrl_jax.kernels.kept import pack
from agentrl_jax.learner import metrics
from agentrl_jax.learner.data_parallel import on_each, pmap_step
from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.score import Scorer
from agentrl_jax.learner.state import init_state
from agentrl_jax.learner.update import Update, make_update
from agentrl_jax.models import llama
from agentrl_jax.recipes.plan import hlo
from agentrl_jax.rl.algorithms import grpo, gspo
from agentrl_jax.rl.objective import policy_loss

# Five layers: more than are laid out one after another. No other dimension has the vocabulary's size.
MODEL = llama.LlamaConfig(
    vocab_size=104, width=32, layers=5, heads=4, kv_heads=4, head_width=8, mlp_width=48, qk_norm=True
)
OBJECTIVE = dataclasses.replace(grpo(beta=0.04), entropy_coef=0.01)
ROWS, WIDTH, F32 = 8, 32, 4
ONE = {"data": 1}
SPLIT = {"data": 1, "fsdp": 2, "tensor": 4}


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    return sharding.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def scorer_of(model: llama.LlamaConfig, remat: str, *, sequence: bool = False) -> Scorer:
    return Scorer(
        lambda params, tokens, positions, ends: llama.hidden(model, params, tokens, positions, ends, remat, sequence),
        partial(llama.unembedding, model), temperature=0.8, chunk=16, soft_cap=5.0,
        vocab_axes=sharding.axes_of("vocab"), row_axes=sharding.axes_of("rows"), width_axes=sharding.axes_of("width"),
    )  # fmt: skip


def update_of(scorer: Scorer, rows: int) -> Update:
    loss = partial(policy_loss, OBJECTIVE)
    return make_update(scorer, loss, adamw(1e-2), micro_rows=rows, needs_entropy=True)


def batch_of(*, kept: bool = False) -> TokenBatch:
    rng = np.random.default_rng(0)
    columns = np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1))
    mask = (rng.random((ROWS, WIDTH)) < 0.6) & (columns > 0)
    drawn = lambda: np.where(mask, rng.normal(-1, 0.3, mask.shape), 0).astype(np.float32)  # noqa: E731
    tokens = rng.integers(0, MODEL.vocab_size, mask.shape).astype(np.int32)
    sets = rng.random((*mask.shape, MODEL.vocab_size)) < 0.7
    np.put_along_axis(sets, tokens[..., None], True, 2)
    return TokenBatch(
        tokens=tokens, parents=columns - 1, subtree_ends=0 * columns + WIDTH, positions=columns,
        trajectory_ids=np.repeat(np.arange(ROWS, dtype=np.int32)[:, None], WIDTH, 1), turn_ids=0 * columns,
        sources=np.zeros(mask.shape, np.int8), action_mask=mask, behavior_logprobs=drawn(), ref_logprobs=drawn(),
        advantages=drawn(), weights=mask / np.float32(100), policy_versions=0 * columns,
        kept=pack(sets) if kept else None,
    )  # fmt: skip


def params_of(model: llama.LlamaConfig, mesh: jax.sharding.Mesh) -> Any:
    rng = np.random.default_rng(3)
    drawn = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), llama.shapes(model))
    return jax.device_put(drawn, sharding.shardings(mesh, llama.logical_axes(model)))


class Step(NamedTuple):
    text: str  # of the compiled accumulation
    apply: str  # and application
    loss: float
    grads: Any
    figures: dict[str, float]


@cache
def step(sequence: bool = False, **sizes: int) -> Step:
    mesh = mesh_of(sizes)
    update, params = update_of(scorer_of(MODEL, "full", sequence=sequence), ROWS), params_of(MODEL, mesh)
    state, batch = init_state(adamw(1e-2), params), jax.device_put(batch_of(), sharding.rows(mesh))
    traced = update.traced(state, batch)
    accumulate = traced["accumulate"].lower().compile()
    apply = "" if sequence or sizes == ONE else traced["apply"].lower().compile().as_text()
    row = jax.device_put(np.int32(0), sharding.replicated(mesh))
    acc = accumulate(params, batch, row)  # one micro-batch: nothing to add it to
    grads = jax.tree.map(np.asarray, acc.grads)
    return Step(accumulate.as_text(), apply, float(acc.loss), grads, metrics.to_host(acc.metrics))


@pytest.mark.parametrize("sequence", [False, True])
def test_a_mesh_changes_neither_loss_nor_gradient_nor_figures(sequence):
    one, other = step(**ONE), step(sequence, **SPLIT)
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-7), other.grads, one.grads)
    assert other.figures == pytest.approx(one.figures, rel=1e-5)


def test_weights_are_gathered_a_layer_at_a_time_and_none_to_apply_them():
    found = hlo.exchanges(step(**SPLIT).text, 8)
    gathers = [one for one in found if one.kind == "all-gather"]
    layers = [one for one in gathers if one.count == MODEL.layers]
    shapes = llama.shapes(MODEL)
    layer = sum(leaf.size for leaf in jax.tree.leaves(shapes["layers"])) // MODEL.layers * F32 // SPLIT["tensor"]
    # Each layer is gathered for the forward pass, and again for the backward pass that recomputes it.
    assert layers and sum(one.bytes for one in layers) <= 2 * layer
    head = shapes["embedding"].size * F32 // SPLIT["tensor"]
    assert all(one.bytes <= head and one.count == 1 for one in gathers if one not in layers)
    assert {one.group for one in gathers} == {SPLIT["fsdp"]}, "nothing is gathered over tensor"
    assert not [one for one in found if one.kind in ("collective-permute", "all-to-all")]
    assert {one.kind for one in hlo.exchanges(step(**SPLIT).apply, 8)} <= {"all-reduce"}
    assert max(one.bytes for one in hlo.exchanges(step(**SPLIT).apply, 8)) <= 64, "norms, and no array"


def test_no_device_sees_the_whole_vocabulary():
    whole, share = (re.compile(rf"\[(\d+,)*{n}(,\d+)*\]") for n in (MODEL.vocab_size, MODEL.vocab_size // 4))
    assert share.search(step(**SPLIT).text) and not whole.search(step(**SPLIT).text)
    assert whole.search(step(**ONE).text)


def test_long_rows_are_kept_by_shares_of_their_columns():
    kept = lambda columns: f"f32[{MODEL.layers},{ROWS // 2},{columns},{MODEL.width}]"  # noqa: E731
    whole, shares = step(**SPLIT).text, step(True, **SPLIT).text
    assert kept(WIDTH) in whole
    assert kept(WIDTH // 4) in shares and kept(WIDTH) not in shares


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1], ids=["split", "rows that do not divide"])
def test_scores_and_entropies_over_kept_sets_are_those_of_one_device(rows):
    small = dataclasses.replace(MODEL, layers=1)

    def scores(sizes: dict[str, int]) -> Any:
        mesh = mesh_of(sizes)
        place = sharding.rows(mesh) if rows == ROWS else sharding.replicated(mesh)
        batch = jax.device_put(jax.tree.map(lambda x: x[:rows], batch_of(kept=True)), place)
        scored = jax.jit(partial(scorer_of(small, "none").logprobs, entropy=True))(params_of(small, mesh), batch)
        return jax.tree.map(np.asarray, scored)

    for one, other in zip(scores(ONE), scores(SPLIT), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


def test_a_ratio_of_sequences_over_kept_sets_is_that_of_one_device():
    small, loss = dataclasses.replace(MODEL, layers=1), partial(policy_loss, gspo(low=0.999, high=9.0))
    scorer = scorer_of(small, "none", sequence=True)

    def gradients(sizes: dict[str, int]) -> Any:
        mesh = mesh_of(sizes)
        batch = batch_of(kept=True)
        batch = jax.device_put(batch._replace(weights=10 * batch.weights), sharding.rows(mesh))
        run = jax.jit(jax.value_and_grad(lambda params: scorer.loss(loss, params, batch)[0]))
        return jax.tree.map(np.asarray, run(params_of(small, mesh)))

    (one, expected), (other, found) = (gradients(sizes) for sizes in (ONE, {"data": 2, "fsdp": 2, "tensor": 2}))
    assert other == pytest.approx(one, abs=1e-6) and np.abs(expected["embedding"]).max() > 1e-3
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), found, expected)


def test_pmap_gives_what_the_jitted_step_gives():
    small, devices = dataclasses.replace(MODEL, layers=1), 4
    scorer, mesh = scorer_of(small, "none"), mesh_of(ONE)
    whole, shares = update_of(scorer, ROWS), pmap_step(update_of(scorer, ROWS // devices))
    states = init_state(adamw(1e-2), params_of(small, mesh)), init_state(adamw(1e-2), params_of(small, mesh))
    batch = batch_of()
    parts = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), batch)
    one, each = states[0], on_each(jax.device_get(states[1]), devices)
    for _ in range(2):
        one, info = whole.step(one, jax.device_put(batch, sharding.rows(mesh)), [0])
        each, infos = shares(each, parts)
        expected = info.to_host()
        for device in range(devices):
            found = jax.tree.map(lambda x, d=device: x[d], jax.device_get(infos)).to_host()
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[-1], y, atol=1e-5), each.params, one.params)
    assert np.all(np.asarray(each.step) == 2)
