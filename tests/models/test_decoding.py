"""Every family: decoding with the cache, prompts in chunks, equals the full forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ONE_EACH, VOCABULARY, config_of, params_of

from agentrl_jax.models import decoder
from agentrl_jax.models.layers import soft_cap
from agentrl_jax.sampler import decode
from agentrl_jax.sampler.select import Cuts

PROMPTS = [[5, 1, 8, 2, 9, 4, 7], [3, 6, 2]]  # longer than the windows, and shorter
NEW, CHUNK = 6, 4


def generate(config, params):
    """Greedy continuations i32[2, NEW] of PROMPTS, and their log-probabilities."""
    published, rows = decoder.unstack(config, params), len(PROMPTS)
    pools = decode.allocate(config, 1 + 2 * rows)
    table = jnp.asarray([[1 + 2 * row, 2 + 2 * row] for row in range(rows)], jnp.int32)
    prefill = jax.jit(decode.prefill, static_argnums=0)
    longest = max(len(prompt) for prompt in PROMPTS) - 1  # the last token is the first that decoding reads
    for start in range(0, longest, CHUNK):
        pieces = [prompt[:-1][start : start + CHUNK] for prompt in PROMPTS]
        tokens = jnp.asarray([[*piece, *[0] * (CHUNK - len(piece))] for piece in pieces], jnp.int32)
        counts = jnp.asarray([len(piece) for piece in pieces], jnp.int32)
        pools = prefill(config, published, pools, table, jnp.full(rows, start, jnp.int32), tokens, counts)
    zeros = jnp.zeros(rows, jnp.int32)
    start = decode.Rows(
        table=table,
        lengths=jnp.asarray([len(prompt) - 1 for prompt in PROMPTS], jnp.int32),
        last=jnp.asarray([prompt[-1] for prompt in PROMPTS], jnp.int32),
        key=jnp.zeros((rows, 2), jnp.uint32),
        drawn=zeros,
        active=jnp.ones(rows, bool),
        remaining=jnp.full(rows, NEW, jnp.int32),
        stops=jnp.full((rows, 1), -1, jnp.int32),
        cuts=Cuts(jnp.zeros(rows, jnp.float32), zeros, jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.float32)),
    )
    step = jax.jit(decode.decode, static_argnums=(0, 5, 6))
    _, drawn = step(config, published, pools, start, jnp.int32(0), NEW, (VOCABULARY + 1,))
    assert np.all(drawn.emitted)
    return np.asarray(drawn.tokens).T, np.asarray(drawn.logprobs).T


@pytest.mark.parametrize("case", ONE_EACH)
def test_decoding_with_the_cache_equals_the_full_forward(case):
    config, params = config_of(case), params_of(case)
    tokens, logprobs = generate(config, params)
    rows = [[*prompt, *new] for prompt, new in zip(PROMPTS, tokens.tolist(), strict=True)]
    longest = max(map(len, rows))
    padded = jnp.asarray([[*row, *[0] * (longest - len(row))] for row in rows], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), padded.shape)
    h = jax.jit(decoder.hidden, static_argnums=0)(config, params, padded, positions, jnp.full_like(padded, longest))
    logits = soft_cap(h @ decoder.unembedding(config, params).T, config.final_soft_cap)
    for row, prompt in enumerate(PROMPTS):
        scored = jax.nn.log_softmax(logits[row, len(prompt) - 1 : len(prompt) - 1 + NEW])
        np.testing.assert_array_equal(np.argmax(scored, axis=-1), tokens[row])
        np.testing.assert_allclose(np.max(scored, axis=-1), logprobs[row], atol=1e-4)
