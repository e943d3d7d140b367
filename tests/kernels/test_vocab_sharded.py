"""The vocabulary over a mesh axis: the numbers of one device, nothing gathered, misuse refused."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.kernels.vocab_sharded import vocab_sharded_logprobs, vocab_sharded_loss
from agentrl_jax.recipes.plan import hlo

V, SETTINGS = 11, {"temperature": 0.7, "soft_cap": 3.0, "entropy": True}
ROWS = P("data")


def clipped(logprobs, entropy, data):
    ratio = jnp.exp(jnp.where(data["mask"], logprobs - data["old"], 0.0))
    gain = jnp.minimum(ratio * data["advantages"], jnp.clip(ratio, 0.8, 1.2) * data["advantages"])
    return jnp.sum(jnp.where(data["mask"], -gain - (0.0 if entropy is None else 0.05 * entropy), 0.0)), None


def data_of(mask):
    rng = np.random.default_rng(9)
    old, advantages = (jnp.asarray(mean + rng.normal(size=mask.shape), jnp.float32) for mean in (-2.0, 0.0))
    return {"mask": jnp.asarray(mask), "old": old, "advantages": advantages}


def mesh_of(data, vocab):
    return Mesh(np.asarray(jax.devices()[: data * vocab]).reshape(data, vocab), ("data", "vocab"))


@cache
def sharded(data, vocab, chunk=6):
    """(hidden, head, columns, data) -> (loss, gradients), over a mesh of data * vocab devices."""

    def local(hidden, head, columns, data):
        settings = SETTINGS | {"axis_name": "vocab", "vocabulary": V, "chunk": chunk}
        loss = lambda *p: vocab_sharded_loss(clipped, *p, *columns, data, **settings)[0]  # noqa: E731
        part, grads = jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)
        return jax.lax.psum(part, "data"), grads

    specs = (ROWS, P("vocab"), ROWS, ROWS)
    return jax.jit(jax.shard_map(local, mesh=mesh_of(data, vocab), in_specs=specs, out_specs=(P(), (ROWS, P("vocab")))))


def shares(head, devices):
    return jnp.pad(head, ((0, -V % devices), (0, 0)), constant_values=7.0)


@pytest.mark.parametrize(("data", "vocab"), [(1, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("actions", [0.0, 0.6])
def test_value_and_gradients_are_those_of_one_device(draw, data, vocab, actions):
    sample = draw(1, actions, rows=4)
    arrays = data_of(sample.mask)
    whole = lambda *p: logprob_loss(clipped, *p, *sample.columns, arrays, **SETTINGS)[0]  # noqa: E731
    expected, (dhidden, dhead) = jax.value_and_grad(whole, argnums=(0, 1))(*sample.arrays[:2])
    value, grads = sharded(data, vocab)(sample.hidden, shares(sample.head, vocab), sample.columns, arrays)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(grads[0], dhidden, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(grads[1][:V], dhead, rtol=1e-5, atol=2e-6)
    assert not np.any(grads[1][V:])


def test_rows_with_different_numbers_of_actions_take_the_same_number_of_chunks(draw):
    sample = draw(1, 0.9, rows=4)
    sample = sample._replace(mask=sample.mask & (np.arange(4) < 2)[:, None])
    arrays = data_of(sample.mask)
    whole = lambda *p: logprob_loss(clipped, *p, *sample.columns, arrays, **SETTINGS)[0]  # noqa: E731
    expected = jax.grad(whole, argnums=1)(*sample.arrays[:2])
    found = sharded(2, 2, 1)(sample.hidden, shares(sample.head, 2), sample.columns, arrays)[1][1]
    np.testing.assert_allclose(found[:V], expected, rtol=1e-5, atol=2e-6)


def test_logprobs_entropies_and_their_gradients_by_the_formula(draw, exact):
    sample = draw(2)
    pull, push = np.random.default_rng(5).normal(size=(2, *sample.mask.shape)).astype(np.float32)
    expected = exact(sample, 0.7, 3.0, pull, push)

    def local(hidden, head, columns):
        def total(hidden, head):
            scored = vocab_sharded_logprobs(
                hidden, head, *columns, axis_name="vocab", vocabulary=V, chunk=6, **SETTINGS
            )
            return jnp.sum(scored[0] * pull) + jnp.sum(scored[1] * push), scored

        grads, scored = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, head)
        return scored, grads

    specs, out = (P(), P("vocab"), P()), ((P(), P()), (P(), P("vocab")))
    run = jax.jit(jax.shard_map(local, mesh=mesh_of(1, 4), in_specs=specs, out_specs=out))
    scored, (dhidden, dhead) = run(sample.hidden, shares(sample.head, 4), sample.columns)
    for ours, theirs in zip((*scored, dhidden, dhead[:V]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=3e-6)


def test_nothing_as_large_as_logits_or_unembedding_crosses_devices():
    length, width, vocabulary, chunk = 512, 32, 4096, 64
    shape = jax.ShapeDtypeStruct
    ids, mask, floats = (shape((1, length), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    data = {"mask": mask, "old": floats, "advantages": floats}
    hidden, head = shape((1, length, width), jnp.float32), shape((vocabulary, width), jnp.float32)

    def local(hidden, head, columns, data):
        loss = lambda *p: vocab_sharded_loss(clipped, *p, *columns, data, axis_name="vocab", chunk=chunk)[0]  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    specs = (P(), P("vocab"), P(), P())
    run = jax.shard_map(local, mesh=mesh_of(1, 4), in_specs=specs, out_specs=(P(), (P(), P("vocab"))))
    text = jax.jit(run).lower(hidden, head, (ids, ids, mask), data).compile().as_text()
    crossing = hlo.collectives(text)
    assert crossing and {kind for kind, _ in crossing} == {"all-reduce"}
    assert max(size for _, size in crossing) <= chunk * width  # the hidden states' gradient, the largest
    assert hlo.largest_buffer(text) <= max(chunk * vocabulary // 4, vocabulary // 4 * width)
    flops = hlo.matmul_flops(text, trips=length // chunk)
    assert flops / (2 * length * width * vocabulary) == pytest.approx(3 / 4, abs=0.02)


def test_what_is_not_split_as_said_is_refused(draw):
    sample = draw(3, rows=4)

    def run(specs, check_vma=True):
        local = partial(vocab_sharded_logprobs, axis_name="vocab", vocabulary=V)
        options = {"mesh": mesh_of(1, 2), "in_specs": specs, "out_specs": P(), "check_vma": check_vma}
        jax.jit(jax.shard_map(lambda *a: local(*a)[0], **options))(
            sample.hidden, shares(sample.head, 2), *sample.columns
        )

    with pytest.raises(ValueError, match=r"check_vma=True.*PartitionSpec\('vocab'\)"):
        run((P(), P(), P(), P(), P()))
    with pytest.raises(ValueError, match="check_vma=True"):
        run((P(), P("vocab"), P(), P(), P()), check_vma=False)
    with pytest.raises(ValueError, match="the same along axis 'vocab'"):
        run((P("vocab"), P("vocab"), P("vocab"), P("vocab"), P("vocab")))
