"""Credit from branches: worked numbers, dictionaries and loops as the papers have them, groups of one."""

from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import trees
from agentrl_jax.rl.credit import on_last_action


def floats(*values):
    return jnp.asarray(values, jnp.float32)


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


subtree_means = jax.jit(trees.subtree_means)
siblings = jax.jit(trees.sibling_advantages, static_argnames="leave_one_out")
assisted = jax.jit(trees.value_assisted_advantages, static_argnames=("alpha", "leave_one_out"))
vine = jax.jit(trees.vine)
rtmc = jax.jit(trees.rtmc, static_argnames=("gamma", "prior_count", "scale_by_std", "eps"))

# Four rollouts of two turns; S0 S1 S2 are 0 1 2, and view grep fixA fixB are 0 1 2 3.
OUTCOMES = floats(1, 0, 1, 0)
STATES = jnp.asarray([[0, 1], [0, 1], [0, 2], [0, 1]], jnp.int32)
ACTIONS = jnp.asarray([[0, 2], [0, 3], [1, 2], [0, 2]], jnp.int32)
EVERY = jnp.ones((4, 2), jnp.bool_)


def test_rtmc_worked_numbers():
    found = rtmc(OUTCOMES, STATES, ACTIONS, EVERY)
    close(found.q_values, [[0.33, 0.5], [0.33, 0.0], [0.99, 1.0], [0.33, 0.5]])
    close(found.values, [[0.495, 1 / 3], [0.495, 1 / 3], [0.495, 1.0], [0.495, 1 / 3]])
    smoothed = {0: 0.49666666666666665, 1: 0.4, 2: 0.6666666666666666}
    close(found.smoothed_values, [[smoothed[int(s)] for s in row] for row in STATES])
    close(found.visits, [[4, 3], [4, 3], [4, 1], [4, 3]])
    advantages = [[-0.16666666666666663, 0.09999999999999998], [-0.16666666666666663, -0.4]]
    advantages += [[0.49333333333333335, 0.33333333333333337], advantages[0]]
    close(found.advantages, advantages)
    # The prior is the group's undiscounted rate of success: far more of it than visits leaves nothing else.
    close(rtmc(OUTCOMES, STATES, ACTIONS, EVERY, prior_count=1e7).smoothed_values, np.full((4, 2), 0.5))


def test_rtmc_without_the_prior_worked_numbers():
    found = rtmc(OUTCOMES, STATES, ACTIONS, EVERY, prior_count=0.0)
    expected = [[-0.16499999999999998, 0.16666666666666669], [-0.16499999999999998, -0.3333333333333333]]
    close(found.advantages, [*expected, [0.495, 0.0], expected[0]])  # a state seen once has no advantage


def test_rtmc_scaled_divides_by_the_std_and_does_not_centre():
    plain = np.asarray(rtmc(OUTCOMES, STATES, ACTIONS, EVERY).advantages, np.float64)
    found = rtmc(OUTCOMES, STATES, ACTIONS, EVERY, scale_by_std=True).advantages
    close(found, plain / (plain.std(ddof=1) + 1e-6))


def test_a_repeated_action_counts_once_and_is_credited_at_every_occurrence():
    states, actions = jnp.asarray([[0, 0, 1], [0, 1, 1]], jnp.int32), jnp.asarray([[5, 5, 6], [7, 6, 6]], jnp.int32)
    valid = jnp.asarray([[True, True, True], [True, True, False]])
    found = rtmc(floats(1, 0), states, actions, valid, gamma=0.5, prior_count=0.0)
    close(found.q_values, [[0.25, 0.25, 0.5], [0.0, 0.5, 0.0]])
    close(found.visits, [[2, 2, 2], [2, 2, 0]])
    close(found.advantages, [[0.125, 0.125, 0.0], [-0.125, 0.0, 0.0]])


def test_a_failed_rollout_leaves_the_tree_and_the_prior():
    wide = [jnp.append(x, x[:1], axis=0) for x in (OUTCOMES, STATES, ACTIONS)]
    wide[0] = wide[0].at[4].set(jnp.nan)
    found = rtmc(*wide, jnp.append(EVERY, ~EVERY[:1], axis=0))
    close(found.advantages[:4], rtmc(OUTCOMES, STATES, ACTIONS, EVERY).advantages)
    assert not np.any(found.advantages[4])


