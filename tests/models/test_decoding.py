"""Every family: decoding with the cache, prompts in chunks, equals the full forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ONE_EACH, VOCABULARY, config_of, params_of

from agentrl_jax.models import decoder
from agentrl_jax.models.layers import soft_cap
from agentrl_jax.sampler import decode

PROMPTS = [[5, 1, 8, 2, 9, 4, 7], [3, 6, 2]]  # longer than the windows, and shorter
NEW, CHUNK = 6, 4


def generate(config, params):
    """Greedy continuations i32[2, NEW] of PROMPTS, and their log-probabilities."""
    published = decoder.unstack(config, params)
    slots = decode.allocate(config, len(PROMPTS), 64)
    prefill = jax.jit(decode.prefill, static_argnums=0)
    rows = jnp.arange(len(PROMPTS), dtype=jnp.int32)
    longest = max(len(prompt) for prompt in PROMPTS) - 1  # the last token is the first that decoding reads
    for start in range(0, longest, CHUNK):
        pieces = [prompt[:-1][start : start + CHUNK] for prompt in PROMPTS]
        tokens = np.asarray([[*piece, *[0] * (CHUNK - len(piece))] for piece in pieces], np.int32)
        counts = np.asarray([len(piece) for piece in pieces], np.int32)
        slots = prefill(config, published, slots, rows, jnp.asarray(tokens), jnp.asarray(counts))
    slots = slots._replace(
        last=jnp.asarray([prompt[-1] for prompt in PROMPTS], jnp.int32),
        active=jnp.ones(len(PROMPTS), bool),
        remaining=jnp.full(len(PROMPTS), NEW, jnp.int32),
    )
    step = jax.jit(decode.decode, static_argnums=(0, 3, 4))
    _, tokens, logprobs, emitted = step(config, published, slots, NEW, (VOCABULARY + 1,))
    assert np.all(emitted)
    return np.asarray(tokens).T, np.asarray(logprobs).T


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
