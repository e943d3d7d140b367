"""The same numbers under jit on one device, pmap, shard_map and jit with sharded rows; the wrong sum is refused."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl import advantages, algorithms, ratios, weights
from agentrl_jax.rl.imitation import mixture_weights
from agentrl_jax.rl.objective import assign, policy_loss
from agentrl_jax.rl.parallel import value_and_grad
from agentrl_jax.rl.preferences import dpo, kto_baseline, reference_margins, trajectory_logprobs
from agentrl_jax.rl.types import Metrics

DEVICES, ROWS, LENGTH, GROUPS, GROUP = 8, 16, 6, 3, 4
SETUPS = ["pmap", "shard_map", "shard_map unchecked", "jit sharded"]
# Everything that could need to know of other devices: whitening, turns, a correction, both ratios of the KL.
OBJECTIVE = replace(
    algorithms.m_grpo(beta=0.1),
    correction=algorithms.decoupled_ppo().correction,
    whiten=advantages.global_whitened,
    kl_ratio=ratios.token,
)


def mesh(devices=DEVICES):
    return Mesh(np.asarray(jax.devices()[:devices]), ("data",))


@cache
def step():
    """(params, batch, rewards, valid, keep): rows of one trajectory each, some empty."""
    rng = np.random.default_rng(5)
    ids = np.where(rng.random((ROWS, LENGTH)) < 0.8, np.arange(ROWS)[:, None], GROUPS * GROUP)
    ids = np.minimum(ids, GROUPS * GROUP).astype(np.int32)
    floats = [(-1 + 0.2 * rng.normal(size=ids.shape)).astype(np.float32) for _ in range(3)]
    zeros = np.zeros(ids.shape, np.int32)
    batch = TokenBatch(
        **dict.fromkeys(("parents", "subtree_ends", "positions", "policy_versions"), zeros),
        tokens=rng.integers(0, 9, ids.shape).astype(np.int32),
        trajectory_ids=ids,
        turn_ids=np.tile(np.arange(LENGTH, dtype=np.int32) // 2, (ROWS, 1)),
        sources=zeros.astype(np.int8),
        action_mask=(ids < GROUPS * GROUP) & (rng.random(ids.shape) < 0.8),
        behavior_logprobs=floats[0],
        advantages=np.zeros(ids.shape, np.float32),
        weights=np.zeros(ids.shape, np.float32),
        old_logprobs=floats[1],
        ref_logprobs=floats[2],
    )
    rewards = rng.random((GROUPS, GROUP)).astype(np.float32)
    valid = rng.random(rewards.shape) < 0.9
    keep = rng.random(rewards.shape) < 0.9
    params = {"table": rng.normal(size=9).astype(np.float32), "shift": np.float32(0.1)}
    return params, batch, rewards, valid, keep


def loss(params, batch):
    logprobs = -jax.nn.softplus(params["table"][batch.tokens] + params["shift"])
    return policy_loss(OBJECTIVE, jnp.where(batch.action_mask, logprobs, 0.0), None, batch)


def whole(params, batch, *credit):
    return jax.value_and_grad(loss, has_aux=True)(params, assign(OBJECTIVE, batch, *credit))


def part(params, batch, *credit):
    batch = assign(OBJECTIVE, batch, *credit, axis_name="data")
    return value_and_grad(loss, axis_name="data")(params, batch)


def split(tree, devices):
    return jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), tree)


def spread(setup, function, local, *same, devices=DEVICES):
    """`function(local, *same)` with the rows of `local` spread over devices; what comes back is one device's."""
    if setup == "pmap":
        chosen = jax.devices()[:devices]
        mapped = jax.pmap(function, axis_name="data", in_axes=(0, *[None] * len(same)), devices=chosen)
        return jax.tree.map(lambda x: x[-1], mapped(split(local, devices), *same))
    specs = (P("data"), *[P()] * len(same))
    checked = setup == "shard_map"
    mapped = jax.shard_map(function, mesh=mesh(devices), in_specs=specs, out_specs=P(), check_vma=checked)
    return jax.jit(mapped)(local, *same)


def agree(found, expected):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6), found, expected)


@cache
def expected():
    return jax.device_get(jax.jit(whole)(*step()))


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_loss_metrics_and_gradient_are_those_of_one_device(setup, devices):
    params, batch, *credit = step()
    if setup == "jit sharded":
        found = jax.jit(whole)(params, jax.device_put(batch, NamedSharding(mesh(devices), P("data"))), *credit)
    else:
        found = spread(
            setup, lambda rows, *same: part(same[0], rows, *same[1:]), batch, params, *credit, devices=devices
        )
    agree(found, expected())
    assert max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(found[1])) > 1e-2


