"""Step groups and Monte-Carlo targets: worked numbers, grouping by dictionary, and who counts."""

from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import steps
from agentrl_jax.rl.advantages import group_centered
from agentrl_jax.rl.credit import reward_to_go

# Two rollouts of one task: s0 s1 s2 with reward 1 at the end, s0 s1 s1 with none.
REWARDS = jnp.asarray([[0, 0, 1], [0, 0, 0]], jnp.float32)
STATES = jnp.asarray([[0, 1, 2], [0, 1, 1]], jnp.int32)
VALID = jnp.ones((2, 3), jnp.bool_)
STATIC = ("gamma", "scale_by_std", "ddof", "eps")
anchored = jax.jit(steps.anchor_step_advantages, static_argnames=STATIC)
composed = jax.jit(steps.gigpo, static_argnames=(*STATIC, "step_weight"))


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


def test_gigpo_worked_numbers():
    found = anchored(REWARDS, STATES, VALID)
    step = [[0.7071056731550427, 1.154698433119932, 0.0], [-0.7071056731550427, -0.577349216559966, -0.577349216559966]]
    close(found.advantages, step)
    assert [float(part) for part in found.shared] == [5.0, 6.0]
    episode = group_centered(REWARDS.sum(axis=1), jnp.ones((2,), jnp.bool_))
    close(episode, [0.7071057811879616, -0.7071057811879616])
    both = [
        [1.4142114543430044, 1.8618042143078934, 0.7071057811879616],
        [-1.4142114543430044, -1.2844549977479276, -1.2844549977479276],
    ]
    close(composed(REWARDS, STATES, VALID).advantages, both)
    close(composed(REWARDS, STATES, VALID, step_weight=0.0).advantages, np.repeat(np.asarray(episode)[:, None], 3, 1))


def test_gigpo_returns_worked_numbers():
    returns = np.asarray([[0.9025, 0.95, 1.0], [0.0, 0.0, 0.0]])
    close(jax.vmap(partial(reward_to_go, gamma=0.95))(REWARDS, VALID), returns)
    found = anchored(REWARDS, jnp.zeros_like(STATES), VALID, scale_by_std=False)
    close(found.advantages, returns - returns.mean())


def test_the_episode_mean_counts_each_trajectory_once_and_not_each_row():
    rewards = jnp.asarray([[1, 0, 0], [0, 0, 0]], jnp.float32)
    valid = jnp.asarray([[True, False, False], [True, True, True]])
    apart = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    found = composed(rewards, apart, valid, scale_by_std=False)
    close(found.advantages, [[0.5, 0, 0], [-0.5, -0.5, -0.5]])  # from the mean 0.5
    assert np.mean([1.0, 0, 0, 0]) == 0.25  # the mean over rows
    assert [float(part) for part in found.shared] == [0.0, 4.0]  # nothing shared: this is GRPO


def test_a_later_visit_of_the_same_state_has_the_larger_return():
    rewards, states = jnp.asarray([[0, 0, 1]], jnp.float32), jnp.asarray([[7, 7, 3]], jnp.int32)
    found = anchored(rewards, states, VALID[:1], scale_by_std=False)
    close(found.advantages, [[-0.02375, 0.02375, 0]])
    close(anchored(rewards, states, VALID[:1], gamma=1.0).advantages, [[0, 0, 0]])


def test_p30_a_group_of_one_and_a_state_seen_once_get_exactly_zero():
    alone = jnp.asarray([[True] * 3, [False] * 3])
    rewards = jnp.asarray([[0.1, 0.2, 0.7], [np.nan, np.inf, 1]], jnp.float32)
    for found in (composed(rewards, STATES, alone), anchored(rewards, STATES, alone)):
        assert not np.any(found.advantages)


def test_p31_equal_returns_give_exactly_zero_whatever_padding_stands_between():
    rewards = np.zeros((7, 6), np.float32)
    valid = np.zeros((7, 6), bool)
    states = np.zeros((7, 6), np.int32)
    for n in range(7):  # the same two turns, at different columns
        columns = (n % 3, 3 + n % 3)
        valid[n, list(columns)], states[n, columns[1]], rewards[n, columns[1]] = True, 1, 0.1
    found = composed(*(jnp.asarray(x) for x in (rewards, states, valid)))
    assert not np.any(found.advantages)
    assert float(found.shared[0]) == 14.0


