"""Credit of single turns from the other rollouts of a task: turns that start in the same state are compared.

A group is N trajectories of up to K turns. States and actions arrive as integers, equal where two of them
count as the same: the state *before* the action, without the turn's number or the history in it, or nothing
ever matches. `valid` bool[N, K] says which turns took place; a trajectory without one is no member of the
group. Rows are trajectories, so every mean over the group counts each of them once, however long it is.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.rl.advantages import group_centered
from agentrl_jax.rl.credit import reward_to_go


def group_ids(valid: Array, *keys: Array) -> Array:
    """A number for every distinct combination of keys: equal exactly where all keys are equal.

    Args:
      valid: bool, any shape of size M.
      *keys: integers of that shape.

    Returns:
      i32 of that shape: 0..M-1, and M where not valid.

    Raises:
      ValueError: `valid` is not bool, or a key has another shape, or is not of integers.

    No paper: a definition of this library, for `gigpo` and AgentPRM.
    """
    return _group_ids("group_ids", valid, **{f"keys[{n}]": key for n, key in enumerate(keys)})


def _group_ids(name: str, valid: Array, **keys: Array) -> Array:
    """As `group_ids`, with the names for its errors."""
    if valid.dtype != jnp.bool_:
        raise ValueError(f"{name}: valid: expected bool, got {valid.dtype}: compare with 0")
    for argument, key in keys.items():
        if key.shape != valid.shape:
            raise ValueError(f"{name}: {argument}: expected {valid.shape}, as valid, got {key.shape}")
    _check_integers(name, **keys)
    counted = jnp.asarray(valid).reshape(-1)
    flat = [jnp.asarray(key).reshape(-1) for key in keys.values()]
    order = jnp.lexsort((*flat, (~counted).astype(jnp.int32)))  # by validity first: the rest splits no group
    changes = jnp.zeros_like(counted)
    for key in flat:
        ordered = key[order]
        changes = changes | jnp.append(False, ordered[1:] != ordered[:-1])
    dense = jnp.cumsum(changes.astype(jnp.int32))
    return jnp.where(counted, jnp.zeros_like(dense).at[order].set(dense), counted.size).reshape(valid.shape)


def center_by_group(values: Array, groups: Array) -> tuple[Array, Array]:
    """(value - mean of its group, size of its group), both f32 of the shape of `values`.

    Args:
      values: f32, any shape of size M.
      groups: i32 of that shape, as of `group_ids`. Those of M get (0, 0), and their values are not read.

    A constant group, and a group of one, is exactly 0: values are first shifted by the least of their own.

    Raises:
      ValueError: shapes disagree, or groups are not integers.

    No paper: a definition of this library, the centering of `gigpo`.
    """
    if values.shape != groups.shape:
        raise ValueError(f"center_by_group: groups: expected {values.shape}, as values, got {groups.shape}")
    if not jnp.issubdtype(groups.dtype, jnp.integer):
        raise ValueError(f"center_by_group: groups: expected integers, got {groups.dtype}: see group_ids")
    flat, size = groups.reshape(-1), groups.size
    counted = flat < size
    values = jnp.where(counted, jnp.asarray(values, jnp.float32).reshape(-1), 0.0)
    shifted = values - jax.ops.segment_min(values, flat, size + 1)[flat]
    count = _total(counted.astype(jnp.float32), flat)
    centered = jnp.where(counted, shifted - _total(shifted, flat) / jnp.maximum(count, 1.0), 0.0)
    return centered.reshape(groups.shape), jnp.where(counted, count, 0.0).reshape(groups.shape)


class StepAdvantages(NamedTuple):
    """Credit of turns, and how much of it there is to have."""

    advantages: Array  # f32[N, K], 0 off valid
    shared: tuple[
        Array, Array
    ]  # (turns whose state another turn shares, turns): below all but 0, credit is per episode


def anchor_step_advantages(
    rewards: Array,
    state_ids: Array,
    valid: Array,
    *,
    gamma: float = 0.95,
    scale_by_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> StepAdvantages:
    """What a turn's return is worth beside the other turns, of any trajectory, that start in the same state.

    `R_k = sum_{l >= k} gamma^(l - k) r_l`, minus the mean over the state's turns and divided by their
    `std + eps`. A state seen once, or with equal returns, gives exactly 0. A state that one trajectory
    visits twice counts both visits; with gamma < 1 the later one is the nearer to the reward, and so is preferred.

    Args:
      rewards: f32[N, K] of each turn; one outcome stands on the trajectory's last turn.
      state_ids: i32[N, K].
      valid: bool[N, K].
      gamma: discount per turn, in [0, 1].
      scale_by_std: divide by the standard deviation; False is the default of the released helper.
      ddof: as in `advantages.group_centered`.
      eps: added to the standard deviation, above 0.

    Returns:
      `StepAdvantages`.

    Raises:
      ValueError: shapes disagree, `valid` is not bool, states are not integers, `gamma` or `ddof` is outside [0, 1], or
        `eps` is not above 0.

    Feng et al. 2025, GiGPO (https://arxiv.org/abs/2505.10978).
    """
    _check("anchor_step_advantages", valid, rewards=rewards, state_ids=state_ids)
    _check_settings("anchor_step_advantages", gamma, ddof, eps)
    groups = _group_ids("anchor_step_advantages", valid, state_ids=state_ids)
    returns = jax.vmap(partial(reward_to_go, gamma=gamma))(jnp.asarray(rewards), jnp.asarray(valid))
    advantages, count = center_by_group(returns, groups)
    if scale_by_std:
        squares = _total(jnp.square(advantages).reshape(-1), groups.reshape(-1)).reshape(valid.shape)
        advantages = advantages / (jnp.sqrt(squares / jnp.maximum(count - ddof, 1.0)) + eps)
    shared = jnp.sum((count > 1).astype(jnp.float32))
    return StepAdvantages(advantages, (shared, jnp.sum(valid.astype(jnp.float32))))


def gigpo(
    rewards: Array,
    state_ids: Array,
    valid: Array,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    scale_by_std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> StepAdvantages:
    """`A = A_episode + step_weight * A_step`: how the trajectory did in its group, and the turn in its state.

    A_episode is `advantages.group_centered` of the N total rewards (undiscounted, each trajectory once), on
    every turn; A_step is `anchor_step_advantages`. A group of one gets 0, where ports give its raw reward.
    Where `shared` is 0 this is GRPO.

    Args, returns and errors as in `anchor_step_advantages`; `step_weight` is w of the paper.

    Feng et al. 2025, GiGPO (https://arxiv.org/abs/2505.10978).
    """
    _check("gigpo", valid, rewards=rewards, state_ids=state_ids)
    _check_settings("gigpo", gamma, ddof, eps)
    _check_integers("gigpo", state_ids=state_ids)
    steps = anchor_step_advantages(
        rewards, state_ids, valid, gamma=gamma, scale_by_std=scale_by_std, ddof=ddof, eps=eps
    )
    totals = jnp.sum(jnp.where(valid, jnp.asarray(rewards, jnp.float32), 0.0), axis=1)
    episodes = group_centered(totals, jnp.any(valid, axis=1), scale_by_std=scale_by_std, ddof=ddof, eps=eps)
    return steps._replace(advantages=jnp.where(valid, episodes[:, None] + step_weight * steps.advantages, 0.0))


def agent_prm_return_to_go(
    scores: Array, state_ids: Array, action_ids: Array, valid: Array, *, gamma: float = 0.95
) -> Array:
    """Monte-Carlo targets of a process reward model, discounted from the end, as the paper has it.

    `Q(s, a) = (1 + mean over visits of gamma^(turns left) * (2 * score - 1)) / 2`: near the outcome the
    target is near 0 or 1, far from it near 1/2. Fit with soft-label cross-entropy. The absolute value
    pays for loitering: reward its differences, or `action_advantages`.

    Args:
      scores: f32[N] outcomes in [0, 1].
      state_ids: i32[N, K].
      action_ids: i32[N, K] the action alone, without the reasoning before it.
      valid: bool[N, K].
      gamma: discount per turn, in (0, 1].

    Returns:
      f32[N, K] in [0, 1], the same at every visit of a pair; 0 off valid.

    Raises:
      ValueError: shapes disagree, ids are not integers, or `gamma` is outside (0, 1].

    Choudhury 2025, AgentPRM (https://arxiv.org/abs/2502.10325).
    """
    _check("agent_prm_return_to_go", valid, state_ids=state_ids, action_ids=action_ids)
    turns = jnp.cumsum(valid.astype(jnp.float32), axis=1)
    pairs = _group_ids("agent_prm_return_to_go", valid, state_ids=state_ids, action_ids=action_ids)
    return _agent_prm("agent_prm_return_to_go", scores, turns[:, -1:] - turns, pairs, gamma)


def agent_prm_from_start(
    scores: Array, state_ids: Array, action_ids: Array, valid: Array, *, gamma: float = 0.95
) -> Array:
    """The targets of the released code: `gamma^k` counted from the start, so early turns get the boldest ones.

    Otherwise as `agent_prm_return_to_go`, which is the paper's. For comparison with models trained by that code.

    Choudhury 2025, AgentPRM (https://arxiv.org/abs/2502.10325).
    """
    _check("agent_prm_from_start", valid, state_ids=state_ids, action_ids=action_ids)
    turns = jnp.cumsum(valid.astype(jnp.float32), axis=1)
    pairs = _group_ids("agent_prm_from_start", valid, state_ids=state_ids, action_ids=action_ids)
    return _agent_prm("agent_prm_from_start", scores, jnp.maximum(turns - 1.0, 0.0), pairs, gamma)


def action_advantages(q_values: Array, state_ids: Array, action_ids: Array, valid: Array) -> Array:
    """`Q(s, a) - mean over the actions tried in s of Q(s, a')`, each distinct action counted once.

    Unlike Q itself it pays nothing for staying where Q is high.

    Args:
      q_values: f32[N, K], equal at every visit of a pair.
      state_ids: i32[N, K].
      action_ids: i32[N, K].
      valid: bool[N, K].

    Returns:
      f32[N, K], 0 off valid and where a state saw one action only.

    Raises:
      ValueError: shapes disagree, `valid` is not bool, or ids are not integers.

    No paper: a definition of this library, the advantage that AgentPRM's Q (https://arxiv.org/abs/2502.10325) lacks.
    """
    _check("action_advantages", valid, q_values=q_values, state_ids=state_ids, action_ids=action_ids)
    states = _group_ids("action_advantages", valid, state_ids=state_ids)
    pairs = _group_ids("action_advantages", valid, state_ids=state_ids, action_ids=action_ids)
    centered, _ = center_by_group(q_values, states)
    _, visits = center_by_group(q_values, pairs)
    share = jnp.where(valid, 1.0 / jnp.maximum(visits, 1.0), 0.0).reshape(-1)
    flat = states.reshape(-1)
    offset = _total(share * centered.reshape(-1), flat) / jnp.maximum(_total(share, flat), 1.0)
    return jnp.where(valid, centered - offset.reshape(valid.shape), 0.0)


def _agent_prm(name: str, scores: Array, exponents: Array, pairs: Array, gamma: float) -> Array:
    if scores.shape != pairs.shape[:1]:
        raise ValueError(f"{name}: scores: expected f32[{pairs.shape[0]}], one a trajectory, got {scores.shape}")
    if not 0 < gamma <= 1:
        raise ValueError(f"{name}: gamma: expected a number in (0, 1], got {gamma}")
    counted = (pairs < pairs.size).reshape(-1)
    signed = gamma**exponents * (2.0 * jnp.asarray(scores, jnp.float32) - 1.0)[:, None]
    flat = pairs.reshape(-1)
    count = _total(counted.astype(jnp.float32), flat)
    mean = _total(jnp.where(counted, signed.reshape(-1), 0.0), flat) / jnp.maximum(count, 1.0)
    return lax.stop_gradient(jnp.where(counted, 0.5 * (1.0 + mean), 0.0).reshape(pairs.shape))


def _total(values: Array, groups: Array) -> Array:
    """The sum of each entry's group, at every entry: flat [M], groups 0..M."""
    return jax.ops.segment_sum(values, groups, groups.size + 1)[groups]


def _check(name: str, valid: Array, **arrays: Array) -> None:
    if valid.ndim != 2 or valid.dtype != jnp.bool_:
        raise ValueError(f"{name}: valid: expected bool[N, K] of one group, got {valid.dtype}{list(valid.shape)}: vmap")
    for argument, array in arrays.items():
        if array.shape != valid.shape:
            raise ValueError(f"{name}: {argument}: expected [N, K] = {valid.shape} as valid has, got {array.shape}")


def _check_integers(name: str, **keys: Array) -> None:
    for argument, key in keys.items():
        if not jnp.issubdtype(key.dtype, jnp.integer):
            raise ValueError(f"{name}: {argument}: expected integers, got {key.dtype}: number what counts as the same")


def _check_settings(name: str, gamma: float, ddof: int, eps: float) -> None:
    if not 0 <= gamma <= 1:
        raise ValueError(f"{name}: gamma: expected a number in [0, 1], got {gamma}")
    if not 0 <= ddof <= 1:
        raise ValueError(f"{name}: ddof: expected 0 (population) or 1 (sample), got {ddof}")
    if not eps > 0:
        raise ValueError(f"{name}: eps: expected a number above 0, got {eps}: most states are seen once")
