"""Credit of one trajectory: worked numbers, loops over the compressed sequence, and what must change nothing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl.credit import gae, on_last_action, on_last_actions, reward_to_go, to_tokens, turn_gae, vtrace

REWARDS = [0, 0, 0, 0, 0, 1]
VALUES = [0.4, 0.5, 0.9, 0.9, 0.6, 0.7]
MASK = [1, 1, 0, 0, 1, 1]
LENGTH = 9


def arrays(rewards, values, mask):
    return jnp.asarray(rewards, jnp.float32), jnp.asarray(values, jnp.float32), jnp.asarray(mask, jnp.bool_)


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


def test_gae_worked_numbers():
    fixture = arrays(REWARDS, VALUES, MASK)
    skip = [0.5424624999999998, 0.46574999999999994, 0.0, 0.0, 0.385, 0.30000000000000004]
    found = gae(*fixture, gamma=1.0, lam=0.95)
    close(found.advantages, skip)
    close(found.returns, (np.asarray(skip) + VALUES) * MASK)
    close(gae(*fixture, gamma=1.0, lam=1.0).advantages, [0.6, 0.5, 0, 0, 0.4, 0.3])


def test_gae_is_neither_of_the_two_wrong_ones_below_lambda_one():
    """Observations as transitions, or values zeroed there and decayed across: both agree with it at lambda 1 only."""
    rewards, values, mask = arrays(REWARDS, VALUES, MASK)
    everywhere, kept = jnp.ones_like(mask), mask.astype(jnp.float32)
    naive = [0.5363724062499999, 0.45933937499999994, 0.0, 0.0, 0.385, 0.30000000000000004]
    zeroed = [0.45300990624999976, 0.3715893749999998, 0.0, 0.0, 0.385, 0.30000000000000004]
    for wrong, expected in (((rewards, values), naive), ((rewards * kept, values * kept), zeroed)):
        close(gae(*wrong, everywhere, gamma=1.0, lam=0.95).advantages * kept, expected)
        close(gae(*wrong, everywhere, gamma=1.0, lam=1.0).advantages * kept, [0.6, 0.5, 0, 0, 0.4, 0.3])
        assert np.abs(gae(rewards, values, mask, gamma=1.0, lam=0.95).advantages[0] - expected[0]) > 0.005


def test_a_reward_on_a_trailing_observation_is_lost_and_on_last_action_finds_its_place():
    values, mask = [0.4, 0.5, 0.6, 0.7, 0.9, 0.9], [1, 1, 1, 1, 0, 0]
    lost = gae(*arrays([0, 0, 0, 0, 1, 0], values, mask), gamma=1.0, lam=0.95)
    close(lost.advantages, [-0.3149125, -0.43674999999999997, -0.565, -0.7, 0.0, 0.0])
    placed = on_last_action(1.0, jnp.asarray(mask, jnp.bool_))
    close(placed, [0, 0, 0, 1, 0, 0])
    fixed = gae(*arrays(placed, values, mask), gamma=1.0, lam=0.95)
    close(fixed.advantages, [0.5424624999999998, 0.46574999999999994, 0.385, 0.30000000000000004, 0.0, 0.0])


def test_turn_gae_worked_numbers_on_tokens():
    turn_ids = jnp.asarray([0, 0, 0, 1, 1, 2, 2, 3], jnp.int32)
    mask = jnp.asarray([0, 1, 1, 0, 1, 1, 1, 0], jnp.bool_)
    rewards, values, _ = arrays([0, 0, 1], [0.3, 0.5, 0.8], [])
    found = turn_gae(rewards, values, turn_ids, mask, gamma=0.95, lam=0.9)
    first, second, third = 0.543505, 0.431, 0.2
    close(found.advantages, [0, first, first, 0, second, third, third, 0])
    close(found.returns, [0, first + 0.3, first + 0.3, 0, second + 0.5, third + 0.8, third + 0.8, 0])


def test_turn_gae_passes_over_a_turn_without_an_action():
    mask = jnp.asarray([1, 0, 1], jnp.bool_)
    ids = jnp.asarray([0, 1, 2], jnp.int32)
    rewards, values, _ = arrays([0.5, np.nan, 1], [0.3, np.nan, 0.8], [])
    found = turn_gae(rewards, values, ids, mask, gamma=0.9, lam=0.8)
    close(found.advantages[::2], gae(*arrays([0.5, 1], [0.3, 0.8], [1, 1]), gamma=0.9, lam=0.8).advantages)


def loop(rewards, values, ratios, gamma, lam, bootstrap):
    """GAE, discounted return and V-trace (rho at most 1.5, c at most 1.2) in float64, on action tokens alone."""
    length = len(rewards)
    following, targets = np.append(values[1:], bootstrap), np.append(values, bootstrap)
    advantages, returns = np.zeros(length), np.append(np.zeros(length), bootstrap)
    rho = np.minimum(ratios, 1.5)
    for t in reversed(range(length)):
        ahead = advantages[t + 1] if t + 1 < length else 0.0
        advantages[t] = rewards[t] + gamma * following[t] - values[t] + gamma * lam * ahead
        returns[t] = rewards[t] + gamma * returns[t + 1]
        decay = 1.0
        for s in range(t, length):
            targets[t] += decay * rho[s] * (rewards[s] + gamma * following[s] - values[s])
            decay *= gamma * min(ratios[s], 1.2)
    return advantages, returns[:-1], targets[:-1], rho * (rewards + gamma * targets[1:] - values)


GAMMA, LAM = 0.9, 0.8
estimate_gae = jax.jit(partial(gae, gamma=GAMMA, lam=LAM))
estimate_return = jax.jit(partial(reward_to_go, gamma=GAMMA))
estimate_vtrace = jax.jit(partial(vtrace, gamma=GAMMA, rho_clip=1.5, c_clip=1.2))


def drawn(seed, bits, length=LENGTH):
    """(rewards, values, logprobs, behavior_logprobs) and a mask; garbage at observation tokens."""
    rng = np.random.default_rng(seed)
    mask = np.asarray([bits >> t & 1 for t in range(length)], bool)
    rows = np.round(rng.normal(size=(4, length)), 2)
    return np.where(mask, rows, rng.choice([np.nan, np.inf, 1e9], size=(4, length))), mask


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(0, 2**LENGTH - 1), st.sampled_from([0.0, 0.7]))
def test_every_recursion_equals_a_loop_over_the_action_tokens_alone(seed, bits, bootstrap):
    rows, mask = drawn(seed, bits)
    ratios = np.exp(rows[2, mask] - rows[3, mask])
    advantages, returns, targets, corrected = loop(rows[0, mask], rows[1, mask], ratios, GAMMA, LAM, bootstrap)
    rewards, values, logprobs, behavior = (jnp.asarray(row, jnp.float32) for row in rows)
    start = jnp.float32(bootstrap)
    found = estimate_gae(rewards, values, mask, bootstrap=start)
    to_go = estimate_return(rewards, mask, bootstrap=start)
    traced = estimate_vtrace(rewards, values, logprobs, behavior, mask, bootstrap=start)
    expected = (advantages, advantages + rows[1, mask], returns, corrected, targets)
    for one, other in zip((*found, to_go, *traced), expected, strict=True):
        close(np.asarray(one)[mask], other, atol=2e-5)
        assert not np.any(np.asarray(one)[~mask])


def test_lambda_one_is_return_minus_value_and_lambda_zero_the_one_step_error():
    rows, mask = drawn(3, 0b110101101)
    rewards, values = (jnp.asarray(row, jnp.float32) for row in rows[:2])
    full = gae(rewards, values, mask, gamma=0.9, lam=1.0, bootstrap=0.3)
    close(full.advantages[mask], (reward_to_go(rewards, mask, gamma=0.9, bootstrap=0.3) - values)[mask], atol=1e-5)
    chosen = np.append(rows[1, mask], 0.3)
    short = gae(rewards, values, mask, gamma=0.9, lam=0.0, bootstrap=0.3)
    close(short.advantages[mask], rows[0, mask] + 0.9 * chosen[1:] - chosen[:-1], atol=1e-5)


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not():
    fixture = arrays([0, 0, 0], [0.5, 0.5, 0.5], [1, 1, 0])
    close(gae(*fixture, gamma=1.0, lam=1.0).advantages, [-0.5, -0.5, 0])
    close(gae(*fixture, gamma=1.0, lam=1.0, bootstrap=0.5).advantages, [0, 0, 0])


def test_equal_suffixes_have_equal_bits_wherever_they_stand():
    rewards, values, mask = arrays([0.1, 0.3, 0.7, 0.9], [0.2, 0.4, 0.1, 0.6], [1, 1, 1, 1])
    spread = np.asarray([0, 3, 4, 8])
    wide = [
        jnp.full((12,), fill, row.dtype).at[spread].set(row) for row, fill in ((rewards, 7), (values, 7), (mask, 0))
    ]
    short, long = (gae(*each, gamma=0.97, lam=0.93) for each in ((rewards, values, mask), wide))
    np.testing.assert_array_equal(short.advantages, np.asarray(long.advantages)[spread])
    np.testing.assert_array_equal(short.returns, np.asarray(long.returns)[spread])


def test_reward_to_go_is_not_reset_by_an_interior_observation():
    rewards, _, mask = arrays([0, 0, 0, 1], [0] * 4, [1, 0, 1, 1])
    running, reset = 0.0, np.zeros(4)
    for t in reversed(range(4)):  # the fault: an observation ends the episode
        running = (float(rewards[t]) + 0.9 * running) * float(mask[t])
        reset[t] = running
    close(reset, [0.0, 0.0, 0.9, 1.0])
    close(reward_to_go(rewards, mask, gamma=0.9), [0.81, 0, 0.9, 1.0])


TURN_IDS = jnp.asarray([0, 0, 0, 1, 1, 1, 2, 2, 2], jnp.int32)
TURN_MASK = jnp.asarray([0, 1, 1, 0, 1, 1, 0, 1, 0], jnp.bool_)


def test_p42_one_final_reward_is_the_same_advantage_on_every_turns_tokens():
    rewards, nothing = on_last_action(1.0, TURN_MASK), jnp.zeros((9,), jnp.float32)
    per_turn = turn_gae(jnp.asarray([0, 0, 1.0]), jnp.zeros((3,)), TURN_IDS, TURN_MASK, gamma=1.0, lam=1.0)
    for found in (
        reward_to_go(rewards, TURN_MASK),
        gae(rewards, nothing, TURN_MASK, gamma=1.0, lam=1.0).advantages,
        per_turn.advantages,
    ):
        np.testing.assert_array_equal(found, TURN_MASK.astype(jnp.float32))


def test_p43_the_rewards_of_all_turns_count():
    rewards = on_last_actions(jnp.asarray([0.2, 0.3, 0.5]), TURN_IDS, TURN_MASK)
    close(rewards, [0, 0, 0.2, 0, 0, 0.3, 0, 0.5, 0])
    close(reward_to_go(rewards, TURN_MASK), [0, 1, 1, 0, 0.8, 0.8, 0, 0.5, 0])


def test_vtrace_on_policy_is_gae_at_lambda_one():
    rows, mask = drawn(5, 0b101101111)
    rewards, values, logprobs, _ = (jnp.asarray(row, jnp.float32) for row in rows)
    traced = vtrace(rewards, values, logprobs, logprobs, mask, gamma=0.9, bootstrap=0.4)
    close(traced.returns, gae(rewards, values, mask, gamma=0.9, lam=1.0, bootstrap=0.4).returns, atol=1e-5)
    close(traced.advantages, gae(rewards, values, mask, gamma=0.9, lam=1.0, bootstrap=0.4).advantages, atol=1e-5)


def test_credit_is_detached():
    rewards, values, mask = arrays(REWARDS, VALUES, MASK)
    for estimate in (partial(gae, lam=0.9), partial(vtrace, logprobs=values, behavior_logprobs=rewards)):
        grad = jax.grad(lambda v, f=estimate: sum(x.sum() for x in f(rewards, v, action_mask=mask, gamma=0.9)))(values)
        assert not np.any(grad)


def test_rewards_without_a_place_and_turns_out_of_range():
    nobody = jnp.zeros((9,), jnp.bool_)
    assert not np.any(on_last_action(1.0, nobody))
    close(on_last_actions(jnp.asarray([1.0, 2.0, 3.0, 4.0]), TURN_IDS, TURN_MASK)[jnp.asarray([2, 5, 7])], [1, 2, 3])
    found = np.asarray(to_tokens(jnp.asarray([1.0, 2.0]), TURN_IDS, TURN_MASK))
    np.testing.assert_array_equal(found, [0, 1, 1, 0, 2, 2, 0, np.nan, 0])


def test_vmap_under_jit_equals_a_loop_over_trajectories():
    rows = [drawn(seed, 0b1011011 + 37 * seed) for seed in range(3)]
    batch, masks = np.stack([row for row, _ in rows]).astype(np.float32), np.stack([mask for _, mask in rows])
    bootstrap = jnp.asarray([0.0, 0.5, 1.0])

    def everything(row, mask, start):
        turns = turn_gae(jnp.arange(3.0), jnp.ones((3,)), TURN_IDS, mask, gamma=0.9, lam=0.8, bootstrap=start)
        return (
            gae(row[0], row[1], mask, gamma=0.9, lam=0.8, bootstrap=start),
            vtrace(*row, mask, gamma=0.9, bootstrap=start),
            reward_to_go(row[0], mask, gamma=0.9, bootstrap=start),
            on_last_action(start, mask),
            turns,
        )

    together = jax.jit(jax.vmap(everything))(batch, masks, bootstrap)
    alone = [everything(jnp.asarray(batch[n]), jnp.asarray(masks[n]), bootstrap[n]) for n in range(3)]
    for one, other in zip(jax.tree.leaves(together), zip(*map(jax.tree.leaves, alone), strict=True), strict=True):
        close(one, np.stack(other), atol=2e-5)


def test_what_would_go_wrong_in_silence_is_refused():
    rewards, values, mask = arrays(REWARDS, VALUES, MASK)
    with pytest.raises(ValueError, match=r"gae: values: .*\(6,\), got \(5,\)"):
        gae(rewards, values[:5], mask, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="gae: action_mask: expected bool"):
        gae(rewards, values, mask.astype(jnp.float32), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="vmap"):
        reward_to_go(rewards[None], mask[None])
    with pytest.raises(ValueError, match=r"gae: lam: .*got 95"):
        gae(rewards, values, mask, gamma=1.0, lam=95)
    with pytest.raises(ValueError, match="one number"):
        gae(rewards, values, mask, gamma=1.0, lam=1.0, bootstrap=values)
    with pytest.raises(ValueError, match="vtrace: c_clip"):
        vtrace(rewards, values, values, values, mask, gamma=1.0, rho_clip=0.5)
    with pytest.raises(ValueError, match="turn_gae: expected rewards and values"):
        turn_gae(rewards[:2], values[:3], TURN_IDS, TURN_MASK, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="on_last_actions: rewards"):
        on_last_actions(jnp.float32(1.0), TURN_IDS, TURN_MASK)