@pytest.mark.parametrize("scale_by_std", [False, True])
def test_p31_equal_rewards_give_exactly_zero_without_a_discount(scale_by_std):
    rng = np.random.default_rng(0)
    states, actions = (jnp.asarray(rng.integers(0, 3, size=(7, 5)), jnp.int32) for _ in range(2))
    valid = jnp.ones((7, 5), jnp.bool_)
    found = rtmc(jnp.full((7,), 0.1), states, actions, valid, gamma=1.0, scale_by_std=scale_by_std)
    assert not np.any(found.advantages)


def rollout_tree(rewards, states, actions, valid, gamma, prior_count):
    """Dictionaries from signatures to first-visit returns, in float64."""
    members = [n for n in range(len(rewards)) if valid[n].any()]
    returns = defaultdict(list)
    for n in members:
        turns, seen = int(valid[n].sum()), set()
        for t in range(turns):
            pair = (states[n, t], actions[n, t])
            if pair not in seen:
                seen.add(pair)
                returns[pair].append(gamma ** (turns - 1 - t) * rewards[n])
    prior = np.mean([rewards[n] for n in members]) if members else 0.0
    out = np.zeros(valid.shape)
    for n, t in np.argwhere(valid):
        of_state = {pair: found for pair, found in returns.items() if pair[0] == states[n, t]}
        count = sum(len(found) for found in of_state.values())
        value = sum(len(found) * np.mean(found) for found in of_state.values()) / count
        smoothed = (count * value + prior_count * prior) / (count + prior_count)
        out[n, t] = np.mean(returns[states[n, t], actions[n, t]]) - smoothed
    return out


def drawn(seed, shape=(5, 6)):
    rng = np.random.default_rng(seed)
    valid = np.arange(shape[1])[None] < rng.integers(0, shape[1] + 1, size=shape[0])[:, None]
    states, actions = rng.integers(0, 3, size=(2, *shape)).astype(np.int32)
    rewards = np.where(valid.any(axis=1), rng.integers(0, 5, size=shape[0]) / 4, np.nan)
    return rewards, states, actions, valid


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.sampled_from([0.0, 2.0]))
def test_rtmc_equals_dictionaries_of_signatures(seed, prior_count):
    rewards, states, actions, valid = drawn(seed)
    found = rtmc(np.float32(rewards), states, actions, valid, gamma=0.9, prior_count=prior_count)
    close(found.advantages, rollout_tree(rewards, states, actions, valid, 0.9, prior_count))


# Two plans, four continuations of each.
PARENTS = np.asarray([-1, -1, 0, 0, 0, 0, 1, 1, 1, 1], np.int32)
LEAVES = floats(0, 0, 1, 0, 1, 1, 0, 0, 1, 0)


def test_c3_worked_numbers():
    nodes = subtree_means(PARENTS, LEAVES)
    close(nodes.means[:2], [0.75, 0.25])
    close(nodes.leaves, [4, 4] + [1] * 8)
    close(nodes.means[2:], LEAVES[2:])
    found = siblings(PARENTS, nodes.means)
    close(found[:2], [0.5, -0.5])
    leaf = [0.33333333333333337, -1.0, 0.33333333333333337, 0.33333333333333337]
    leaf += [-0.3333333333333333, -0.3333333333333333, 1.0, -0.3333333333333333]
    close(found[2:], leaf)
    whole = siblings(PARENTS, nodes.means, leave_one_out=False)
    close(whole[:2], [0.25, -0.25])
    close(whole[2:], 0.75 * np.asarray(leaf))  # (n - 1) / n of leave-one-out
    flat = siblings(np.full((8,), -1, np.int32), LEAVES[2:], leave_one_out=False)
    close(flat, [0.5, -0.5, 0.5, 0.5, -0.5, -0.5, 0.5, -0.5])  # one flat group credits the leaves of a bad plan


def test_c3_value_assisted_worked_numbers():
    plans, rewards, critic = np.asarray([-1, -1], np.int32), floats(0.75, 0.25), floats(0.6, 0.3)
    close(assisted(plans, rewards, critic), [0.45000000000000007, -0.34999999999999987])
    reward_only = siblings(plans, rewards)
    close(assisted(plans, rewards, critic, alpha=0.0), reward_only)
    close(assisted(plans, rewards, critic, alpha=0.5), [0.475, -0.425])
    close(siblings(plans, critic), [0.3, -0.3])  # value only
    whole = assisted(plans, rewards, critic, leave_one_out=False)
    close(whole, [0.75 - 0.45, 0.25 - 0.45])


