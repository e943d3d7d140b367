"""Every family against transformers: logits within 1e-4, gradients of a loss within 1e-3 relative, all in f32.

Where torch is installed, live; everywhere, against what tests/golden/make_parity.py stored.
"""

import functools
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, at, config_of, params_of, tokens_of
from reference import reference

from agentrl_jax.models import decoder
from agentrl_jax.models.families import family_of
from agentrl_jax.models.layers import soft_cap

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "parity.json").read_text())
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch==2.13.0"
)


@functools.cache
def ours(case):
    """(logits, loss, gradients) as numpy."""
    config, tokens = config_of(case), jnp.asarray(tokens_of(case))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    ends = jnp.full(tokens.shape, tokens.shape[1], jnp.int32)

    def loss(params):
        h = decoder.hidden(config, params, tokens, positions, ends)
        logits = soft_cap(h @ decoder.unembedding(config, params).T, config.final_soft_cap)
        scored = jax.nn.log_softmax(logits[:, :-1], axis=-1)
        return -jnp.mean(jnp.take_along_axis(scored, tokens[:, 1:, None], axis=2)), logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params_of(case))
    return np.asarray(logits), float(value), jax.device_get(grads)


@pytest.mark.parametrize("case", CASES)
def test_stored_logits_loss_and_gradient_norm(case):
    logits, loss, grads = ours(case)
    stored = GOLDEN["cases"][case]
    np.testing.assert_allclose(logits[:, GOLDEN["columns"]], stored["logits"], atol=1e-4)
    assert loss == pytest.approx(stored["loss"], abs=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(grads)))
    assert norm == pytest.approx(stored["gradient_norm"], rel=1e-4)


@needs_torch
@pytest.mark.filterwarnings("default")  # torch's and transformers' own
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same(case, tmp_path):
    expected, expected_loss, expected_grads = reference(case, tmp_path)
    logits, loss, grads = ours(case)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    config = config_of(case)
    seen = set()
    for tensor in family_of(config.model_type).tensors(config):
        found, wanted = tensor.to_theirs(at(grads, tensor)[tensor.index]), expected_grads[tensor.name]
        largest = np.abs(wanted).max()
        assert np.abs(found - wanted).max() <= 1e-3 * largest + 1e-7, tensor.name
        seen.add(tensor.name)
    assert seen == set(expected_grads)