def grouped(rewards, states, valid, gamma, scale_by_std):
    """GiGPO's step term in float64, by a dictionary from state to its turns."""
    groups, returns = defaultdict(list), np.zeros(rewards.shape)
    for n in range(rewards.shape[0]):
        running = 0.0
        for k in reversed(range(rewards.shape[1])):
            if valid[n, k]:
                running = rewards[n, k] + gamma * running
                returns[n, k] = running
                groups[int(states[n, k])].append((n, k))
    out = np.zeros(rewards.shape)
    for turns in groups.values():
        of_state = np.asarray([returns[turn] for turn in turns])
        if len(turns) > 1:
            scale = of_state.std(ddof=1) + 1e-6 if scale_by_std else 1.0
            for turn in turns:
                out[turn] = (returns[turn] - of_state.mean()) / scale
    return out, sum(len(turns) for turns in groups.values() if len(turns) > 1)


SHAPE = (4, 5)


def drawn(seed, states=4):
    rng = np.random.default_rng(seed)
    valid = np.arange(SHAPE[1])[None] < rng.integers(0, SHAPE[1] + 1, size=SHAPE[0])[:, None]
    rewards = np.where(valid, rng.integers(-2, 3, size=SHAPE) / 2, np.nan)
    ids = rng.choice([-(2**31), -1, 0, 7, 2**31 - 1][:states], size=SHAPE)
    return rewards, np.where(valid, ids, rng.integers(-9, 9, size=SHAPE)).astype(np.int32), valid


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.booleans())
def test_step_groups_equal_grouping_by_dictionary(seed, scale_by_std):
    rewards, states, valid = drawn(seed)
    found = anchored(np.float32(rewards), states, valid, gamma=0.9, scale_by_std=scale_by_std)
    expected, shared = grouped(rewards, states, valid, 0.9, scale_by_std)
    close(found.advantages, expected, atol=3e-5)
    assert (float(found.shared[0]), float(found.shared[1])) == (shared, valid.sum())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9999), st.permutations(range(SHAPE[0])))
def test_order_of_rollouts_and_names_of_states_do_not_matter(seed, order):
    rewards, states, valid = drawn(seed)
    found = composed(np.float32(rewards), states, valid, step_weight=0.5).advantages
    turned = composed(np.float32(rewards[order]), (states * 31 + 5)[order], valid[order], step_weight=0.5).advantages
    close(turned, np.asarray(found)[order], atol=1e-5)


def test_group_ids_are_equal_exactly_where_all_keys_are():
    first, second = jnp.asarray([3, 3, 1, 3, 1, 3], jnp.int32), jnp.asarray([0, 1, 0, 0, 0, 0], jnp.int32)
    valid = jnp.asarray([True, True, True, True, True, False])
    ids = steps.group_ids(valid, first, second).tolist()
    assert ids[0] == ids[3] and ids[2] == ids[4] and len({ids[0], ids[1], ids[2]}) == 3
    assert ids[5] == 6 and max(ids[:5]) < 6


# Three rollouts: a b c and a b c with score 1, a b d with score 0; each action from a state of its own.
ACTIONS = jnp.asarray([[0, 1, 2], [0, 1, 2], [0, 1, 3]], jnp.int32)
SCORES = jnp.asarray([1, 1, 0], jnp.float32)
EVERYONE = jnp.ones((3, 3), jnp.bool_)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (steps.agent_prm_return_to_go, {"a": 0.6504166666666666, "b": 0.6583333333333333, "c": 1.0, "d": 0.0}),
        (
            steps.agent_prm_from_start,
            {"a": 0.6666666666666666, "b": 0.6583333333333333, "c": 0.9512499999999999, "d": 0.048750000000000016},
        ),
    ],
)
def test_agent_prm_worked_numbers(target, expected):
    a, b, c, d = (expected[name] for name in "abcd")
    close(target(SCORES, jnp.zeros_like(ACTIONS), ACTIONS, EVERYONE), [[a, b, c], [a, b, c], [a, b, d]])


