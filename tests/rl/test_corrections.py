"""Corrections for the sampler's mismatch: worked numbers, loops over trajectories, what is reported before clipping."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl import algorithms, corrections, objective, weights

TRAIN = jnp.asarray([[-1, -2, -0.5, 7]], jnp.float32)
INFER = jnp.asarray([[-2, -1, -0.5, 0]], jnp.float32)
MASK = jnp.asarray([[True, True, True, False]])
IDS = jnp.zeros((1, 4), jnp.int32)
ALL = [
    corrections.truncated(),
    corrections.masked(),
    corrections.sequence(),
    corrections.sequence_masked(),
    corrections.geometric(0.5, 2.0),
    corrections.veto(0.3),
    corrections.product(corrections.truncated(), corrections.geometric(0.5, 2.0)),
]

mismatch = jax.jit(corrections.mismatch, static_argnames="correction")


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


def figure(metrics, name):
    total, count = metrics.sums[name]
    return float(total) / float(count)


def constant_gap(gap, length):
    """One trajectory whose every token is off by the same log-ratio."""
    shape = (1, length)
    return jnp.full(shape, gap, jnp.float32), jnp.zeros(shape), jnp.ones(shape, jnp.bool_), jnp.zeros(shape, jnp.int32)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (corrections.truncated(100.0), [2.718282, 0.367879, 1, 1]),
        (corrections.truncated(2.0), [2.0, 0.367879, 1, 1]),
        (corrections.masked(0.5, 2.0), [0, 0, 1, 1]),
        (corrections.masked(0.3, 3.0), [2.718282, 0.367879, 1, 1]),
        (corrections.sequence(2.0), [1, 1, 1, 1]),  # the product is 1 although two tokens are far off
        (corrections.sequence_masked(), [1, 1, 1, 1]),
        (corrections.geometric(), [1, 1, 1, 1]),
        (corrections.veto(), [1, 1, 1, 1]),
        (corrections.veto(0.4), [0, 0, 0, 1]),
        (corrections.product(corrections.truncated(2.0), corrections.veto(0.4)), [0, 0, 0, 1]),
        (corrections.product(), [1, 1, 1, 1]),
    ],
)
def test_worked_numbers(correction, expected):
    close(correction(TRAIN, INFER, MASK, IDS), [expected])


@pytest.mark.parametrize("correction", ALL)
def test_detached_and_blind_to_what_stands_off_actions(correction):
    assert not np.any(jax.grad(lambda x: correction(x, INFER, MASK, IDS).sum())(TRAIN))
    bad = jnp.where(MASK, TRAIN, jnp.nan)
    close(correction(bad, jnp.where(MASK, INFER, -jnp.inf), MASK, IDS), correction(TRAIN, INFER, MASK, IDS))


def expected_factors(name, rho):
    """Factors of one trajectory, in float64."""
    whole, mean = rho.prod(), np.exp(np.log(rho).mean())
    inside = (rho >= 0.5) & (rho <= 2.0)
    return {
        "truncated": np.minimum(rho, 2.0),
        "masked": np.where(inside, rho, 0.0),
        "sequence": np.full_like(rho, min(whole, 2.0)),
        "sequence_masked": np.full_like(rho, whole if 0.5 <= whole <= 2.0 else 0.0),
        "geometric": np.full_like(rho, float(0.5 <= mean <= 2.0)),
        "veto": np.full_like(rho, float(np.all(rho >= 0.3))),
        "product": np.minimum(rho, 2.0) * float(0.5 <= mean <= 2.0),
    }[name]


NAMES = ["truncated", "masked", "sequence", "sequence_masked", "geometric", "veto", "product"]
EVERY = jax.jit(lambda *args: {name: each(*args) for name, each in zip(NAMES, ALL, strict=True)})
tokens = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(-1.5, 1.5, width=32)), min_size=12, max_size=12)


@settings(max_examples=30, deadline=None)
@given(tokens)
def test_second_route_a_loop_over_trajectories_in_whatever_order_they_are_packed(row):
    ids, mask, gap = (np.asarray(column).reshape(2, 6) for column in zip(*row, strict=True))
    ids = ids + np.asarray([[0], [4]])  # a trajectory lies in one row
    found = EVERY(jnp.asarray(gap, jnp.float32), jnp.zeros((2, 6)), jnp.asarray(mask), jnp.asarray(ids, jnp.int32))
    for name in NAMES:
        expected, near = np.ones((2, 6)), False
        for one in np.unique(ids):
            here = (ids == one) & mask
            if here.any():
                rho = np.exp(gap[here].astype(np.float64))
                expected[here] = expected_factors(name, rho)
                edges = np.asarray([*rho, rho.prod(), np.exp(np.log(rho).mean())])
                near |= bool((np.abs(np.subtract.outer(edges, [0.3, 0.5, 2.0])) < 1e-5).any())
        if not near:  # on an edge the rounding of f32 decides
            close(found[name], expected, atol=1e-5)


def test_length_trap_of_the_product():
    for length, whole in ((10, 2.5937425), (100, 13780.612)):
        gap = constant_gap(math.log(1.1), length)
        assert float(corrections.sequence(1e9)(*gap)[0, 0]) == pytest.approx(whole, rel=2e-5)
        assert figure(mismatch(*gap), "mismatch_geometric") == pytest.approx(1.1, rel=1e-5)


def test_p35_both_ratios_are_reported_before_clipping_and_so_is_what_is_rejected():
    gap = constant_gap(0.012, 100)
    found = mismatch(*gap, correction=corrections.sequence_masked(1 / 3, 3.0))
    assert figure(found, "mismatch_product") == pytest.approx(math.exp(1.2), rel=1e-5)
    assert figure(found, "mismatch_geometric") == pytest.approx(math.exp(0.012), rel=1e-5)
    assert figure(found, "correction_rejected") == 1.0
    assert float(corrections.sequence(3.0)(*gap)[0, 0]) == 3.0


def test_p39_a_noisy_sampler_is_bounded_reported_and_masked():
    noise = 0.3 * np.random.default_rng(0).standard_normal((4, 500)).astype(np.float32)
    old = jnp.full((4, 500), -1.0)
    mask, ids = jnp.ones((4, 500), jnp.bool_), jnp.repeat(jnp.arange(4, dtype=jnp.int32)[:, None], 500, axis=1)
    cap = 1.2
    found = mismatch(old, old - noise, mask, ids, correction=corrections.masked(0.5, cap))
    assert float(corrections.truncated(cap)(old, old - noise, mask, ids).max()) == pytest.approx(cap)
    assert figure(found, "mismatch_k2") == pytest.approx(0.5 * float(np.mean(noise.astype(np.float64) ** 2)), rel=1e-4)
    assert figure(found, "mismatch_kl") == pytest.approx(float(np.mean(np.expm1(noise) - noise)), rel=1e-3)
    outside = (np.exp(noise) > cap) | (np.exp(noise) < 0.5)
    assert figure(found, "correction_rejected") == pytest.approx(outside.mean(), abs=1e-6)
    assert float(found.maxima["mismatch_k2_max"]) == pytest.approx(0.5 * np.abs(noise).max() ** 2, rel=1e-5)


def test_mismatch_sees_tokens_where_the_trajectory_looks_right():
    found = mismatch(TRAIN, INFER, MASK, IDS)
    assert figure(found, "mismatch_product") == figure(found, "mismatch_geometric") == 1.0
    assert figure(found, "mismatch_k2") == pytest.approx(1 / 3)  # 0.5, 0.5, 0
    assert float(found.maxima["mismatch_k2_max"]) == 0.5
    assert figure(found, "mismatch_ratio") == pytest.approx((2.718282 + 0.367879 + 1) / 3, abs=1e-6)


def test_mismatch_of_parts_adds_up_to_that_of_the_whole():
    rng = np.random.default_rng(1)
    old, behavior = (jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(rng.random((4, 6)) < 0.7)
    ids = jnp.asarray(rng.integers(0, 2, (4, 6)) + 2 * np.arange(4)[:, None], jnp.int32)
    whole = mismatch(old, behavior, mask, ids)
    halves = [mismatch(old[at], behavior[at], mask[at], ids[at]) for at in (slice(0, 1), slice(1, 4))]
    for name, parts in whole.sums.items():
        close(np.asarray(halves[0].sums[name]) + np.asarray(halves[1].sums[name]), parts, atol=1e-5)
    assert float(whole.sums["mismatch_product"][1]) == pytest.approx(len(np.unique(ids[mask])), abs=1e-5)


def test_mismatch_of_nothing_has_no_nan():
    found = mismatch(TRAIN, INFER, jnp.zeros_like(MASK), IDS, correction=corrections.truncated())
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(found))


def loss_of(batch, composition, old=TRAIN, behavior=INFER, new=None):
    one, yes = jnp.ones((1, 1)), jnp.ones((1, 1), jnp.bool_)
    batch = batch._replace(old_logprobs=old, behavior_logprobs=behavior)
    batch = objective.assign(composition, batch, one, yes, yes)
    return objective.policy_loss(composition, old if new is None else new, None, batch)[0]


@pytest.fixture
def batch():
    zeros = jnp.zeros((1, 4), jnp.int32)
    return TokenBatch(
        **dict.fromkeys(("tokens", "parents", "subtree_ends", "positions", "turn_ids", "policy_versions"), zeros),
        trajectory_ids=IDS,
        sources=zeros.astype(jnp.int8),
        action_mask=MASK,
        behavior_logprobs=INFER,
        advantages=jnp.zeros((1, 4)),
        weights=jnp.zeros((1, 4)),
    )


PLAIN = replace(algorithms.decoupled_ppo(cap=2.0), whiten=None)


def test_decoupled_loss_worked_numbers_and_why_the_correction_is_refused_without_rescoring(batch):
    new = jnp.asarray([[-0.7, -2, -0.6, 3]], jnp.float32)
    assert float(loss_of(batch, PLAIN, new=new)) == pytest.approx(-1.224239, abs=1e-6)
    bypass = replace(PLAIN, correction=None)
    # The ratio runs from the sampler's policy: no correction, or the mismatch counts twice.
    assert float(loss_of(batch, bypass, old=INFER, new=new)) == pytest.approx(-0.824239, abs=1e-6)
    twice = corrections.truncated(100.0)(TRAIN, INFER, MASK, IDS)
    doubled = replace(bypass, surrogate=lambda r, a: bypass.surrogate(r, a * twice))
    assert float(loss_of(batch, doubled, old=INFER, new=new)) == pytest.approx(-1.434037, abs=1e-6)
    yes = jnp.ones((1, 1), jnp.bool_)
    with pytest.raises(ValueError, match="old_logprobs"):
        objective.assign(PLAIN, batch, jnp.ones((1, 1)), yes, yes)


def test_rejected_tokens_stay_in_the_denominator(batch):
    kept = replace(PLAIN, correction=corrections.masked(0.5, 2.0))
    assert float(loss_of(batch, kept)) == pytest.approx(-1 / 3, abs=1e-6)  # one of three tokens is left
    yes = jnp.ones((1, 1), jnp.bool_)
    scored = batch._replace(old_logprobs=TRAIN)
    filled = objective.assign(kept, scored, jnp.ones((1, 1)), yes, yes)
    close(filled.weights, weights.token_mean(MASK, IDS, IDS, num_trajectories=1))


def test_proximal_interpolation_worked_numbers():
    behavior, current = jnp.float32(-1.2), jnp.float32(-0.7)
    share = corrections.proximal_share(*(jnp.asarray(version, jnp.int32) for version in (3, 5, 6)))
    close(share, 2 / 3)
    close(corrections.proximal_log_linear(current, behavior, share), -0.8666667)
    close(corrections.proximal_linear(current, behavior, share), -0.8405922)


def test_proximal_interpolation_runs_from_the_sampler_to_the_policy_token_by_token():
    versions = jnp.asarray([2, 4, 6, 6], jnp.int32)
    share = corrections.proximal_share(versions, jnp.full((4,), 6, jnp.int32), jnp.full((4,), 6, jnp.int32))
    close(share, [1, 1, 1, 1])
    behavior, current = jnp.asarray([-1.0, -2.0]), jnp.asarray([-3.0, -0.5])
    for between in (corrections.proximal_log_linear, corrections.proximal_linear):
        close(between(current, behavior, jnp.asarray([0.0, 0.0])), behavior)
        close(between(current, behavior, jnp.asarray([1.0, 1.0])), current)
        half = jnp.asarray([0.5, 0.5])
        assert not np.any(jax.grad(lambda x, f=between, a=half: f(x, behavior, a).sum())(current))


@pytest.mark.parametrize(
    ("make", "given_", "named"),
    [
        (corrections.truncated, (0.0,), "truncated: cap"),
        (corrections.sequence, (-1.0,), "sequence: cap"),
        (corrections.masked, (1.5, 2.0), "masked: low"),
        (corrections.sequence_masked, (0.5, 0.9), "sequence_masked: low"),
        (corrections.geometric, (-0.1, 2.0), "geometric: low"),
        (corrections.veto, (1.0,), "veto: threshold"),
    ],
)
def test_bounds_without_a_meaning_are_refused(make, given_, named):
    with pytest.raises(ValueError, match=named):
        make(*given_)
