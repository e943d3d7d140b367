"""Sets of kept tokens as bits: what a top-k, top-p or min-p cut left to draw from.

Where the sampler drew from a part K of the vocabulary, the behaviour log-probability is
log softmax over K alone. Recomputed over the whole vocabulary it is off by log of the kept mass,
a bias that a ratio takes for learning; over the recorded K it is not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WORD = 32


def words(vocab: int) -> int:
    """How many u32 words hold one bit a token."""
    return -(-vocab // WORD)


def pack(kept: jax.Array) -> jax.Array:
    """bool[..., V] -> u32[..., words(V)]; token v is bit v % 32 of word v // 32."""
    vocab = kept.shape[-1]
    padded = jnp.pad(kept, [(0, 0)] * (kept.ndim - 1) + [(0, -vocab % WORD)])
    bits = padded.reshape(*kept.shape[:-1], words(vocab), WORD).astype(jnp.uint32)
    shift = jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * kept.ndim + (WORD,))
    return jnp.sum(bits << shift, axis=-1, dtype=jnp.uint32)


def unpack(bits: jax.Array, vocab: int) -> jax.Array:
    """u32[..., words(V)] -> bool[..., V]."""
    shift = jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * bits.ndim + (WORD,))
    spread = (bits[..., None] >> shift) & jnp.uint32(1)
    return spread.reshape(*bits.shape[:-1], -1)[..., :vocab] > 0


def kept_logprobs(logits: jax.Array, tokens: jax.Array, temperature: jax.Array, bits: jax.Array) -> jax.Array:
    """log softmax(logits / temperature) over the kept tokens only, at `tokens`.

    logits f32[..., V], tokens i32[...], temperature f32[...] above 0, bits u32[..., words(V)] -> f32[...].
    A row that was not cut has every bit set.
    """
    scaled = jnp.where(unpack(bits, logits.shape[-1]), logits / temperature[..., None], -jnp.inf)
    chosen = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)