def visited(scores, states, actions, valid, gamma, from_start):
    pairs = defaultdict(list)
    for n, k in np.argwhere(valid):
        exponent = k if from_start else valid[n].sum() - 1 - k
        pairs[states[n, k], actions[n, k]].append(gamma**exponent * (2 * scores[n] - 1))
    out = np.zeros(valid.shape)
    for n, k in np.argwhere(valid):
        out[n, k] = (1 + np.mean(pairs[states[n, k], actions[n, k]])) / 2
    return out


targets = {
    True: jax.jit(partial(steps.agent_prm_from_start, gamma=0.9)),
    False: jax.jit(partial(steps.agent_prm_return_to_go, gamma=0.9)),
}
compared = jax.jit(steps.action_advantages)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9999), st.booleans())
def test_agent_prm_targets_equal_a_loop_over_visits(seed, from_start):
    _, states, valid = drawn(seed, states=2)
    rng = np.random.default_rng(seed)
    actions, scores = rng.integers(0, 3, size=SHAPE).astype(np.int32), rng.integers(0, 5, size=SHAPE[0]) / 4
    expected = visited(scores, states, actions, valid, 0.9, from_start)
    found = targets[from_start](np.float32(scores), states, actions, valid)
    close(found, expected, atol=1e-6)
    tried = defaultdict(dict)
    for n, k in np.argwhere(valid):
        tried[states[n, k]][actions[n, k]] = expected[n, k]
    above = np.zeros(SHAPE)
    for n, k in np.argwhere(valid):
        above[n, k] = expected[n, k] - np.mean(list(tried[states[n, k]].values()))
    close(compared(found, states, actions, valid), above, atol=1e-6)


def test_action_advantage_worked_number():
    q_values, states = jnp.asarray([[0.7, 0.4, 0.4]], jnp.float32), jnp.zeros((1, 3), jnp.int32)
    actions = jnp.asarray([[0, 1, 1]], jnp.int32)  # one action twice: distinct actions count once
    found = steps.action_advantages(q_values, states, actions, jnp.ones((1, 3), jnp.bool_))
    close(found, [[0.1499999999999999, -0.15, -0.15]])


def test_vmap_under_jit_equals_a_loop_over_groups():
    rows = [drawn(seed) for seed in range(3)]
    rewards, states, valid = (np.stack(part) for part in zip(*rows, strict=True))
    rewards, actions = np.nan_to_num(rewards).astype(np.float32), (states & 1).astype(np.int32)

    def everything(rewards, states, actions, valid):
        scores = jnp.clip(rewards[:, 0], 0.0, 1.0)
        targets = [
            f(scores, states, actions, valid) for f in (steps.agent_prm_return_to_go, steps.agent_prm_from_start)
        ]
        return steps.gigpo(rewards, states, valid), targets, steps.action_advantages(targets[0], states, actions, valid)

    together = jax.jit(jax.vmap(everything))(rewards, states, actions, valid)
    one_by_one = jax.jit(everything)
    alone = [jax.tree.leaves(one_by_one(rewards[n], states[n], actions[n], valid[n])) for n in range(3)]
    for one, other in zip(jax.tree.leaves(together), zip(*alone, strict=True), strict=True):
        close(one, np.stack(other), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: steps.gigpo(REWARDS[:, :2], STATES, VALID), r"gigpo: rewards: expected \[N, K\]"),
        (lambda: steps.gigpo(REWARDS, STATES, VALID.astype(jnp.float32)), "gigpo: valid: expected bool"),
        (lambda: steps.anchor_step_advantages(REWARDS, STATES.astype(jnp.float32), VALID), "expected integers"),
        (lambda: steps.anchor_step_advantages(REWARDS, STATES, VALID, eps=0.0), "eps: expected a number above 0"),
        (lambda: steps.agent_prm_return_to_go(SCORES[:2], ACTIONS, ACTIONS, EVERYONE), "one a trajectory"),
        (lambda: steps.agent_prm_from_start(SCORES, ACTIONS, ACTIONS, EVERYONE, gamma=0.0), "gamma"),
        (lambda: steps.action_advantages(REWARDS, STATES, STATES[:1], VALID), "action_advantages: action_ids"),
        (lambda: steps.center_by_group(REWARDS, STATES[:1]), "center_by_group"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
