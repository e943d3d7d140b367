"""Credit from branches: rollouts that share states, alternatives from one context, completions of a prefix.

A tree is an array of M nodes: `parents` i32[M], the index of the node that each one continues, -1 where it
starts at the task itself; parents come before their children. Padding is a node with parent -1 that is not
`valid`. Several nodes with parent -1 are siblings, as those of any other parent; a lone one is taken
for the task's starting state, which has none.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from agentrl_jax.rl.credit import gae
from agentrl_jax.rl.steps import center_by_group, group_ids


class RolloutTree(NamedTuple):
    """The estimates of `rtmc` at every turn of every rollout: f32[N, K] each, 0 off valid."""

    q_values: Array  # Q(s, a), discounted
    values: Array  # V(s), the mean of Q over visits
    smoothed_values: Array  # V'(s), drawn to the group's rate of success
    visits: Array  # N(s), rollouts that took an action in s, once for each action
    advantages: Array  # Q(s, a) - V'(s)


def rtmc(
    rewards: Array,
    state_ids: Array,
    action_ids: Array,
    valid: Array,
    *,
    gamma: float = 0.99,
    prior_count: float = 2.0,
    scale_by_std: bool = False,
    eps: float = 1e-6,
) -> RolloutTree:
    """Rollout-tree Monte Carlo: rollouts of one task that meet in a state estimate each other's values.

    First-visit: `Q(s, a)` is the mean of `gamma^(turns left) * R` over the rollouts that took a in s, each at
    its first visit; `V(s) = sum_a N(s, a) Q(s, a) / N(s)`; `V'(s) = (N(s) V(s) + prior_count * p) /
    (N(s) + prior_count)` with p the group's mean reward; `A = Q(s, a) - V'(s)` at every visit. Without the
    prior a state seen once has no advantage. p is not discounted, so long successes start a little negative.
    Equal rewards and gamma 1 give exactly 0.

    Args:
      rewards: f32[N] terminal rewards, in [0, 1].
      state_ids: i32[N, K] signature of the state before the action: nothing of what the action led to.
      action_ids: i32[N, K].
      valid: bool[N, K] turns that took place. A rollout without one (it failed) counts nowhere.
      gamma: discount per turn, in (0, 1].
      prior_count: how many visits the prior is worth, 0 or more.
      scale_by_std: divide by the sample standard deviation of A over the group's turns; A is not centred.
      eps: added to the standard deviation.

    Returns:
      `RolloutTree`.

    Raises:
      ValueError: shapes disagree, ids are not integers, or a static argument is outside the range above.

    RTMC, 2026 (https://arxiv.org/abs/2604.11037).
    """
    _check_group(rewards, state_ids, action_ids, valid)
    if not 0 < gamma <= 1 or prior_count < 0:
        raise ValueError(f"rtmc: expected gamma in (0, 1] and prior_count >= 0, got {gamma} and {prior_count}")
    states, pairs = group_ids(valid, state_ids), group_ids(valid, state_ids, action_ids)
    members = jnp.any(valid, axis=1)
    rewards = jnp.where(members, jnp.asarray(rewards, jnp.float32), 0.0)
    turns = jnp.cumsum(valid.astype(jnp.float32), axis=1)
    first = valid & ~jax.vmap(_repeated)(pairs)
    # Everything is measured from one member's reward, so that equal rewards leave exact zeros.
    origin = rewards[jnp.argmax(members)]
    returns = jnp.where(first, gamma ** (turns[:, -1:] - turns) * rewards[:, None] - origin, 0.0)
    prior = jnp.sum(jnp.where(members, rewards - origin, 0.0)) / jnp.maximum(jnp.sum(members.astype(jnp.float32)), 1.0)
    (q_values, _), (values, visits) = _mean(returns, first, pairs), _mean(returns, first, states)
    smoothed = (visits * values + prior_count * prior) / jnp.maximum(visits + prior_count, 1.0)
    advantages = jnp.where(valid, q_values - smoothed, 0.0)
    if scale_by_std:
        advantages = advantages / (_std(advantages, valid) + eps)
    q_values, values, smoothed = (jnp.where(valid, each + origin, 0.0) for each in (q_values, values, smoothed))
    return RolloutTree(q_values, values, smoothed, jnp.where(valid, visits, 0.0), advantages)


def check_tree(parents: np.ndarray) -> None:
    """Refuse parents that are no tree in order. Runs on the host.

    Raises:
      ValueError: names the first node whose parent does not come before it.
    """
    parents = np.asarray(parents)
    if parents.ndim != 1 or not np.issubdtype(parents.dtype, np.integer):
        raise ValueError(f"check_tree: parents: expected i32[M], got {parents.dtype}{list(parents.shape)}")
    wrong = np.flatnonzero((parents < -1) | (parents >= np.arange(parents.size)))
    if wrong.size:
        node = wrong[0]
        raise ValueError(f"check_tree: parents: node {node} has parent {parents[node]}, expected -1..{node - 1}")


def check_siblings(parents: np.ndarray, valid: np.ndarray | None = None) -> None:
    """Refuse a sibling group of one: an alternative without another has no counterfactual. Runs on the host.

    Args:
      parents: i32[M].
      valid: bool[M], nodes that count; None is all.

    Raises:
      ValueError: names the first such node, or the first one out of order.
    """
    check_tree(parents)
    parents = np.asarray(parents)
    counted = np.ones(parents.shape, bool) if valid is None else np.asarray(valid)
    _check("check_siblings", parents, valid=counted)
    alternatives = np.bincount(parents[counted] + 1, minlength=parents.size + 1)[parents + 1]
    alone = counted & (parents >= 0) & (alternatives == 1)
    if alone.any():
        node = int(np.argmax(alone))
        raise ValueError(
            f"check_siblings: node {node} is the only alternative that counts under its parent {parents[node]}: "
            "sample at least two from the same context, or set valid to False there"
        )


class SubtreeMeans(NamedTuple):
    """What came of each node."""

    means: Array  # f32[M] mean reward of the leaves below (of the node itself, where it is one); 0 where none counts
    leaves: Array  # f32[M] how many leaves count: 0 means unscored, and not a reward of 0


def subtree_means(parents: Array | np.ndarray, rewards: Array, valid: Array | None = None) -> SubtreeMeans:
    """The value of a node as the mean terminal reward of all leaves below it, each leaf alike.

    Args:
      parents: i32[M]. A numpy array is checked; `check_tree` checks others, on the host.
      rewards: f32[M]; only those of leaves are read. A leaf is a node that no node continues.
      valid: bool[M]; a leaf that is not valid (padding, or it failed) counts nowhere. None is all.

    Returns:
      `SubtreeMeans`.

    Raises:
      ValueError: shapes disagree, or numpy parents are out of order.
    """
    if isinstance(parents, np.ndarray):
        check_tree(parents)
    _check("subtree_means", parents, rewards=rewards, **({} if valid is None else {"valid": valid}))
    parents, size = jnp.asarray(parents), parents.shape[0]
    above = jnp.where(parents < 0, size, parents)
    scored = jnp.ones((size + 1,), jnp.bool_).at[above].set(False)[:size]
    if valid is not None:
        scored = scored & valid
    rewards = jnp.where(scored, jnp.asarray(rewards, jnp.float32), 0.0)
    origin = rewards[jnp.argmax(scored)]  # equal rewards have that very mean
    own = jnp.stack([jnp.where(scored, rewards - origin, 0.0), scored.astype(jnp.float32)], axis=1)

    def lift(sums: Array, node: tuple[Array, Array]) -> tuple[Array, None]:
        child, parent = node
        return sums.at[parent].add(sums[child]), None

    sums = jnp.append(own, jnp.zeros((1, 2), jnp.float32), axis=0)
    sums, _ = lax.scan(lift, sums, (jnp.arange(size), above), reverse=True)
    leaves = sums[:size, 1]
    return SubtreeMeans(jnp.where(leaves > 0, origin + sums[:size, 0] / jnp.maximum(leaves, 1.0), 0.0), leaves)


def sibling_advantages(
    parents: Array | np.ndarray, values: Array, valid: Array | None = None, *, leave_one_out: bool = True
) -> Array:
    """Contextual counterfactual credit: what an alternative is worth beside the others from the same context.

    `A_k = v_k - mean_{j != k} v_j` over the valid nodes with the same parent, a frozen context. With values of
    `subtree_means` this is the reward-only form of C3, with a critic's q-values its value-only form.

    Args:
      parents: i32[M]. A numpy array is checked by `check_siblings`: a group of one is an error. Traced parents
        cannot be: call it on the host; here a group of one gets 0.
      values: f32[M].
      valid: bool[M]; pass `leaves > 0` where a continuation may have failed. None is all.
      leave_one_out: False takes the mean over all n siblings, itself included: (n - 1) / n of the advantage.

    Returns:
      f32[M], 0 off valid.

    Raises:
      ValueError: shapes disagree, or numpy parents are out of order or leave a node without a sibling.

    C3, 2026 (https://arxiv.org/abs/2603.06859).
    """
    groups = _sibling_groups("sibling_advantages", parents, valid, values=values)
    return _from_siblings(values, groups, leave_one_out)


def value_assisted_advantages(
    parents: Array | np.ndarray,
    values: Array,
    q_values: Array,
    valid: Array | None = None,
    *,
    alpha: float = 1.0,
    leave_one_out: bool = True,
) -> Array:
    """The value-assisted form of C3: the baseline is drawn from a critic's view of the siblings.

    `A = v - ((1 - alpha) * baseline(v) + alpha * baseline(q))`, with the baselines of `sibling_advantages`:
    alpha 0 is its reward-only form. Other arguments, result and errors as there.

    Args:
      q_values: f32[M] of the critic.
      alpha: in [0, 1].

    C3, 2026 (https://arxiv.org/abs/2603.06859).
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"value_assisted_advantages: alpha: expected a number in [0, 1], got {alpha}")
    groups = _sibling_groups("value_assisted_advantages", parents, valid, values=values, q_values=q_values)
    _, count = center_by_group(values, groups)
    compared = count > 1
    values, q_values = (jnp.where(compared, jnp.asarray(x, jnp.float32), 0.0) for x in (values, q_values))
    own, critic = (_from_siblings(x, groups, leave_one_out) for x in (values, q_values))
    return (1.0 - alpha) * own + alpha * jnp.where(compared, values - q_values + critic, 0.0)


class SuccessRate(NamedTuple):
    """A chance of success estimated from attempts."""

    mean: Array  # f32, successes / attempts
    standard_error: Array  # f32, sqrt(mean (1 - mean) / attempts)


def success_rate(successes: Array, attempts: Array) -> SuccessRate:
    """Monte-Carlo value of a state: how many of its completions succeeded, elementwise over one shape.

    No attempt is no estimate: it gives NaN, and not a failure. At 9 attempts the error of a mean near 1/2 is 0.17.

    Raises:
      ValueError: shapes disagree.
    """
    if successes.shape != attempts.shape:
        raise ValueError(f"success_rate: expected one shape, got {successes.shape} and {attempts.shape}")
    attempts = jnp.asarray(attempts, jnp.float32)
    mean = jnp.asarray(successes, jnp.float32) / attempts
    return SuccessRate(mean, jnp.sqrt(mean * (1.0 - mean) / attempts))


def vine(values: Array, rewards: Array, valid: Array) -> Array:
    """`A_k = r_k + V(s_{k+1}) - V(s_k)` with V from completions of every prefix, and V(terminal) = 0.

    The sum over a trajectory telescopes to `sum r - V(s_0)`. The one-step case of `credit.gae`.

    Args:
      values: f32[K] of the state before each step, e.g. `success_rate(...).mean`.
      rewards: f32[K]; in the paper the final reward on the last step (`credit.on_last_action`), 0 before.
      valid: bool[K] steps that took place.

    Returns:
      f32[K], 0 off valid; `credit.to_tokens` puts it on tokens.

    Raises:
      ValueError: shapes disagree, or `valid` is not bool.

    Kazemnejad et al. 2024, VinePPO (https://arxiv.org/abs/2410.01679).
    """
    return gae(rewards, values, valid, gamma=1.0, lam=0.0).advantages


def _check_group(rewards: Array, state_ids: Array, action_ids: Array, valid: Array) -> None:
    if valid.ndim != 2 or valid.dtype != jnp.bool_ or rewards.shape != valid.shape[:1]:
        found = f"{rewards.shape} and {valid.dtype}{list(valid.shape)}"
        raise ValueError(f"rtmc: expected rewards f32[N] and valid bool[N, K] of one group, got {found}: vmap")
    if not state_ids.shape == action_ids.shape == valid.shape:
        found = f"{state_ids.shape} and {action_ids.shape}"
        raise ValueError(f"rtmc: expected state_ids and action_ids of shape {valid.shape} as valid has, got {found}")


def _std(values: Array, valid: Array) -> Array:
    """Sample standard deviation over what is valid: f32[]."""
    centered, count = center_by_group(values, jnp.where(valid, 0, valid.size))
    return jnp.sqrt(jnp.sum(jnp.square(centered)) / jnp.maximum(jnp.max(count) - 1.0, 1.0))


def _repeated(pairs: Array) -> Array:
    """bool[K] the same number stood earlier in the row."""
    return jnp.any(jnp.tril(pairs[:, None] == pairs[None], -1), axis=1)


def _mean(values: Array, counted: Array, groups: Array) -> tuple[Array, Array]:
    """(mean of the counted values of each entry's group, how many there are), at every entry."""
    flat, size = groups.reshape(-1), groups.size + 1
    totals = jax.ops.segment_sum(jnp.where(counted, values, 0.0).reshape(-1), flat, size)
    counts = jax.ops.segment_sum(counted.astype(jnp.float32).reshape(-1), flat, size)
    means = totals / jnp.maximum(counts, 1.0)
    return means[flat].reshape(groups.shape), counts[flat].reshape(groups.shape)


def _sibling_groups(name: str, parents: Array | np.ndarray, valid: Array | None, **values: Array) -> Array:
    _check(name, parents, **values, **({} if valid is None else {"valid": valid}))
    if isinstance(parents, np.ndarray):
        if isinstance(valid, Tracer):
            check_tree(parents)
        else:
            check_siblings(parents, None if valid is None else np.asarray(valid))
    counted = jnp.ones(parents.shape, jnp.bool_) if valid is None else jnp.asarray(valid)
    return group_ids(counted, jnp.asarray(parents))


def _from_siblings(values: Array, groups: Array, leave_one_out: bool) -> Array:
    centered, count = center_by_group(values, groups)
    return centered * (count / jnp.maximum(count - 1.0, 1.0)) if leave_one_out else centered


def _check(name: str, parents: Array | np.ndarray, **arrays: Array | np.ndarray) -> None:
    if parents.ndim != 1:
        raise ValueError(f"{name}: parents: expected i32[M] of one tree, got shape {parents.shape}: vmap over trees")
    for argument, array in arrays.items():
        if array.shape != parents.shape:
            raise ValueError(f"{name}: {argument}: expected [M] = {parents.shape} as parents has, got {array.shape}")
