"""Differences of a potential: worked numbers, telescoping, and what the absolute potential would pay for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import potentials as p
from agentrl_jax.rl.advantages import group_centered
from agentrl_jax.rl.credit import on_last_actions, reward_to_go


def floats(*values):
    return jnp.asarray(values, jnp.float32)


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


PHI = floats(0.1, 0.4, 0.2, 0.7)


def test_shaping_worked_numbers():
    shaped = p.shaping(PHI, gamma=0.9, terminated=False)
    close(shaped, [0.26, -0.22, 0.43])
    close(np.sum(np.asarray(shaped) * 0.9 ** np.arange(3)), 0.4103)
    close(0.9**3 * 0.7 - 0.1, 0.4103000000000001)
    close(np.sum(np.asarray(p.shaping(PHI, gamma=0.9)) * 0.9 ** np.arange(3)), -0.1)


def test_differences_pay_for_no_loop_and_absolute_values_do():
    loitering, direct = floats(0.1, 0.4, 0.1, 0.4, 0.1, 0.4, 0.7), floats(0.1, 0.4, 0.7)
    for path, absolute in ((loitering, 2.1), (direct, 1.1)):
        close(p.potential_difference(path).sum(), 0.6)
        close(path[1:].sum(), absolute)


def test_p43_shaping_adds_exactly_what_the_end_is_above_the_start():
    turn_ids, mask = jnp.asarray([0, 0, 1, 1, 2], jnp.int32), jnp.asarray([1, 1, 0, 1, 1], jnp.bool_)
    raw = floats(0.25, 0.25, 0.5)
    shaped = raw + p.shaping(PHI, gamma=1.0, terminated=False)
    close(shaped.sum() - (PHI[3] - PHI[0]), raw.sum())
    dyadic = floats(0.125, 0.5, 0.25, 0.75)
    shaped = raw + p.shaping(dyadic, gamma=1.0, terminated=False)
    assert shaped.sum() - (dyadic[3] - dyadic[0]) == raw.sum() == 1.0
    assert reward_to_go(on_last_actions(shaped, turn_ids, mask), mask)[0] == 1.0 + dyadic[3] - dyadic[0]


LENGTH = 6
shape = {gamma: jax.jit(partial(p.shaping, gamma=gamma)) for gamma in (1.0, 0.9)}
path = st.lists(st.floats(-2, 2, width=16), min_size=LENGTH + 1, max_size=LENGTH + 1)


@settings(max_examples=40, deadline=None)
@given(path, st.integers(0, LENGTH), st.booleans(), st.sampled_from([1.0, 0.9]))
def test_shaping_telescopes_over_the_turns_that_took_place(potentials, turns, terminated, gamma):
    states = np.asarray(potentials)
    valid = np.arange(LENGTH) < turns
    given_states = jnp.asarray(np.where(np.arange(LENGTH + 1) <= turns, states, np.nan), jnp.float32)
    shaped = np.asarray(shape[gamma](given_states, valid, terminated=np.bool_(terminated)), np.float64)
    end = 0.0 if terminated else states[turns]
    expected = gamma**turns * end - states[0] if turns else 0.0
    close(np.sum(shaped * gamma ** np.arange(LENGTH)), expected, atol=1e-5)
    assert not np.any(shaped[turns:])


def test_conservation_can_be_checked_and_names_both_sums():
    for terminated in (True, False):
        shaped = p.shaping(PHI, gamma=0.9, terminated=terminated)
        assert float(p.conservation_error(shaped, PHI, gamma=0.9, terminated=terminated)) < 1e-6
        p.check_conservation(shaped, PHI, gamma=0.9, terminated=terminated)
        normalised = (shaped - shaped.mean()) / shaped.std()
        for wrong in (normalised, jnp.clip(shaped, -0.1, 0.1), jnp.full((3,), jnp.nan)):
            with pytest.raises(ValueError, match=r"rewards sum to .* potentials say"):
                p.check_conservation(wrong, PHI, gamma=0.9, terminated=terminated)
    with pytest.raises(ValueError, match=r"sum to 0\.4 .*say -0\.1"):
        p.check_conservation(floats(0.2, 0.1, 0.1), PHI, gamma=1.0)
    with pytest.raises(ValueError, match="check_conservation"):  # undiscounted differences under a discount
        p.check_conservation(p.potential_difference(PHI), PHI, gamma=0.9, terminated=False)


def test_conservation_error_passes_over_turns_that_did_not_take_place():
    valid = jnp.asarray([True, True, False])
    states = PHI.at[3].set(jnp.nan)
    shaped = p.shaping(states, valid, gamma=0.9, terminated=False)
    assert float(p.conservation_error(shaped, states, valid, gamma=0.9, terminated=False)) < 1e-6
    close(p.conservation_error(shaped.at[0].add(0.5), states, valid, gamma=0.9, terminated=False), 0.5)


def test_pav_worked_numbers():
    q_policy = floats(0.30, 0.32, 0.60)
    q_prover = p.best_of(q_policy, samples=4)
    close(q_prover, [0.7599, 0.7861862400000001, 0.9744])
    close(p.best_of(floats(0.3), samples=4), [0.7599])
    progress = p.potential_difference(q_prover)
    close(progress, [0.026286240000000127, 0.1882137599999999])
    close(p.potential_difference(q_policy), [0.020000000000000018, 0.27999999999999997])
    close(progress.sum(), 0.21450000000000002)
    close(q_prover[-1] - q_prover[0], 0.21450000000000002)
    close(p.pav(q_policy, q_prover, alpha=3.0), [0.32 + 3 * 0.02628624, 0.60 + 3 * 0.18821376])
    close(p.pav(q_policy, q_prover, jnp.asarray([True, False]), alpha=0.0), [0.32, 0.0])


def test_too_strong_a_prover_sees_no_progress():
    q_policy = floats(0.30, 0.32, 0.60)
    assert np.abs(p.potential_difference(p.best_of(q_policy, samples=64))).max() < 1e-6
    close(p.best_of(q_policy, samples=1), q_policy)


ELL = floats(-3.0, -1.4, -1.5, -0.4)


def test_trace_worked_numbers():
    close(p.trace_gap(ELL), [3.1, 1.5, 1.6, 0.5])
    potentials = p.trace_gap_potential(ELL)
    close(potentials, [0.0, 0.7259370033829363, 0.661398482245365, 1.824549292051046])
    differences = p.potential_difference(potentials)
    close(differences, [0.7259370033829363, -0.0645385211375713, 1.163150809805681])
    close(differences.sum(), 1.8245492920510462)
    close(
        p.trace_turn_credit(potentials, 0.0, first_index=0), [0.5814437314543096, 0.4811011815038742, 1.163150809805681]
    )
    turn = p.trace_turn_credit(potentials, 1.0, first_index=0)
    close(turn, [1.6054437314543097, 1.7611011815038744, 2.763150809805681])
    one_based = p.trace_turn_credit(potentials, 1.0, first_index=1)
    close(one_based, [1.86144373145431, 2.0811011815038745, 3.163150809805681])
    turn_ids, mask = jnp.asarray([0, 1, 1, 2, 2, 3, 3], jnp.int32), jnp.asarray([1, 1, 0, 0, 1, 1, 1], jnp.bool_)
    found = p.trace_advantages(turn, 1.0, turn_ids, mask)
    close(found, [1.321088746290862, 1.352220236300775, 0, 0, 1.5526301619611362, 1.0, 1.0])


def test_trace_outcome_is_a_population_z_score():
    found = group_centered(floats(1, 0, 0, 0), jnp.ones((4,), jnp.bool_), ddof=0, eps=1e-9)
    close(found[:2], [1.7320508075688774, -0.5773502691896258])


def test_eps_of_the_gap_is_part_of_the_definition():
    certain = floats(-3.0, 0.0)
    close(p.trace_gap_potential(certain, eps=1e-6)[1], 14.914122846632385, atol=1e-4)
    close(p.trace_gap_potential(certain)[1], 3.4339772045351458)


def test_a_failed_trajectory_keeps_its_sign_beside_good_local_credit():
    potentials = p.trace_gap_potential(ELL)
    credit = p.trace_turn_credit(potentials, -0.57735, first_index=0)
    assert credit[2] > 0
    found = p.trace_advantages(credit, -0.57735, jnp.arange(3, dtype=jnp.int32), jnp.ones((3,), jnp.bool_))
    assert np.all(np.asarray(found) < 0)


def window_loop(differences, outcome, window, gamma, scale, first_index):
    turns, credit = len(differences), []
    for t in range(turns):
        decays = [gamma**j for j in range(window) if t + j < turns]
        local = sum(d * differences[t + j] for j, d in enumerate(decays)) / sum(decays)
        reaches = t + window - 1 >= turns - 1
        credit.append(local + (scale * gamma ** (turns - t - first_index) * outcome if reaches else 0.0))
    return credit


def test_early_turns_get_no_fill():
    differences = [0.2, 0.1, -0.3, 0.4, 0.5]
    states = jnp.asarray(np.append(0, np.cumsum(differences)), jnp.float32)
    found = p.trace_turn_credit(states, 1.0, first_index=0)
    close(found, window_loop(differences, 1.0, 3, 0.8, 2.0, 0))
    close(found[:3], [0.088 / 2.44, 0.116 / 2.44, 0.34 / 2.44 + 2 * 0.8**3])


CREDIT = {k: jax.jit(partial(p.trace_turn_credit, window=3, gamma=0.7, first_index=k)) for k in (0, 1)}


@settings(max_examples=30, deadline=None)
@given(path, st.integers(1, LENGTH), st.floats(-2, 2, width=16), st.sampled_from([0, 1]))
def test_turn_credit_equals_a_loop_over_windows(potentials, turns, outcome, first_index):
    states = np.asarray(potentials)
    valid = np.arange(LENGTH) < turns
    given_states = jnp.asarray(np.where(np.arange(LENGTH + 1) <= turns, states, np.nan), jnp.float32)
    found = np.asarray(CREDIT[first_index](given_states, np.float32(outcome), valid))
    expected = window_loop(np.diff(states[: turns + 1]), outcome, 3, 0.7, 2.0, first_index)
    close(found[:turns], expected, atol=1e-5)
    assert not np.any(found[turns:])


def test_tips_worked_numbers():
    close(p.tips(ELL), [1.6, -0.10000000000000009, 1.1])
    close(p.tips(ELL, jnp.asarray([True, True, False])), [1.6, -0.1, 0])


def test_rising_segments_worked_numbers():
    values = floats(0.2, 0.25, 0.4, 0.35, 0.5, 0.3, 0.1)
    found = p.rising_segments(values)
    close(found.differences, [0.05, 0.15, -0.05, 0.15, -0.2, -0.2])
    assert found.mask.astype(jnp.int32).tolist() == [1, 1, 0, 1, 0, 0]
    assert found.segment_ids.tolist() == [0, 0, -1, 1, -1, -1]  # turns 0 to 1, and turn 3
    steep = p.rising_segments(values, threshold=0.06)
    assert steep.segment_ids.tolist() == [-1, 0, -1, 1, -1, -1]


segments = jax.jit(p.rising_segments)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=LENGTH + 1, max_size=LENGTH + 1), st.integers(0, LENGTH))
def test_rising_segments_equal_a_loop(levels, turns):
    states = jnp.asarray(np.where(np.arange(LENGTH + 1) <= turns, np.asarray(levels) / 4, np.nan), jnp.float32)
    found = segments(states, np.arange(LENGTH) < turns)
    runs = []
    for k in range(turns):
        if levels[k + 1] > levels[k]:
            if runs and runs[-1][1] == k - 1:
                runs[-1][1] = k
            else:
                runs.append([k, k])
    ids = found.segment_ids.tolist()
    kept = [k for k in range(LENGTH) if ids[k] >= 0]
    assert [[min(c), max(c)] for c in ([k for k in kept if ids[k] == n] for n in range(len(runs)))] == runs
    assert kept == [k for first, last in runs for k in range(first, last + 1)] == np.flatnonzero(found.mask).tolist()


def test_vmap_under_jit_equals_a_loop_over_trajectories():
    states = jnp.asarray(-np.abs(np.random.default_rng(0).normal(size=(3, 5))), jnp.float32)
    valid = jnp.arange(4)[None] < jnp.asarray([4, 2, 0])[:, None]
    ends, turn_ids = jnp.asarray([True, False, True]), jnp.asarray([0, 0, 1, 3, 4], jnp.int32)

    def everything(states, valid, terminated):
        shaped = p.shaping(states, valid, gamma=0.9, terminated=terminated)
        credit = p.trace_turn_credit(p.trace_gap_potential(states, valid), states[0], valid, first_index=0)
        return (
            shaped,
            p.conservation_error(shaped, states, valid, gamma=0.9, terminated=terminated),
            p.pav(states, p.best_of(states, samples=3), valid, alpha=0.5),
            p.trace_advantages(credit, states[0], turn_ids, jnp.ones((5,), jnp.bool_)),
            p.tips(states, valid),
            p.rising_segments(states, valid),
        )

    together = jax.jit(jax.vmap(everything))(states, valid, ends)
    alone = [jax.tree.leaves(everything(states[n], valid[n], ends[n])) for n in range(3)]
    for one, other in zip(jax.tree.leaves(together), zip(*alone, strict=True), strict=True):
        close(one, np.stack(other), atol=1e-5)


def test_no_gradient_flows_into_a_potential():
    def total(states):
        return p.shaping(states, gamma=0.9).sum() + p.pav(states, states, alpha=1.0).sum() + p.tips(states).sum()

    assert not np.any(jax.grad(total)(ELL))
    assert not np.any(jax.grad(lambda x: p.trace_turn_credit(p.trace_gap_potential(x), 1.0, first_index=0).sum())(ELL))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: p.shaping(PHI[None], gamma=0.9), r"shaping: expected f32\[K \+ 1\].*vmap"),
        (lambda: p.shaping(PHI, gamma=1.5), "shaping: gamma"),
        (lambda: p.shaping(PHI, jnp.ones((4,), jnp.bool_), gamma=0.9), r"shaping: valid: expected bool\[3\]"),
        (lambda: p.tips(PHI, jnp.ones((3,))), "valid: expected bool"),
        (lambda: p.conservation_error(PHI, PHI, gamma=0.9), "conservation_error: shaped"),
        (lambda: p.best_of(PHI, samples=0), "best_of: samples"),
        (lambda: p.pav(PHI, PHI[:3], alpha=1.0), "pav: q_prover"),
        (lambda: p.pav(PHI, PHI, alpha=-1.0), "pav: alpha"),
        (lambda: p.trace_gap(ELL, eps=0.0), "trace_gap: eps"),
        (lambda: p.trace_turn_credit(PHI, 1.0, first_index=2), "first_index: expected 0 or 1"),
        (lambda: p.trace_turn_credit(PHI, 1.0, first_index=0, window=0), "window >= 1"),
        (lambda: p.trace_advantages(PHI, 1.0, jnp.zeros((2,), jnp.int32), jnp.ones((3,), jnp.bool_)), "turn_ids"),
        (lambda: p.rising_segments(PHI, threshold=-0.1), "rising_segments: threshold"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_conservation_is_judged_beside_the_size_of_the_potentials():
    potentials = jnp.asarray(np.random.default_rng(0).normal(0, 1e4, 201), jnp.float32)
    p.check_conservation(p.shaping(potentials, gamma=1.0), potentials, gamma=1.0)
    with pytest.raises(ValueError, match="sum to"):
        p.check_conservation(jnp.clip(p.shaping(potentials, gamma=1.0), -1e4, 1e4), potentials, gamma=1.0)


def test_trace_credit_of_a_long_padded_trajectory_has_a_finite_gradient():
    valid = jnp.arange(2000) < 1
    gradient = jax.grad(lambda a: p.trace_turn_credit(jnp.zeros(2001), a, valid, first_index=0).sum())(jnp.float32(1.0))
    assert np.isfinite(float(gradient))