def test_a_sibling_group_of_one_is_an_error_where_it_can_be_seen():
    lone = np.asarray([-1, 0, 0, 1], np.int32)
    for call in (
        lambda: trees.check_siblings(lone),
        lambda: trees.sibling_advantages(lone, jnp.zeros((4,))),
        lambda: trees.value_assisted_advantages(lone, jnp.zeros((4,)), jnp.zeros((4,))),
    ):
        with pytest.raises(ValueError, match=r"node 3 is the only alternative .* parent 1"):
            call()
    trees.check_siblings(lone[:3])  # a lone start is the starting state, and has no alternative
    trees.check_siblings(lone, np.asarray([True, True, True, False]))
    with pytest.raises(ValueError, match="node 1 is the only alternative"):
        trees.check_siblings(lone[:3], np.asarray([True, True, False]))
    traced = jax.jit(trees.sibling_advantages)(lone, floats(0, 1, 0, np.pi))
    assert np.asarray(traced).tolist() == [0, 1, -1, 0]


def test_parents_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"node 1 has parent 2, expected -1\.\.0"):
        trees.subtree_means(np.asarray([-1, 2, 0]), jnp.zeros((3,)))
    with pytest.raises(ValueError, match="check_tree: parents: node 0 has parent -2"):
        trees.check_tree(np.asarray([-2]))
    with pytest.raises(ValueError, match="check_tree: parents: expected i32"):
        trees.check_tree(np.asarray([-1.0]))


def test_p31_equal_leaves_give_exactly_zero_under_subtrees_of_any_size():
    parents = np.asarray([-1, -1, *[0] * 7, *[1] * 3], np.int32)
    nodes = subtree_means(parents, jnp.full((12,), 0.1))
    np.testing.assert_array_equal(nodes.means, np.full((12,), 0.1, np.float32))
    assert not np.any(siblings(parents, nodes.means))


def test_a_failed_continuation_leaves_its_siblings_and_its_ancestors():
    valid = np.ones((10,), bool)
    valid[2] = False
    nodes = subtree_means(PARENTS, LEAVES.at[2].set(jnp.nan), valid)
    close(nodes.means[:3], [2 / 3, 0.25, 0.0])
    close(nodes.leaves[:3], [3, 4, 0])
    found = siblings(PARENTS, nodes.means, np.asarray(nodes.leaves > 0))
    close(found[2:6], [0, -1, 0.5, 0.5])


def any_tree(seed, size=9):
    """A random forest with a failed node here and there, of which the last may be padding."""
    rng = np.random.default_rng(seed)
    parents = np.asarray([rng.integers(-1, node) if node else -1 for node in range(size)], np.int32)
    valid = rng.random(size) < 0.85
    padding = np.arange(size) >= rng.integers(3, size + 1)
    parents[padding], valid[padding] = -1, False
    rewards = np.where(valid, rng.integers(0, 5, size=size) / 4, np.nan)
    return parents, rewards, valid


def below(node, parents, rewards, valid):
    """Rewards of the valid leaves under a node, by recursion."""
    children = np.flatnonzero(parents == node)
    if children.size == 0:
        return [rewards[node]] if valid[node] else []
    return [reward for child in children for reward in below(child, parents, rewards, valid)]


@jax.jit
def assess(parents, rewards, valid, critic):
    nodes = trees.subtree_means(parents, rewards, valid)
    scored = nodes.leaves > 0
    loo, whole = (
        partial(trees.sibling_advantages, leave_one_out=x)(parents, nodes.means, scored) for x in (True, False)
    )
    return nodes, loo, whole, trees.value_assisted_advantages(parents, nodes.means, critic, scored, alpha=0.25)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999))
def test_trees_equal_a_recursion_and_siblings_a_loop(seed):
    parents, rewards, valid = any_tree(seed)
    critic = np.random.default_rng(seed).random(9)
    nodes, loo, whole, helped = assess(parents, np.float32(rewards), valid, np.float32(critic))
    leaves = [below(node, parents, rewards, valid) for node in range(9)]
    means = np.asarray([np.mean(found) if found else 0.0 for found in leaves])
    close(nodes.means, means)
    close(nodes.leaves, [len(found) for found in leaves])
    for node in range(9):
        others = [k for k in range(9) if leaves[k] and parents[k] == parents[node] and k != node]
        if not leaves[node] or not others:
            assert loo[node] == whole[node] == helped[node] == 0
            continue
        baseline, view = np.mean(means[others]), np.mean(critic[others])
        close(loo[node], means[node] - baseline)
        close(whole[node], means[node] - np.mean(means[[*others, node]]))
        close(helped[node], means[node] - (0.75 * baseline + 0.25 * view))
    for parent in set(parents[np.asarray(nodes.leaves) > 0]):
        close(np.asarray(loo)[parents == parent].sum(), 0, atol=1e-5)