@pytest.mark.parametrize("setup", ["pmap", "shard_map", "shard_map unchecked"])
@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "inside jit"])
def test_a_loss_that_adds_up_by_itself_is_refused(setup, hidden):
    def summed(params, batch):
        value, metrics = loss(params, batch)
        return lax.psum(value, "data") / DEVICES, metrics

    wrong = jax.jit(summed) if hidden else summed
    with pytest.raises(ValueError, match=r"value_and_grad: loss: .*axis 'data'"):
        spread(setup, lambda rows, params: value_and_grad(wrong, axis_name="data")(params, rows), *reversed(step()[:2]))


@pytest.mark.parametrize("setup", ["pmap", "shard_map", "shard_map unchecked"])
def test_a_denominator_may_be_a_sum_over_the_axis(setup):
    def mean(params, rows):
        count = lax.psum(jnp.sum(rows > 0).astype(jnp.float32), "data")
        return jnp.sum(params * rows) / count, Metrics({}, {})

    rows = jnp.arange(16, dtype=jnp.float32)
    (value, _), slope = spread(setup, lambda x, p: value_and_grad(mean, axis_name="data")(p, x), rows, jnp.float32(2.0))
    assert (float(value), float(slope)) == pytest.approx((16.0, 8.0))


def test_why_the_sum_is_refused():
    """Under pmap a sum inside leaves each device a gradient of its own; summed, they are 8 times the true one."""
    rows = jnp.arange(16, dtype=jnp.float32)
    inside = jax.grad(lambda p, x: lax.psum(jnp.sum(jnp.square(p * x)), "data"))
    found = jax.pmap(inside, axis_name="data", in_axes=(None, 0))(jnp.float32(1.0), rows.reshape(8, 2))
    true = 2 * float(jnp.sum(jnp.square(rows)))
    assert float(found.sum()) == pytest.approx(8 * true)
    assert len(np.unique(np.asarray(found))) > 1


@pytest.mark.parametrize("setup", ["pmap", "shard_map"])
def test_weights_carry_the_counts_of_all_devices(setup):
    _, batch, _, valid, _ = step()
    rows = (batch.action_mask, batch.trajectory_ids, batch.turn_ids)
    members, keep = GROUPS * GROUP, valid.reshape(-1)
    sets = np.arange(members, dtype=np.int32) % 2

    def everything(rows, keep, sets, axis_name=None):
        count = partial(dict, num_trajectories=members, axis_name=axis_name)
        each = (weights.token_mean, weights.sequence_mean, weights.constant(5.0), weights.nested_turn_mean)
        mixed = mixture_weights(*rows[:2], sets, shares=(0.2, 0.8), **count())
        return (*(weigh(*rows, keep=keep, **count()) for weigh in each), mixed)

    def scored(rows, keep, sets, axis_name=None):
        """A number that no permutation of rows leaves alone, summed over the axis."""
        place = 1.0 + rows[1].astype(jnp.float32)
        score = sum(jnp.sum(w * w * place) for w in everything(rows, keep, sets, axis_name))
        return score if axis_name is None else lax.psum(score, axis_name)

    found = spread(setup, partial(scored, axis_name="data"), rows, keep, sets)
    agree(found, jax.jit(scored)(tuple(map(jnp.asarray, rows)), keep, sets))


@pytest.mark.parametrize("setup", ["pmap", "shard_map"])
def test_kto_baseline_is_the_mean_over_all_devices(setup):
    ratios_ = jnp.asarray(np.random.default_rng(2).normal(0.2, 1.0, 16), jnp.float32)
    agree(spread(setup, partial(kto_baseline, axis_name="data"), ratios_), kto_baseline(ratios_))


@pytest.mark.parametrize("setup", ["pmap", "shard_map"])
def test_preference_pairs_on_their_devices_are_those_of_one_device(setup):
    params, batch, *_ = step()
    reference = np.random.default_rng(3).normal(-4.0, 1.0, ROWS).astype(np.float32)

    def loss(params, rows):
        tokens, mask, reference = rows
        ids = jnp.broadcast_to(jnp.arange(len(tokens), dtype=jnp.int32)[:, None], tokens.shape)
        logprobs = -jax.nn.softplus(params["table"][tokens] + params["shift"])
        sums, _ = trajectory_logprobs(logprobs, mask, ids, num_trajectories=len(tokens))
        margins = reference_margins(sums[::2], sums[1::2], reference[::2], reference[1::2])
        return jnp.sum(dpo(margins)) / (ROWS // 2), Metrics({}, {})

    rows = (batch.tokens, batch.action_mask, reference)
    found = spread(setup, lambda rows, params: value_and_grad(loss, axis_name="data")(params, rows), rows, params)
    agree(found, jax.jit(jax.value_and_grad(loss, has_aux=True))(params, jax.tree.map(jnp.asarray, rows)))
