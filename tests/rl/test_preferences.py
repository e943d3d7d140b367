"""Preference losses: worked numbers, identities between them, and the trap of observation tokens in the sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import preferences

CHOSEN, REJECTED = jnp.float32(-12.0), jnp.float32(-20.0)
REF_CHOSEN, REF_REJECTED = jnp.float32(-13.0), jnp.float32(-19.0)
MEANS = (CHOSEN / 4, REJECTED / 5)  # 4 and 5 action tokens
DELTA = preferences.reference_margins(CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


def log1p_exp(x):
    return np.log1p(np.exp(x))


def test_dpo_worked_numbers():
    close(DELTA, 2.0)
    close(preferences.dpo(DELTA, beta=0.1), 0.598139)
    close(preferences.dpo(DELTA, beta=0.5), 0.313262)
    loss = lambda w: preferences.dpo(preferences.reference_margins(w, REJECTED, REF_CHOSEN, REF_REJECTED))  # noqa: E731
    close(jax.grad(loss)(CHOSEN), -0.045017)


def test_observation_tokens_in_the_sums_would_be_the_environments_noise():
    policy = jnp.asarray([[-12.0, -5.0, -20.0, -30.0]])
    reference = jnp.asarray([[-13.0, -7.0, -19.0, -24.0]])
    ids, actions = jnp.asarray([[0, 0, 1, 1]], jnp.int32), jnp.asarray([[True, False, True, False]])

    def loss(mask):
        (w, l), (ref_w, ref_l) = (  # noqa: E741
            preferences.trajectory_logprobs(x, mask, ids, num_trajectories=2)[0] for x in (policy, reference)
        )
        return preferences.dpo(preferences.reference_margins(w, l, ref_w, ref_l))

    close(loss(actions), 0.598139)
    close(loss(jnp.ones_like(actions)), 0.313262)  # a margin of 10, none of it the policy's doing


def test_trajectory_logprobs_sum_and_count_actions_only():
    logprobs = jnp.asarray([[-1.0, jnp.nan, -2.0, -4.0], [-8.0, -16.0, jnp.inf, -32.0]])
    mask = jnp.asarray([[True, False, True, True], [True, True, False, True]])
    ids = jnp.asarray([[0, 0, 0, 2], [1, 1, 4, 4]], jnp.int32)

    def sums(x):
        return preferences.trajectory_logprobs(x, mask, ids, num_trajectories=4)

    found, counts = sums(logprobs)
    close(found, [-3, -24, -4, 0])  # id 4 is shared: it belongs to no one
    close(counts, [2, 2, 1, 0])
    slopes = jax.grad(lambda x: sums(x)[0].sum())(logprobs)
    close(slopes, [[1, 0, 1, 1], [1, 1, 0, 0]])


def test_menu_worked_numbers():
    close(preferences.hinge(DELTA, beta=0.1), 0.8)
    close(preferences.ipo(DELTA, beta=0.1), 9.0)  # (2 - 5)^2
    per_token = preferences.reference_margins(*MEANS, REF_CHOSEN / 4, REF_REJECTED / 5)
    close(preferences.ipo(per_token, beta=0.1), (0.25 + 0.2 - 5.0) ** 2)
    close(preferences.simpo(*MEANS), log1p_exp(-(2.5 * 1.0 - 1.375)))
    close(preferences.orpo(*MEANS), 0.304602)


def test_orpo_second_route_and_certainty():
    odds = lambda mean: np.exp(mean) / (1 - np.exp(mean))  # noqa: E731
    close(preferences.orpo(*MEANS), log1p_exp(-np.log(odds(-3.0) / odds(-4.0))))
    value, slope = jax.value_and_grad(preferences.orpo)(jnp.float32(0.0), jnp.float32(-1.0))
    assert np.isfinite(value) and np.isfinite(slope)


def test_kto_worked_numbers():
    ratios, desirable = jnp.asarray([1.0, -1.0]), jnp.asarray([True, False])
    z = preferences.kto_baseline(jnp.asarray([0.5, 0.1]))
    close(z, 0.3)
    expected = [1 - 1 / (1 + np.exp(-0.1 * 0.7)), 1 - 1 / (1 + np.exp(-0.1 * 1.3))]
    close(preferences.kto(ratios, desirable, z), expected)
    weighted = preferences.kto(ratios, desirable, z, desirable_weight=2.0, undesirable_weight=3.0)
    close(weighted, np.asarray(expected) * [2, 3])
    close(preferences.kto_baseline(jnp.asarray([-2.0, 1.0])), 0.0)


def test_kto_draws_desirable_up_undesirable_down_and_not_through_the_baseline():
    desirable = jnp.asarray([True, False])
    slopes = jax.grad(lambda x: preferences.kto(x, desirable, preferences.kto_baseline(x)).sum())(
        jnp.asarray([0.2, 0.4])
    )
    assert slopes[0] < 0 < slopes[1]
    fixed = jax.grad(lambda x: preferences.kto(x, desirable, jnp.float32(0.3)).sum())(jnp.asarray([0.2, 0.4]))
    close(slopes, fixed)


def test_bradley_terry_worked_numbers():
    better, worse = jnp.float32(1.2), jnp.float32(0.4)
    close(preferences.bradley_terry(better, worse), log1p_exp(-0.8))
    close(preferences.bradley_terry(better, worse, margin=0.5, centring=0.01), log1p_exp(-0.3) + 0.01 * 1.6**2)
    margins = jnp.asarray([0.0, 0.5])
    found = preferences.bradley_terry(jnp.asarray([1.2, 1.2]), jnp.asarray([0.4, 0.4]), margin=margins)
    close(found, [log1p_exp(-0.8), log1p_exp(-0.3)])


def logit(p):
    return jnp.log(jnp.asarray(p) / (1 - jnp.asarray(p)))


def test_soft_labels_worked_numbers():
    close(preferences.bce(jnp.float32(0.0), jnp.float32(5 / 8)), 0.693147)
    close(preferences.bce(logit([0.6, 0.8]), jnp.asarray([0.5, 0.9])).mean(), 0.5376656)
    assert np.all(np.isfinite(preferences.bce(jnp.asarray([-200.0, 200.0]), jnp.asarray([1.0, 0.0]))))


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 0.95))
def test_a_soft_label_is_the_minimum(target):
    target = jnp.float32(target)
    close(jax.grad(preferences.bce)(logit(target), target), 0.0, atol=2e-6)


@settings(max_examples=25, deadline=None)
@given(st.floats(-8, 8), st.floats(0.05, 1.0), st.floats(0.0, 0.45))
def test_robust_dpo_is_unbiased_under_flipped_labels_and_smoothed_is_the_expectation(margin, beta, flip):
    margin = jnp.float32(margin)
    clean = preferences.dpo(margin, beta=beta)
    robust = lambda m: preferences.dpo_robust(m, beta=beta, flip=flip)  # noqa: E731
    close((1 - flip) * robust(margin) + flip * robust(-margin), clean, atol=1e-4)
    smoothed = (1 - flip) * clean + flip * preferences.dpo(-margin, beta=beta)
    close(preferences.dpo_smoothed(margin, beta=beta, flip=flip), smoothed)


def test_the_reference_is_frozen_and_swapping_a_pair_turns_the_margin_round():
    args = (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
    close(jax.grad(preferences.reference_margins, argnums=(0, 1, 2, 3))(*args), [1, -1, 0, 0])
    close(preferences.reference_margins(REJECTED, CHOSEN, REF_REJECTED, REF_CHOSEN), -2.0)


@pytest.mark.parametrize("loss", [preferences.dpo, preferences.ipo, preferences.hinge])
def test_losses_of_a_margin_fall_as_it_grows_towards_their_target(loss):
    values = np.asarray(loss(jnp.linspace(-4.0, 4.9, 20), beta=0.1))
    assert np.all(np.diff(values) < 0)
    with pytest.raises(ValueError, match=f"{loss.__name__}: beta"):
        loss(DELTA, beta=0.0)


@pytest.mark.parametrize("loss", [preferences.dpo_smoothed, preferences.dpo_robust])
def test_a_flip_of_half_the_labels_is_refused(loss):
    with pytest.raises(ValueError, match="flip"):
        loss(DELTA, flip=0.5)