def test_vine_worked_numbers():
    values = trees.success_rate(jnp.asarray([3, 5, 2], jnp.int32), jnp.full((3,), 9, jnp.int32)).mean
    close(values, [0.3333333333333333, 0.5555555555555556, 0.2222222222222222])
    steps = jnp.ones((3,), jnp.bool_)
    found = vine(values, on_last_action(1.0, steps), steps)
    close(found, [2 / 9, -3 / 9, 7 / 9])
    close(found.sum(), 0.6666666666666667)
    close(1.0 - values[0], 0.6666666666666667)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 6))
def test_vine_telescopes_from_the_outcome_to_the_first_value(seed, count):
    rng = np.random.default_rng(seed)
    steps = np.arange(6) < count
    values, rewards = (np.where(steps, rng.random(6), np.nan) for _ in range(2))
    found = np.asarray(vine(np.float32(values), np.float32(rewards), steps))
    close(found.sum(), rewards[:count].sum() - values[0], atol=1e-5)
    close(found[:count], rewards[:count] + np.append(values[1:count], 0.0) - values[:count])


def test_monte_carlo_values_worked_numbers():
    found = trees.success_rate(jnp.asarray([5, 0], jnp.int32), jnp.asarray([8, 0], jnp.int32))
    close(found.mean, [0.625, np.nan])
    close(found.standard_error, [0.1711632992203644, np.nan])


def test_vmap_under_jit_equals_a_loop_over_trees():
    groups = [drawn(seed) for seed in range(3)]
    forests = [any_tree(seed) for seed in range(3)]
    grouped, grown = (tuple(np.stack(part) for part in zip(*each, strict=True)) for each in (groups, forests))
    grouped = (np.nan_to_num(grouped[0]).astype(np.float32), *grouped[1:])
    grown = (grown[0], np.nan_to_num(grown[1]).astype(np.float32), grown[2])

    def everything(group, tree):
        return (
            trees.rtmc(*group, scale_by_std=True),
            assess(*tree, tree[1] + 1.0),
            trees.vine(tree[1], tree[1], tree[2]),
        )

    together = jax.jit(jax.vmap(everything))(grouped, grown)
    one_by_one = jax.jit(everything)
    alone = [jax.tree.leaves(one_by_one(*jax.tree.map(lambda x, n=n: x[n], (grouped, grown)))) for n in range(3)]
    for one, other in zip(jax.tree.leaves(together), zip(*alone, strict=True), strict=True):
        close(one, np.stack(other), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: trees.rtmc(OUTCOMES[:3], STATES, ACTIONS, EVERY), "rtmc: expected rewards"),
        (lambda: trees.rtmc(OUTCOMES, STATES[:, :1], ACTIONS, EVERY), "rtmc: expected state_ids"),
        (lambda: trees.rtmc(OUTCOMES, STATES, ACTIONS, EVERY, gamma=0.0), "rtmc: expected gamma"),
        (lambda: trees.rtmc(OUTCOMES, STATES, ACTIONS, EVERY, prior_count=-1.0), "prior_count >= 0"),
        (lambda: trees.subtree_means(PARENTS, LEAVES[:4]), "subtree_means: rewards"),
        (lambda: trees.sibling_advantages(PARENTS[None], LEAVES), "vmap over trees"),
        (lambda: trees.sibling_advantages(PARENTS, LEAVES, np.ones((3,), bool)), "sibling_advantages: valid"),
        (lambda: trees.value_assisted_advantages(PARENTS, LEAVES, LEAVES, alpha=1.5), "alpha"),
        (lambda: trees.success_rate(jnp.zeros((2,)), jnp.zeros((3,))), "success_rate"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_lone_alternative_is_refused_whatever_kind_of_array_says_who_counts():
    parents, values = np.asarray([-1, 0, 0, 1]), jnp.asarray([0.0, 1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="node 3"):
        trees.sibling_advantages(parents, values, jnp.ones(4, bool))
    with pytest.raises(ValueError, match="node 0"):
        trees.sibling_advantages(np.asarray([1, -1, 0, 0]), values, jnp.ones(4, bool))
