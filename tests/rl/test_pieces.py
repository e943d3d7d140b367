"""Ratios, surrogates, KL, corrections, rewards: worked numbers and the gradients each promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import corrections, kl, ratios, rewards, surrogates

OLD = jnp.asarray([[-1, -2, 0], [-0.5, -1.5, -1]], jnp.float32)
NEW = jnp.asarray([[-0.7, -2, 0], [-0.2, -1.9, -1]], jnp.float32)
REF = jnp.asarray([[-1.1, -1.9, 0], [-0.5, -1.5, -1.3]], jnp.float32)
MASK = jnp.asarray([[True, True, False], [True, True, True]])
IDS = jnp.asarray([[0, 0, 2], [1, 1, 1]], jnp.int32)
ADVANTAGES = jnp.where(MASK, jnp.asarray([[1.0], [-1.0]]), 0.0)


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


def test_token_ratio_and_clip_worked_numbers():
    ratio = ratios.token(NEW, OLD, MASK, IDS)
    close(ratio, [[1.349859, 1, 0], [1.349859, 0.670320, 1]])
    close(-surrogates.ppo_clip()(ratio, ADVANTAGES), [[-1.2, -1, 0], [1.349859, 0.8, 1]])
    close(-surrogates.ppo_clip(0.2, 0.28)(ratio, ADVANTAGES), [[-1.28, -1, 0], [1.349859, 0.8, 1]])
    close(surrogates.linear(ratio, ADVANTAGES), ratio * ADVANTAGES)


def test_dual_clip_bounds_negative_advantages_only():
    far, one = jnp.float32(5.0), jnp.float32(1.0)
    close(-surrogates.ppo_clip()(far, -one), 5.0)
    close(-surrogates.ppo_clip(dual=3.0)(far, -one), 3.0)
    close(surrogates.ppo_clip(dual=3.0)(far, one), 1.2)


def test_sequence_ratio_is_the_geometric_mean_of_one_trajectory():
    close(ratios.sequence(NEW, OLD, MASK, IDS), [[1.161834, 1.161834, 0], [0.967216] * 3])
    packed = [x.reshape(1, 6) for x in (NEW, OLD, MASK, IDS)]
    close(ratios.sequence(*packed).reshape(2, 3), ratios.sequence(NEW, OLD, MASK, IDS))


def test_sequence_ratio_does_not_mind_interleaved_trajectories():
    ids, mask = jnp.asarray([[5, 2, 5, 2]], jnp.int32), jnp.ones((1, 4), jnp.bool_)
    drift = jnp.asarray([[0.2, -0.4, 0.4, 0.0]], jnp.float32)
    close(jnp.log(ratios.sequence(drift, jnp.zeros_like(drift), mask, ids)), [[0.3, -0.2, 0.3, -0.2]])


def test_p35_sequence_ratio_is_a_mean_and_not_a_product():
    gap = jnp.full((1, 100), 0.012, jnp.float32)
    args = (gap, jnp.zeros_like(gap), jnp.ones((1, 100), jnp.bool_), jnp.zeros((1, 100), jnp.int32))
    close(ratios.sequence(*args)[0, 0], np.exp(0.012))


@pytest.mark.parametrize("ratio", [ratios.token, ratios.sequence, ratios.on_policy])
def test_garbage_off_actions_reaches_neither_value_nor_gradient(ratio):
    bad = jnp.where(MASK, NEW, -jnp.inf)
    value, grad = jax.value_and_grad(lambda x: ratio(x, OLD, MASK, IDS).sum())(bad)
    assert np.isfinite(value) and np.all(np.isfinite(grad)) and grad[0, 2] == 0


def test_on_policy_is_one_with_the_gradient_of_the_logprob():
    close(ratios.on_policy(NEW, OLD, MASK, IDS), MASK)
    close(jax.grad(lambda x: ratios.on_policy(x, OLD, MASK, IDS).sum())(NEW), MASK)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 3.0), st.floats(-2, 2), st.floats(0, 4))
def test_surrogates_are_positively_homogeneous(ratio, advantage, factor):
    r, a, c = (np.float32(x) for x in (ratio, advantage, factor))
    for surrogate in (surrogates.linear, surrogates.ppo_clip(), surrogates.ppo_clip(0.2, 0.28, 3.0)):
        close(surrogate(r, c * a), c * np.asarray(surrogate(r, a)), atol=1e-5)


@pytest.mark.parametrize("given_range", [{"low": 0}, {"low": 1.5}, {"high": 0}, {"dual": 1.0}])
def test_clip_ranges_without_a_meaning_are_refused(given_range):
    with pytest.raises(ValueError, match=next(iter(given_range))):
        surrogates.ppo_clip(**given_range)


def test_kl_worked_numbers():
    logprob, reference = jnp.float32(-1.0), jnp.float32(-1.5)
    for estimator, value, slope in ((kl.k1, 0.5, 1), (kl.k2, 0.125, 0.5), (kl.k3, 0.10653066, 0.39346934)):
        close(estimator(logprob, reference), value)
        close(jax.grad(estimator)(logprob, reference), slope)
    close(np.asarray(kl.k3(NEW, REF)) * np.asarray(MASK), [[0.070320, 0.0051709, 0], [0.0408182, 0.0918247, 0.0408182]])


@pytest.mark.parametrize(("estimator", "expected"), [(kl.k1, 0.0), (kl.k2, 0.1946), (kl.k3, 0.2000)])
def test_p33_gradient_of_each_estimator_in_expectation(estimator, expected):
    chances, reference = np.asarray([0.6, 0.4], np.float32), jnp.log(jnp.asarray([0.4, 0.6], jnp.float32))

    def loss(logits):
        return jnp.sum(chances * estimator(jax.nn.log_softmax(logits), reference))

    close(jax.grad(loss)(jnp.log(jnp.asarray(chances)))[0], expected, atol=5e-5)


def test_truncated_correction_worked_numbers_and_no_gradient():
    train, infer = jnp.asarray([[-1, -2, -0.5, 7]], jnp.float32), jnp.asarray([[-2, -1, -0.5, 0]], jnp.float32)
    mask, ids = jnp.asarray([[True, True, True, False]]), jnp.zeros((1, 4), jnp.int32)
    close(corrections.truncated(100.0)(train, infer, mask, ids), [[2.718282, 0.367879, 1, 1]])
    close(corrections.truncated(2.0)(train, infer, mask, ids), [[2.0, 0.367879, 1, 1]])
    assert not np.any(jax.grad(lambda x: corrections.truncated(2.0)(x, infer, mask, ids).sum())(train))


def test_lexicographic_rewards():
    violated = jnp.asarray([True, False, False, False])
    outcome, quality = jnp.asarray([1.0, 0.0, 1.0, 1.0]), jnp.asarray([1.0, 1.0, 0.0, 1.0])
    close(rewards.lexicographic(violated, outcome, quality), [0, 0, 1, 1.05])
    close(rewards.lexicographic(violated, outcome, quality, broken=-1.0)[0], -1)
    with pytest.raises(ValueError, match="broken"):
        rewards.lexicographic(violated, outcome, quality, broken=0.5)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.99))
def test_no_quality_reverses_a_verdict(one, other, partial):
    score = lambda violated, outcome, quality: float(  # noqa: E731
        rewards.lexicographic(np.bool_(violated), np.float32(outcome), np.float32(quality))
    )
    assert score(False, 1, one) > score(False, partial, other) >= score(True, 1, other)
