"""The loss head over kept sets: the softmax of what was left to draw from, in every form, values and gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.kernels.kept import pack, unpack
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.kernels.vocab_sharded import vocab_sharded_loss

V, SETTINGS = 45, {"temperature": 0.7, "soft_cap": 3.0, "entropy": True}  # two words, the second one partly used


@pytest.fixture
def sample(draw):
    return draw(3, vocabulary=V)


@pytest.fixture
def kept(sample):
    """bool[B, T, V]: some third of the vocabulary, and the token itself."""
    sets = np.random.default_rng(4).random((*sample.tokens.shape, V)) < 0.3
    return sets | (np.arange(V) == sample.tokens[..., None])


def pooled(logprobs, entropy, data):
    return jnp.sum(data * logprobs * logprobs + 0.3 * data * entropy), None


def naive(sample, kept, data, hidden, head):
    """All logits at once, those outside the set at -inf; jax differentiates it."""
    reads = jnp.maximum(jnp.asarray(sample.parents), 0)
    raw = jnp.take_along_axis(hidden, reads[..., None], axis=1) @ head.T
    logits = jnp.where(kept, 3.0 * jnp.tanh(raw / 3.0) / 0.7, -jnp.inf)
    table = jax.nn.log_softmax(logits)
    logprobs = jnp.take_along_axis(table, jnp.asarray(sample.tokens)[..., None], axis=-1)[..., 0]
    p, log_p = jnp.where(kept, jnp.exp(table), 0.0), jnp.where(kept, table, 0.0)
    masked = lambda x: jnp.where(sample.mask, x, 0.0)  # noqa: E731
    logprobs, entropy = masked(logprobs), masked(-jnp.sum(p * log_p, axis=-1))
    return pooled(logprobs, entropy, data)[0], (logprobs, entropy)


def ours(sample, kept, data, hidden, head, form):
    settings = SETTINGS | {"chunk": 6, "form": form, "kept": pack(jnp.asarray(kept))}
    value, rest = logprob_loss(pooled, hidden, head, *sample.columns, data, **settings)
    return value, (rest.logprobs, rest.entropy)


def close(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=3e-6), found, expected)


def both(function, sample):
    return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))(*sample.arrays[:2])


def weights(sample):
    return jnp.asarray(np.random.default_rng(6).normal(size=sample.mask.shape), jnp.float32)


@pytest.mark.parametrize("form", ["single_pass", "two_pass", "checkpointed"])
def test_values_and_gradients_are_those_of_all_logits_at_once(sample, kept, form):
    data = weights(sample)
    found = both(partial(ours, sample, kept, data, form=form), sample)
    close(found, both(partial(naive, sample, kept, data), sample))


@pytest.mark.parametrize("form", ["single_pass", "two_pass", "checkpointed"])
def test_full_sets_are_the_whole_vocabulary(sample, form):
    def run(hidden, head, kept):
        return logprob_loss(pooled, hidden, head, *sample.columns, weights(sample), form=form, kept=kept, **SETTINGS)

    full = jnp.full((*sample.tokens.shape, 2), 0xFFFFFFFF, jnp.uint32)
    close(*(jax.jit(run)(*sample.arrays[:2], kept) for kept in (full, None)))


def test_nothing_reaches_what_was_not_kept(sample, kept):
    """A token that no set holds gets no gradient, and its logits none either."""
    never = 7
    kept = kept & (np.arange(V) != never)
    sample = sample._replace(tokens=np.where(sample.tokens == never, 8, sample.tokens))
    kept |= np.arange(V) == sample.tokens[..., None]
    (_, _), (_, dhead) = both(partial(ours, sample, kept, weights(sample), form="single_pass"), sample)
    assert not np.any(dhead[never]) and np.any(dhead[8])


@pytest.mark.parametrize("devices", [2, 4])
def test_a_split_vocabulary_takes_its_share_of_every_set(sample, kept, devices):
    data = weights(sample)
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("vocab",))
    settings = SETTINGS | {"axis_name": "vocab", "vocabulary": V, "chunk": 6}

    def local(hidden, head, columns, data, bits):
        loss = lambda *p: vocab_sharded_loss(pooled, *p, *columns, data, kept=bits, **settings)[0]  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    specs = (P(), P("vocab"), P(), P(), P())
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), (P(), P("vocab")))))
    share = jnp.pad(sample.head, ((0, -V % devices), (0, 0)), constant_values=7.0)
    value, (dhidden, dhead) = run(sample.hidden, share, sample.columns, data, pack(jnp.asarray(kept)))
    (expected, _), grads = both(partial(naive, sample, kept, data), sample)
    close((value, dhidden, dhead[:V]), (expected, *grads))


def test_what_is_no_set_and_what_cannot_read_one_is_refused(sample, kept):
    run = partial(token_logprobs, *sample.arrays[:2], *sample.columns)
    with pytest.raises(ValueError, match=r"^token_logprobs: kept: expected uint32\[3, 7, 2\], got bool\[3, 7, 45\]"):
        run(kept=jnp.asarray(kept))
    with pytest.raises(ValueError, match=r"kept: expected uint32\[3, 7, 2\], got uint32\[3, 7, 1\]"):
        run(kept=pack(jnp.asarray(kept))[..., :1])
    with pytest.raises(ValueError, match="kept: form='pallas' scores the whole vocabulary only: use form='two_pass'"):
        run(kept=pack(jnp.asarray(kept)), form="pallas")


def test_packing_is_undone_by_unpacking(kept):
    np.testing.assert_array_equal(unpack(pack(jnp.asarray(kept)), V), kept)
