"""A loss in one pass: equal to two and to the formula, detached where it says so, refused where it would be wrong."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.batch import TokenBatch
from agentrl_jax.kernels.fused_loss import logprob_loss
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.recipes.plan import hlo
from agentrl_jax.rl import algorithms, ratios
from agentrl_jax.rl.objective import policy_loss

SETTINGS = {"temperature": 0.7, "soft_cap": 3.0, "entropy": True}


def clipped(logprobs, entropy, data):
    """PPO with a KL term and an entropy bonus, and what it measures."""
    ratio = jnp.exp(jnp.where(data["mask"], logprobs - data["old"], 0.0))
    gain = jnp.minimum(ratio * data["advantages"], jnp.clip(ratio, 0.8, 1.2) * data["advantages"])
    kl = jnp.exp(data["ref"] - logprobs) - (data["ref"] - logprobs) - 1.0
    per_token = 0.1 * kl - gain - (0.0 if entropy is None else 0.05 * entropy)
    return jnp.sum(data["weights"] * jnp.where(data["mask"], per_token, 0.0)), {"peak": jnp.max(ratio)}


def data_of(mask, seed=9):
    rng = np.random.default_rng(seed)
    floats = lambda mean: jnp.asarray(mean + rng.normal(size=mask.shape), jnp.float32)  # noqa: E731
    names = {"old": -2.0, "ref": -2.0, "advantages": 0.0, "weights": 1.0}
    return {"mask": jnp.asarray(mask)} | {name: floats(mean) for name, mean in names.items()}


@cache
def gradients(form, chunk, **options):
    """(hidden, head, columns, data) -> ((loss, rest), gradients)."""

    def total(hidden, head, columns, data):
        return logprob_loss(clipped, hidden, head, *columns, data, form=form, chunk=chunk, **SETTINGS, **options)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1, 9]), st.sampled_from([0.0, 0.3, 1.0]))
def test_one_pass_gives_the_loss_and_its_gradient_by_the_formula(draw, exact, seed, chunk, actions):
    sample = draw(seed, actions)
    data = data_of(sample.mask, seed)
    (value, rest), found = gradients("single_pass", chunk)(*sample[:2], sample.columns, data)
    scored = [jnp.asarray(x, jnp.float32) for x in exact(sample, 0.7, 3.0)[:2]]
    expected, (pull, push) = jax.value_and_grad(lambda s: clipped(*s, data)[0])(scored)
    np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-5)
    for ours, theirs in zip((rest.logprobs, rest.entropy), scored, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)
    for ours, theirs in zip(found, exact(sample, 0.7, 3.0, np.asarray(pull), np.asarray(push))[2:], strict=True):
        largest = max(1.0, float(np.abs(theirs).max()))  # sums of large terms of both signs: f32 beside the largest
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize("form", ["two_pass", "checkpointed"])
def test_all_forms_agree(draw, form):
    sample = draw(1)
    inputs = *sample[:2], sample.columns, data_of(sample.mask)
    one, other = gradients("single_pass", 9)(*inputs), gradients(form, 9)(*inputs)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6), one, other)


def test_the_value_alone_is_the_value_with_its_gradient(draw):
    sample = draw(2)
    data = data_of(sample.mask)
    alone = jax.jit(partial(logprob_loss, clipped, chunk=9, **SETTINGS))(*sample[:2], *sample.columns, data)
    both = gradients("single_pass", 9)(*sample[:2], sample.columns, data)[0]
    jax.tree.map(np.testing.assert_array_equal, alone, both)


def test_the_incoming_gradient_scales_and_adds(draw):
    sample = draw(3)
    hidden, head = sample.arrays[:2]
    data = data_of(sample.mask)
    loss = lambda head, chunk: logprob_loss(clipped, hidden, head, *sample.columns, data, chunk=chunk)[0]  # noqa: E731
    found = jax.grad(lambda head: 3.0 * loss(head, 9) - 0.5 * loss(head, 1000))(head)
    np.testing.assert_allclose(found, 2.5 * jax.grad(loss)(head, 9), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", ["single_pass", "two_pass", "checkpointed"])
def test_what_a_loss_leaves_behind_is_detached(draw, form):
    sample = draw(4)
    hidden, head = sample.arrays[:2]
    data = data_of(sample.mask)

    def behind(head, weights):
        rest = logprob_loss(clipped, hidden, head, *sample.columns, data | {"weights": weights}, form=form)[1]
        return jnp.sum(rest.logprobs) + rest.aux["peak"]

    def value(head, weights):
        return logprob_loss(clipped, hidden, head, *sample.columns, data | {"weights": weights}, form=form)[0]

    assert not np.any(jax.grad(behind)(head, data["weights"]))
    assert not np.any(jax.grad(value, argnums=1)(head, data["weights"]))


def test_garbage_off_actions_reaches_neither_value_nor_gradient(draw):
    hidden, head, tokens, _, mask = draw().arrays
    parents = jnp.broadcast_to(jnp.arange(-1, 6, dtype=jnp.int32)[None], tokens.shape)
    mask = jnp.zeros_like(mask).at[:, 2].set(True)
    broken = jnp.full_like(hidden, jnp.nan).at[:, 1].set(hidden[:, 1])
    data = {name: jnp.where(mask, x, jnp.nan) if name != "mask" else x for name, x in data_of(mask).items()}
    guarded = lambda lp, e, d: clipped(lp, e, {n: jnp.where(d["mask"], x, x.dtype.type(0)) for n, x in d.items()})  # noqa: E731
    loss = lambda h, u: logprob_loss(guarded, h, u, tokens, parents, mask, data)[0]  # noqa: E731
    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(broken, head)
    assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in grads)


def test_half_precision_gradients_and_the_choice_of_accumulator(draw):
    sample = draw(7, 1.0, rows=1, length=200)
    inputs = *(jnp.asarray(x, jnp.bfloat16) for x in sample[:2]), sample.columns, data_of(sample.mask)
    exact = gradients("single_pass", 1)(*(jnp.asarray(x, jnp.float32) for x in inputs[:2]), *inputs[2:])[1][1]

    def error(accumulator):
        found = gradients("single_pass", 1, accumulator=accumulator)(*inputs)[1][1]
        assert found.dtype == jnp.bfloat16
        return np.abs(found.astype(jnp.float32) - exact).mean()

    assert error(jnp.float32) < 0.5 * error(None)


def pooled_ratio(logprobs, entropy, data):
    return jnp.sum(ratios.sequence(logprobs, data["old"], data["mask"], data["mask"].astype(jnp.int32))), None


NOT_LOCAL = {
    "a sequence ratio": pooled_ratio,
    "a mean": lambda lp, e, d: (jnp.mean(lp * d["advantages"]), None),
    "a mean over the weights": lambda lp, e, d: (jnp.sum(lp * d["weights"]) / jnp.sum(d["weights"]), None),
    "a function of the sum": lambda lp, e, d: (jnp.square(jnp.sum(lp)), None),
    "a running sum": lambda lp, e, d: (jnp.sum(jnp.cumsum(lp, axis=1) * d["weights"]), None),
    "a difference of neighbours": lambda lp, e, d: (jnp.sum(jnp.square(lp[:, 1:] - lp[:, :-1])), None),
    "a row's maximum": lambda lp, e, d: (jnp.sum(jnp.max(lp, axis=1)), None),
    "a sort": lambda lp, e, d: (jnp.sum(jnp.sort(lp, axis=1) * d["weights"]), None),
    "a column's number": lambda lp, e, d: (jnp.sum(lp * jnp.arange(lp.shape[1], dtype=jnp.float32)[None]), None),
    "an array of its own": lambda lp, e, d: (jnp.sum(lp[..., None] * jnp.asarray([1.0, 2.0])[None, None]), None),
}


@pytest.mark.parametrize("which", NOT_LOCAL)
def test_a_loss_that_pools_tokens_is_refused_in_one_pass_and_right_in_two(draw, which):
    sample = draw(5)
    run = partial(logprob_loss, NOT_LOCAL[which], *sample.arrays, data_of(sample.mask))
    with pytest.raises(ValueError, match=r"logprob_loss: loss: its gradient .*form='two_pass'"):
        run()
    direct = NOT_LOCAL[which](*token_logprobs(*sample.arrays), data_of(sample.mask))[0]
    np.testing.assert_allclose(run(form="two_pass")[0], direct, rtol=1e-6)


def test_a_local_loss_may_branch_convert_and_hold_scalars(draw):
    sample = draw(6)
    extra = jnp.ones((*sample.mask.shape, 4), jnp.float32)

    @jax.jit
    def loss(logprobs, entropy, data):
        best = jnp.max(data["extra"] * jnp.tanh(logprobs)[..., None], axis=-1)
        chosen = jnp.where(logprobs > -2.0, jnp.square(best), jax.nn.softplus(logprobs).astype(jnp.float32))
        return jnp.sum(data["weights"] * chosen), jnp.sum(data["weights"])

    data = data_of(sample.mask) | {"extra": extra}
    value = lambda head, form: logprob_loss(loss, sample.arrays[0], head, *sample.columns, data, form=form)[0]  # noqa: E731
    one, two = (jax.grad(value)(sample.arrays[1], form) for form in ("single_pass", "two_pass"))
    np.testing.assert_allclose(one, two, atol=2e-6)


def token_batch(sample):
    zeros, ids = np.zeros(sample.mask.shape, np.int32), np.broadcast_to(np.arange(3, dtype=np.int32)[:, None], (3, 7))
    data = data_of(sample.mask)
    masked = {name: jnp.where(data["mask"], data[name], 0.0) for name in ("advantages", "weights")}
    return TokenBatch(
        tokens=sample.tokens, parents=sample.parents, subtree_ends=zeros, positions=zeros, trajectory_ids=ids,
        turn_ids=zeros, sources=zeros.astype(np.int8), action_mask=sample.mask, policy_versions=zeros,
        behavior_logprobs=data["old"], old_logprobs=data["old"], ref_logprobs=data["ref"], **masked,
    )  # fmt: skip


@pytest.mark.parametrize("objective", [algorithms.grpo(beta=0.1), algorithms.dapo()], ids=["grpo", "dapo"])
def test_policy_loss_of_a_token_local_objective_fits_as_it_is(draw, objective):
    sample = draw(8)
    batch, loss = token_batch(sample), partial(policy_loss, objective)

    def value(head, form):
        return logprob_loss(loss, sample.arrays[0], head, *sample.columns, batch, form=form, chunk=6)

    one, two = (jax.value_and_grad(value, has_aux=True)(sample.arrays[1], form) for form in ("single_pass", "two_pass"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6), one, two)


def test_gspo_is_refused_in_one_pass(draw):
    sample = draw(8)
    loss = partial(policy_loss, algorithms.gspo())
    with pytest.raises(ValueError, match="a sequence ratio"):
        logprob_loss(loss, *sample.arrays, token_batch(sample))


def test_data_and_settings_that_do_not_fit_are_named(draw):
    sample = draw(0)
    data = data_of(sample.mask)
    with pytest.raises(ValueError, match=r"data\['old'\]: expected \[B, T"):
        logprob_loss(clipped, *sample.arrays, data | {"old": data["old"][0]})
    with pytest.raises(ValueError, match="logprob_loss: chunk"):
        logprob_loss(clipped, *sample.arrays, data, chunk=0)
    with pytest.raises(ValueError, match="form: expected"):
        logprob_loss(clipped, *sample.arrays, data, form="quick")
    with pytest.raises(ValueError, match="hidden"):
        logprob_loss(clipped, sample.arrays[0][0], *sample.arrays[1:], data)


@pytest.mark.parametrize("form", ["single_pass", "two_pass", "checkpointed"])
@pytest.mark.parametrize("devices", [2, 4])
def test_shard_map_gives_the_same_numbers_on_any_number_of_devices(draw, form, devices):
    sample = draw(11, rows=4)
    inputs = *sample[:2], sample.columns, data_of(sample.mask)
    (value, _), expected = gradients("single_pass", 9)(*inputs)

    def local(hidden, head, columns, data):
        loss = lambda *p: logprob_loss(clipped, *p, *columns, data, form=form, chunk=3, **SETTINGS)[0]  # noqa: E731
        part, grads = jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)
        return jax.lax.psum(part, "data"), grads

    rows = P("data")
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, P(), rows, rows), out_specs=(P(), (rows, P()))))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6), run(*inputs), (value, expected))


@pytest.mark.parametrize("form", ["single_pass", "two_pass"])
def test_rows_sharded_under_jit_and_pmap_give_the_same_numbers(draw, form):
    sample = draw(11, rows=4)
    inputs = *sample[:2], sample.columns, data_of(sample.mask)
    (value, _), expected = gradients("single_pass", 9)(*inputs)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    rows = P("data")
    found = gradients(form, 9)(*map(put, inputs, (rows, P(), rows, rows)))
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)  # noqa: E731
    jax.tree.map(close, (found[0][0], found[1]), (value, expected))

    each = lambda tree: jax.tree.map(lambda x: x.reshape(4, 1, *x.shape[1:]), tree)  # noqa: E731
    loss = lambda hidden, head, *rest: logprob_loss(clipped, hidden, head, *rest, form=form, **SETTINGS)[0]  # noqa: E731
    axes = (0, None, 0, 0, 0, 0)
    mapped = jax.pmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=axes, devices=jax.devices()[:4])
    part, (dhidden, dhead) = mapped(each(inputs[0]), inputs[1], *each(inputs[2]), each(inputs[3]))
    summed = part.sum(), (dhidden.reshape(sample.hidden.shape), dhead.sum(0))
    jax.tree.map(close, summed, (value, expected))


def test_rows_are_joined_on_each_device_and_not_across_devices(draw):
    """As many chunks as the fullest device needs, and no hidden state travels."""
    sample = draw(11, rows=8)
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("data",))
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    rows = P("data")
    inputs = (sample.hidden, sample.head, sample.columns, data_of(sample.mask))
    program = gradients("single_pass", 8).lower(*map(put, inputs, (rows, P(), rows, rows))).compile()
    crossing = hlo.collectives(program.as_text())
    assert {kind for kind, _ in crossing} == {"all-reduce"}
    assert max(size for _, size in crossing) <= sample.head.size


@pytest.mark.parametrize(("length", "vocabulary", "width", "chunk"), [(2048, 4096, 32, 128), (32768, 151936, 64, 1024)])
def test_p52_one_pass_holds_no_logits_of_the_whole_row_and_takes_three_matmuls(length, vocabulary, width, chunk):
    shape = jax.ShapeDtypeStruct
    ids, mask, floats = (shape((1, length), dtype) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    data = {"mask": mask, "old": floats, "ref": floats, "advantages": floats, "weights": floats}
    arrays = shape((1, length, width), jnp.float32), shape((vocabulary, width), jnp.float32), ids, ids, mask, data
    loss = lambda *a: logprob_loss(clipped, *a, chunk=chunk)[0]  # noqa: E731
    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    logits, linear = chunk * vocabulary * 4, (length + vocabulary) * width * 4
    assert program.memory_analysis().temp_size_in_bytes < 2 * 1.6 * logits + 3 * linear
    text = program.as_text()
    assert hlo.largest_buffer(text) <= chunk * vocabulary < length * vocabulary
    flops = hlo.matmul_flops(text, trips=length // chunk)
    assert flops / (2 * length * width * vocabulary) == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("divisor", [lambda shape: max(shape[1], 8), lambda shape: 2 if shape[1] < 8 else 1])
def test_a_loss_that_reads_a_shape_is_refused_at_the_shapes_it_is_given(divisor):
    tokens = jnp.zeros((1, 12), jnp.int32)
    hidden, head, mask = jnp.ones((1, 12, 4)), jnp.ones((7, 4)), jnp.ones((1, 12), bool)

    def loss(logprobs, entropy, data):
        del entropy, data
        return jnp.sum(logprobs) / divisor(logprobs.shape), None

    with pytest.raises(ValueError, match="how many tokens"):
        logprob_loss(loss, hidden, head, tokens, tokens - 1, mask, {}, chunk=6)
