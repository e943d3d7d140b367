"""Weights, credit and the loss as a whole: aggregation numbers, exclusions, compositions."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl import algorithms, corrections, kl, weights
from agentrl_jax.rl.imitation import imitation_loss
from agentrl_jax.rl.objective import Objective, assign, policy_loss

OLD = jnp.asarray([[-1, -2, 0], [-0.5, -1.5, -1]], jnp.float32)
NEW = jnp.asarray([[-0.7, -2, 0], [-0.2, -1.9, -1]], jnp.float32)
REF = jnp.asarray([[-1.1, -1.9, 0], [-0.5, -1.5, -1.3]], jnp.float32)
MASK = np.asarray([[True, True, False], [True, True, True]])
IDS = np.asarray([[0, 0, 2], [1, 1, 1]], np.int32)


def make_batch(mask, ids, behavior, **fields):
    zeros, floats = np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.float32)
    return TokenBatch(
        tokens=zeros,
        parents=zeros - 1,
        subtree_ends=zeros,
        positions=zeros,
        trajectory_ids=jnp.asarray(ids),
        turn_ids=zeros,
        sources=zeros.astype(np.int8),
        action_mask=jnp.asarray(mask),
        behavior_logprobs=behavior,
        advantages=fields.pop("advantages", floats),
        weights=fields.pop("weights", floats),
        policy_versions=zeros,
        **fields,
    )


def fixture(weigh, **fields):
    weight = weigh(jnp.asarray(MASK), jnp.asarray(IDS), jnp.zeros_like(IDS), num_trajectories=2)
    advantages = np.where(MASK, np.float32([[1.0], [-1.0]]), np.float32(0))
    return make_batch(MASK, IDS, OLD, advantages=advantages, weights=weight, **fields)


def loss_of(objective, batch, logprobs=NEW):
    return float(policy_loss(objective, logprobs, None, batch)[0])


@pytest.mark.parametrize(
    ("weigh", "expected"),
    [
        (weights.sequence_mean, -0.0250235),
        (weights.token_mean, 0.1899718),
        (weights.constant(1.0), 0.4749294),
        (weights.constant(4.0), 0.1187324),
    ],
)
def test_aggregation_worked_numbers(weigh, expected):
    assert loss_of(algorithms.grpo(beta=0.0), fixture(weigh)) == pytest.approx(expected, abs=1e-6)


def test_whole_objectives_worked_numbers():
    assert loss_of(algorithms.grpo(), fixture(weights.sequence_mean, ref_logprobs=REF)) == pytest.approx(
        -0.0231122, abs=1e-6
    )
    assert loss_of(algorithms.dapo(), fixture(weights.token_mean)) == pytest.approx(0.1739718, abs=1e-6)


def test_p25_length_bias_of_each_aggregation():
    mask = np.arange(8)[None] < np.asarray([[2], [8]])
    ids = np.where(mask, np.asarray([[0], [1]]), 2).astype(np.int32)
    for weigh, ratio in ((weights.sequence_mean, 4.0), (weights.token_mean, 1.0), (weights.constant(8.0), 1.0)):
        w = np.asarray(weigh(jnp.asarray(mask), jnp.asarray(ids), jnp.zeros_like(ids), num_trajectories=2))
        assert w[0, 0] / w[1, 0] == pytest.approx(ratio)


rows = st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=4, max_size=4)


@settings(max_examples=25, deadline=None)
@given(rows, st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 2**24 - 1))
def test_excluding_equals_deleting(ids, keep, bits):
    ids = np.asarray(ids, np.int32)
    mask = (np.asarray([bits >> i & 1 for i in range(ids.size)], bool).reshape(ids.shape)) & (ids < 4)
    kept = np.append(np.asarray(keep), False)
    without = mask & kept[ids]
    for weigh in (weights.token_mean, weights.sequence_mean, weights.constant(5.0)):
        call = partial(weigh, num_trajectories=4)
        excluded = call(jnp.asarray(mask), jnp.asarray(ids), jnp.asarray(ids), keep=jnp.asarray(keep))
        deleted = call(jnp.asarray(without), jnp.asarray(ids), jnp.asarray(ids))
        np.testing.assert_allclose(excluded, deleted, rtol=1e-6)
        total = float(np.asarray(excluded).sum())
        if weigh is not weights.token_mean and without.any():
            lengths = np.asarray([(without & (ids == n)).sum() for n in range(4)])
            pooled = 1.0 if weigh is weights.sequence_mean else lengths.sum() / ((lengths > 0).sum() * 5.0)
            assert total == pytest.approx(pooled, abs=1e-5)
        elif without.any():
            assert total == pytest.approx(1.0, abs=1e-5)
        else:
            assert total == 0


REWARDS = np.asarray([[1, 0, 1, 0], [0, 0, 1, 7], [5, 5, 5, 5]], np.float32)
VALID = np.asarray([[True] * 4, [True, True, True, False], [True] * 4])


def one_token_each(order):
    ids = np.asarray(order, np.int32)[:, None]
    return make_batch(np.ones(ids.shape, bool), ids, np.zeros(ids.shape, np.float32))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_p27_p29_grouping_is_by_id_and_not_by_position(seed):
    order = np.random.default_rng(seed).permutation(12)
    objective = algorithms.dr_grpo(4.0)
    filled = jax.jit(partial(assign, objective))(one_token_each(order), REWARDS, VALID, VALID)
    expected = np.asarray([0.5, -0.5, 0.5, -0.5, -1 / 3, -1 / 3, 2 / 3, 0, 0, 0, 0, 0], np.float32)
    np.testing.assert_allclose(filled.advantages[:, 0], expected[order], atol=1e-6)
    assert not np.any(np.asarray(filled.advantages[:, 0])[order >= 8])
    np.testing.assert_allclose(filled.weights[:, 0], np.where(order == 7, 0, 1 / 44), rtol=1e-5)


def test_an_invalid_trajectory_is_never_kept_and_shared_tokens_get_nothing():
    batch = one_token_each([0, 1, 2, 3])
    batch = batch._replace(trajectory_ids=jnp.asarray([[0], [1], [2], [4]], jnp.int32))
    valid = np.asarray([[True, True, False, True]])
    filled = assign(algorithms.dapo(), batch, REWARDS[:1], valid, np.ones((1, 4), bool))
    np.testing.assert_allclose(filled.weights[:, 0], [0.5, 0.5, 0, 0])
    assert not np.any(np.asarray(filled.advantages)[2:])


def test_p31_constant_groups_push_no_gradient_without_kl_and_only_the_kl_with_it():
    constant = np.full((1, 2), 0.1, np.float32)
    everyone = np.ones((1, 2), bool)
    batch = make_batch(MASK, IDS, OLD, ref_logprobs=REF)
    for objective in (algorithms.grpo(beta=0.0), algorithms.dapo(), algorithms.rloo(), algorithms.dr_grpo(8.0)):
        filled = assign(objective, batch, constant, everyone, everyone)
        assert not np.any(jax.grad(lambda x, o=objective, b=filled: policy_loss(o, x, None, b)[0])(NEW))
        assert np.asarray(filled.weights).any()  # they do count in the denominator
    anchored = algorithms.grpo(beta=0.04)
    filled = assign(anchored, batch, constant, everyone, everyone)
    found = jax.grad(lambda x: policy_loss(anchored, x, None, filled)[0])(NEW)
    alone = jax.grad(lambda x: 0.04 * jnp.sum(filled.weights * jnp.where(MASK, kl.k3(x, REF), 0.0)))(NEW)
    np.testing.assert_allclose(found, alone, atol=1e-7)


def test_decoupled_correction_worked_number_and_bypass():
    behavior = jnp.asarray([[-2, -1, -0.5]], jnp.float32)
    old = jnp.asarray([[-1, -2, -0.5]], jnp.float32)
    new = jnp.asarray([[-0.7, -2, -0.6]], jnp.float32)
    objective = Objective(
        **{**vars(algorithms.dapo(high=0.2)), "advantage": lambda r, v: r, "correction": corrections.truncated(2.0)}
    )
    batch = make_batch(np.ones((1, 3), bool), np.zeros((1, 3), np.int32), behavior, old_logprobs=old)
    one, yes = np.ones((1, 1), np.float32), np.ones((1, 1), bool)
    assert loss_of(objective, assign(objective, batch, one, yes, yes), new) == pytest.approx(-1.224239, abs=1e-6)
    bare = batch._replace(old_logprobs=None)
    with pytest.raises(ValueError, match="old_logprobs"):
        assign(objective, bare, one, yes, yes)
    bypass = replace(objective, correction=None)
    assert loss_of(bypass, assign(bypass, bare, one, yes, yes), new) == pytest.approx(-0.824239, abs=1e-6)


def test_metrics_are_sums_and_maxima_of_counted_tokens():
    _, figures = policy_loss(algorithms.dapo(), NEW, -NEW, fixture(weights.token_mean))
    total, count = figures.sums["clip_fraction"]
    assert (float(total), float(count)) == (2.0, 5.0)  # +1 above 1.28, -1 below 0.8
    assert float(figures.maxima["ratio_deviation_max"]) == pytest.approx(0.349859, abs=1e-5)
    assert float(figures.sums["entropy"][0]) == pytest.approx(4.8 + 1.0, abs=1e-5)


def test_contradictions_are_refused_before_anything_runs():
    parts = vars(algorithms.dapo())
    with pytest.raises(ValueError, match="beta"):
        Objective(**{**parts, "beta": 0.1})
    with pytest.raises(ValueError, match="no effect"):
        Objective(**{**parts, "kl": kl.k3})
    with pytest.raises(ValueError, match="needs_entropy"):
        policy_loss(Objective(**{**parts, "entropy_coef": 0.1}), NEW, None, fixture(weights.token_mean))
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(algorithms.grpo(), NEW, None, fixture(weights.token_mean))


def test_imitation_learns_from_actions_only():
    mask = np.asarray([[True, True, False, False, True]])
    logprobs = jnp.asarray([[-0.5, -0.1, -2, -3, -0.2]], jnp.float32)
    ids = np.zeros((1, 5), np.int32)
    weight = weights.token_mean(jnp.asarray(mask), jnp.asarray(ids), jnp.asarray(ids), num_trajectories=1)
    batch = make_batch(mask, ids, logprobs, weights=weight)
    loss, figures = imitation_loss(logprobs, None, batch)
    assert float(loss) == pytest.approx(0.8 / 3, abs=1e-6)
    assert float(figures.sums["mean_logprob"][0]) == pytest.approx(-0.8, abs=1e-6)
    assert np.asarray(jax.grad(lambda x: imitation_loss(x, None, batch)[0])(logprobs))[0, 2:4].tolist() == [0, 0]
