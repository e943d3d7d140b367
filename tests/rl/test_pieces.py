"""Ratios, surrogates, KL: worked numbers and the gradients each promises."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import algorithms, corrections, kl, ratios, surrogates
from agentrl_jax.rl.objective import check_bounded

OLD = jnp.asarray([[-1, -2, 0], [-0.5, -1.5, -1]], jnp.float32)
NEW = jnp.asarray([[-0.7, -2, 0], [-0.2, -1.9, -1]], jnp.float32)
REF = jnp.asarray([[-1.1, -1.9, 0], [-0.5, -1.5, -1.3]], jnp.float32)
MASK = jnp.asarray([[True, True, False], [True, True, True]])
IDS = jnp.asarray([[0, 0, 2], [1, 1, 1]], jnp.int32)
ADVANTAGES = jnp.where(MASK, jnp.asarray([[1.0], [-1.0]]), 0.0)
SURROGATES = [
    surrogates.linear,
    surrogates.ppo_clip(),
    surrogates.ppo_clip(0.2, 0.28, 3.0),
    surrogates.cispo(),
    surrogates.cispo(0.3, 0.5),
    surrogates.sapo(),
]


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


def test_p40_the_negative_branch_grows_with_the_ratio_unless_it_is_bounded():
    ratio, advantage = jnp.asarray([5.0, 50.0, 500.0]), jnp.asarray([-1.0, -1.0, -1.0])
    close(-surrogates.ppo_clip()(ratio, advantage), [5, 50, 500])
    close(-surrogates.ppo_clip(dual=3.0)(ratio, advantage), [3, 3, 3])
    slope = jax.grad(lambda r: surrogates.ppo_clip(dual=3.0)(r, advantage).sum())(ratio)
    assert not np.any(slope)


def test_p40_stale_samples_ask_for_a_bound():
    clipped, dual = algorithms.grpo(), replace(algorithms.grpo(), surrogate=surrogates.ppo_clip(dual=3.0))
    check_bounded(clipped, 0)
    with pytest.raises(ValueError, match=r"lag 2 .*dual=3\.0"):
        check_bounded(clipped, 2)
    for bounded in (dual, replace(clipped, correction=corrections.truncated(2.0)), algorithms.cispo()):
        check_bounded(bounded, 2)


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


def test_sequence_clip_worked_numbers():
    ratio = ratios.sequence(NEW, OLD, MASK, IDS)
    close(-surrogates.ppo_clip(3e-4, 4e-4)(ratio, ADVANTAGES), [[-1.0004, -1.0004, 0], [0.9997] * 3])


def test_a_sequence_of_one_token_has_the_token_ratio():
    ids = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    close(ratios.sequence(NEW, OLD, MASK, ids), ratios.token(NEW, OLD, MASK, ids))


def test_sequence_token_has_the_value_of_the_sequence_and_a_gradient_of_its_own():
    close(ratios.sequence_token(NEW, OLD, MASK, IDS), ratios.sequence(NEW, OLD, MASK, IDS))
    slopes = jax.jacobian(lambda x: ratios.sequence_token(x, OLD, MASK, IDS).reshape(-1))(NEW).reshape(6, 6)
    close(slopes, np.diag(np.asarray(ratios.sequence(NEW, OLD, MASK, IDS)).reshape(-1)))


def test_sequence_token_equals_sequence_where_the_advantages_of_a_trajectory_are_equal():
    loss = lambda x, ratio: jnp.sum(ADVANTAGES * ratio(x, OLD, MASK, IDS))  # noqa: E731
    close(jax.grad(loss)(NEW, ratios.sequence_token), jax.grad(loss)(NEW, ratios.sequence))


@pytest.mark.parametrize("ratio", [ratios.token, ratios.sequence, ratios.sequence_token, ratios.on_policy])
def test_garbage_off_actions_reaches_neither_value_nor_gradient(ratio):
    for garbage in (-jnp.inf, jnp.nan):
        bad = jnp.where(MASK, NEW, garbage)
        value, grad = jax.value_and_grad(lambda x: ratio(x, OLD, MASK, IDS).sum())(bad)
        assert np.isfinite(value) and np.all(np.isfinite(grad)) and grad[0, 2] == 0


def test_on_policy_is_one_with_the_gradient_of_the_logprob():
    close(ratios.on_policy(NEW, OLD, MASK, IDS), MASK)
    close(jax.grad(lambda x: ratios.on_policy(x, OLD, MASK, IDS).sum())(NEW), MASK)


token_rows = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2), st.integers(-8, 8)), min_size=7, max_size=7)


@settings(max_examples=25, deadline=None)
@given(token_rows)
def test_pooled_adds_up_the_tokens_whose_ids_agree(row):
    ids, turns, values = (np.asarray(column) for column in zip(*row, strict=True))
    found = ratios.pooled(*(jnp.asarray(x[None], dtype) for x, dtype in ((values, "f4"), (ids, "i4"), (turns, "i4"))))
    expected = [sum(v for i, k, v in row if (i, k) == (one, turn)) for one, turn, _ in row]
    close(found[0], expected)


def test_p37_a_stored_kept_set_closes_the_gap_of_a_truncating_sampler():
    full = jnp.log(jnp.asarray([0.6, 0.3, 0.1], jnp.float32))
    kept = jnp.asarray([True, True, False])
    sampler = np.log(0.6 / 0.9)
    assert sampler - float(full[0]) == pytest.approx(0.105361, abs=1e-5)  # without it: a constant bias of -log 0.9
    found = ratios.renormalised(full, kept)
    close(found[:2], np.log([0.6 / 0.9, 0.3 / 0.9]))
    assert np.isneginf(found[2])
    slope = jax.grad(lambda logits: ratios.renormalised(jax.nn.log_softmax(logits), kept)[0])(full)
    close(slope, [1 / 3, -1 / 3, 0])


def test_cispo_worked_numbers_and_the_gradient_of_the_paper():
    surrogate = surrogates.cispo(1.0, 0.28)
    weight = jnp.asarray([[1.28, 1, 0], [1.28, 0.670320, 1]])
    close(surrogate(ratios.token(NEW, OLD, MASK, IDS), ADVANTAGES), weight * ADVANTAGES)
    grad = jax.grad(lambda x: -surrogate(ratios.token(x, OLD, MASK, IDS), ADVANTAGES).sum())(NEW)
    close(grad, [[-1.28, -1, 0], [1.28, 0.670320, 1]])
    paper = lambda x: -weight * ADVANTAGES * x  # noqa: E731
    close(paper(NEW), [[0.896, 2, 0], [-0.256, -1.273608, -1]])
    close(grad, jax.grad(lambda x: paper(x).sum())(NEW))


def test_cispo_names_what_is_above_one_and_not_the_cap():
    six, one = jnp.float32(6.0), jnp.float32(1.0)
    close([surrogates.cispo(high=4.0)(six, one), surrogates.cispo(high=5.0)(six, one)], [5, 6])
    close(surrogates.cispo()(jnp.float32(1e-3), one), 1e-3)  # no lower bound
    close(surrogates.cispo(0.2)(jnp.float32(1e-3), one), 0.8)


def test_sapo_worked_numbers():
    surrogate, one = surrogates.sapo(), jnp.float32(1.0)
    value = lambda ratio, advantage: surrogate(jnp.float32(ratio), advantage)  # noqa: E731
    close([value(1, one), value(1.5, one)], [2, 2.489837])
    close([-value(0.5, -one), -value(1, -one), -value(1.5, -one)], [1.415938, 1.904762, 2.393585])
    slope = jax.grad(surrogate)
    close([slope(one, one), slope(jnp.float32(1.5), one)], [1, 0.940015])
    close([-slope(one, -one), -slope(jnp.float32(1.5), -one)], [1, 0.934140])


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 3.0), st.floats(-2, 2), st.floats(0, 4))
def test_surrogates_are_positively_homogeneous(ratio, advantage, factor):
    r, a, c = (np.float32(x) for x in (ratio, advantage, factor))
    for surrogate in SURROGATES:
        close(surrogate(r, c * a), c * np.asarray(surrogate(r, a)), atol=1e-5)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_surrogates_have_the_slope_of_the_advantage_at_a_ratio_of_one(surrogate):
    for advantage in (0.7, -1.3):
        slope = jax.grad(surrogate)(jnp.float32(1.0), jnp.float32(advantage))
        assert float(slope) == pytest.approx(advantage, abs=1e-6)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_surrogates_stay_finite_off_actions(surrogate):
    value, slope = jax.value_and_grad(surrogate)(jnp.float32(0.0), jnp.float32(0.0))
    assert value == 0 and np.isfinite(slope)


@pytest.mark.parametrize(
    ("make", "settings_"),
    [
        (surrogates.ppo_clip, {"low": 0}),
        (surrogates.ppo_clip, {"low": 1.5}),
        (surrogates.ppo_clip, {"high": 0}),
        (surrogates.ppo_clip, {"dual": 1.0}),
        (surrogates.cispo, {"low": 0}),
        (surrogates.cispo, {"high": -1}),
        (surrogates.sapo, {"tau_pos": 0}),
        (surrogates.sapo, {"tau_neg": -1}),
    ],
)
def test_ranges_without_a_meaning_are_refused(make, settings_):
    with pytest.raises(ValueError, match=f"{make.__name__}: {next(iter(settings_))}"):
        make(**settings_)


def test_kl_worked_numbers():
    logprob, reference = jnp.float32(-1.0), jnp.float32(-1.5)
    for estimator, value, slope in (
        (kl.k1, 0.5, 1),
        (kl.k2, 0.125, 0.5),
        (kl.k3, 0.10653066, 0.39346934),
        (kl.k1_plus, 0.5, 0.5),
        (kl.k3_plus, 0.10653066, 0.5),
        (kl.straight_through(kl.k3, kl.k1), 0.10653066, 1),
    ):
        close(estimator(logprob, reference), value)
        close(jax.grad(estimator)(logprob, reference), slope)
    close(np.asarray(kl.k3(NEW, REF)) * np.asarray(MASK), [[0.070320, 0.0051709, 0], [0.0408182, 0.0918247, 0.0408182]])


CHANCES = np.asarray([0.6, 0.4], np.float32)
REFERENCE = np.asarray([0.4, 0.6], np.float32)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(kl.k1, 0.0), (kl.k2, 0.1946), (kl.k3, 0.2000), (kl.k1_plus, 0.1946), (kl.k3_plus, 0.1946)],
)
def test_p33_gradient_of_each_estimator_in_expectation(estimator, expected):
    def loss(logits):
        return jnp.sum(CHANCES * estimator(jax.nn.log_softmax(logits), jnp.log(REFERENCE)))

    close(jax.grad(loss)(jnp.log(CHANCES))[0], expected, atol=5e-5)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
@pytest.mark.parametrize("old", [[0.6, 0.4], [0.2, 0.8]])
def test_p33_the_ratio_makes_value_and_gradient_exact_from_any_policy(estimator, old):
    old = np.asarray(old, np.float32)

    def loss(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(old * kl.off_policy(estimator(logprobs, jnp.log(REFERENCE)), jnp.exp(logprobs) / old))

    value, slope = jax.value_and_grad(loss)(jnp.log(CHANCES))
    close(value, np.sum(CHANCES * np.log(CHANCES / REFERENCE)))
    close(slope[0], 0.1946, atol=5e-5)
