"""Credit of turns, as the training loop takes it: one group in, f32[G, K] out, laid on tokens beside the episode's.

`A_t = objective.advantage(rewards)[trajectory of t] + credit[trajectory of t, turn of t]`

Two kinds. One *adds* to the episode's advantage: `potential_credit` and `step_credit` are 0 where nothing was gained
and no state is shared. The other *is* the credit, the outcome in it: `rtmc_credit` and `branch_credit` want an
objective with `advantage=credit_only`, or the outcome counts twice. `speaks_for_episodes` tells which one a credit is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import partial_eval

from agentrl_jax.batch import GroupTurns
from agentrl_jax.rl.potentials import potential_difference
from agentrl_jax.rl.steps import anchor_step_advantages, center_by_group
from agentrl_jax.rl.trees import rtmc
from agentrl_jax.rl.types import TurnCredit


def potential_credit(*, scale: float) -> TurnCredit:
    """What a turn brought: `scale * (Phi(s_{k+1}) - Phi(s_k))`, with Phi the evidence gained so far. Adds.

    It sums to `scale` times what the trajectory gained, by whatever path: a detour that finds nothing pays nothing, and
    nothing is paid twice. It is credit beside the outcome's and no part of the reward, so constraints, outcome and
    quality rank as before; a trajectory that broke a constraint gets none. A progress term (PAV with an evidence
    count as its prover), not policy-invariant shaping: keep `scale` times the most evidence there is below the
    difference that the outcome makes.

    Args:
      scale: above 0.

    Raises:
      ValueError: `scale` is not above 0.

    Setlur et al. 2024 (https://arxiv.org/abs/2410.08146); Ng, Harada and Russell 1999.
    """
    if not scale > 0:
        raise ValueError(f"potential_credit: scale: expected a number above 0, got {scale}")

    def credit(turns: GroupTurns, rewards: Array, valid: Array) -> Array:
        del rewards
        paid = turns.valid & (valid & ~turns.violated)[:, None]
        return scale * jax.vmap(potential_difference)(turns.potentials, paid)

    return credit


def step_credit(
    *, gamma: float = 0.95, weight: float = 1.0, scale_by_std: bool = True, ddof: int = 1, eps: float = 1e-6
) -> TurnCredit:
    """GiGPO's step term: `weight * (return from this turn on, beside the turns that start in the same state)`. Adds.

    With an objective whose advantage is `group_centered` the sum is the paper's `A = A_E + w * A_S`. Settings and
    errors are those of `steps.anchor_step_advantages`. A state met once gives 0. A baseline may be any function of what
    came before the action, so states that are taken for one another cost variance here, and no bias.

    Feng et al. 2025, GiGPO (https://arxiv.org/abs/2505.10978).
    """
    settings: Any = {"gamma": gamma, "scale_by_std": scale_by_std, "ddof": ddof, "eps": eps}

    def credit(turns: GroupTurns, rewards: Array, valid: Array) -> Array:
        counted = turns.valid & valid[:, None]
        last = counted & (lax.cumsum(counted.astype(jnp.int32), axis=1, reverse=True) == 1)
        found = anchor_step_advantages(jnp.where(last, rewards[:, None], 0.0), turns.state_ids, counted, **settings)
        return weight * found.advantages

    return credit


def rtmc_credit(
    *, gamma: float = 0.99, prior_count: float = 2.0, scale_by_std: bool = False, eps: float = 1e-6
) -> TurnCredit:
    """RTMC: `Q(s, a) - V'(s)` from all rollouts of the group that pass through s. Speaks for the episode.

    Settings and errors are those of `trees.rtmc`; with `prior_count=0` a state met once has no credit, and it adds.
    Other than in `step_credit`, states that are taken for one another give a wrong Q, not just a noisier one.

    RTMC, 2026 (https://arxiv.org/abs/2604.11037).
    """
    settings: Any = {"gamma": gamma, "prior_count": prior_count, "scale_by_std": scale_by_std, "eps": eps}

    def credit(turns: GroupTurns, rewards: Array, valid: Array) -> Array:
        counted = turns.valid & valid[:, None]
        return rtmc(rewards, turns.state_ids, turns.action_ids, counted, **settings).advantages

    return credit


def branch_credit(turns: GroupTurns, rewards: Array, valid: Array) -> Array:
    """Credit of branches: what the turns up to the next branching came to, beside the other ways on. For the episode.

    A state from which several members went on is a branching, and so is the start of the task. `Q(turn)` is the mean
    reward of all members whose path leads through the turn, each alike. The first turn after a branching gets

        A = Q(turn) - mean of Q(the other first turns from that state)

    and so do the turns after it, up to the next branching or to the end: Q does not change in between. For a trunk
    this is the value after it less the value before it, V(before) taken from the other ways on alone; for a leaf it
    is C3's leave-one-out. A state with one way on that counts is no branching; where the start is none, the turns up to
    the first get 0. Equal rewards give exactly 0. Without a branch every turn gets `advantages.leave_one_out`. A turn
    that branches share stands in its source only, and so counts once.

    Args:
      turns: of one group; reads `valid`, `branch_member` and `branch_turn`.
      rewards: f32[G].
      valid: bool[G]; a member that is not valid, or never acted, counts in no Q.

    Returns:
      f32[G, K].

    C3, 2026 (https://arxiv.org/abs/2603.06859); Kazemnejad et al. 2024, VinePPO (https://arxiv.org/abs/2410.01679).
    """
    own, (members, most) = turns.valid, turns.valid.shape
    counted = valid & jnp.any(own, axis=1)
    columns = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32), own.shape)
    takers = _takers(turns)
    values, leaves = _below(rewards, counted, takers * most + columns, own)
    before = jnp.concatenate([jnp.zeros((members, 1), jnp.int32), takers[:, :-1] * most + columns[:, 1:]], axis=1)
    centered, ways = center_by_group(values, jnp.where(own & (leaves > 0), before, own.size))
    against_others = centered * (ways / jnp.maximum(ways - 1.0, 1.0))
    since = lax.cummax(jnp.where(ways[takers, columns] > 1, columns, 0), axis=1)  # the last branching on its path
    return jnp.where(own & (leaves > 0), against_others[jnp.take_along_axis(takers, since, axis=1), since], 0.0)


def added(*credits: TurnCredit) -> TurnCredit:
    """The sum of several credits. At most one of them may speak for the episode.

    Raises:
      ValueError: there is none.
    """
    if not credits:
        raise ValueError("added: expected at least one credit")

    def credit(turns: GroupTurns, rewards: Array, valid: Array) -> Array:
        return sum((each(turns, rewards, valid) for each in credits[1:]), start=credits[0](turns, rewards, valid))

    return credit


def on_tokens(per_turn: Array, trajectory_ids: Array, turn_ids: Array, action_mask: Array) -> Array:
    """The figure of each turn of a step on the action tokens of that turn, in whichever rows they lie.

    Args:
      per_turn: f32[P, G, K].
      trajectory_ids: i32[B, T]; trajectory p * G + g is member g of group p.
      turn_ids: i32[B, T]; a turn from K on was cut off and has none: 0.
      action_mask: bool[B, T].

    Returns:
      f32[B, T], 0 off actions and on tokens of no trajectory.

    Raises:
      ValueError: shapes disagree.
    """
    if per_turn.ndim != 3 or not trajectory_ids.shape == turn_ids.shape == action_mask.shape:
        shapes = f"{per_turn.shape}, {trajectory_ids.shape}, {turn_ids.shape}, {action_mask.shape}"
        raise ValueError(f"on_tokens: expected per_turn [P, G, K] and three of one shape [B, T], got {shapes}")
    groups, members, most = per_turn.shape
    known = action_mask & (trajectory_ids < groups * members) & (turn_ids >= 0) & (turn_ids < most)
    places = jnp.where(known, trajectory_ids * most + turn_ids, 0)
    return jnp.where(known, per_turn.reshape(-1)[places], 0.0)


def reads(credit: TurnCredit, *, members: int, most: int) -> frozenset[str]:
    """Which of `GroupTurns`' fields, and of "rewards" and "valid", the credit depends on, from its traced program.

    Raises:
      ValueError: it does not give f32[G, K].
    """
    names = (*GroupTurns._fields, "rewards", "valid")
    traced, shape = jax.make_jaxpr(credit, return_shape=True)(*_alone(members, most))
    if getattr(shape, "shape", None) != (members, most) or shape.dtype != jnp.float32:
        found = f"{shape.dtype}{list(shape.shape)}" if hasattr(shape, "shape") else type(shape).__name__
        raise ValueError(f"credit: expected f32[G, K] = f32[{members}, {most}], got {found}")
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    return frozenset(name for name, is_used in zip(names, used, strict=True) if is_used)


def speaks_for_episodes(credit: TurnCredit, *, members: int, most: int) -> bool:
    """Whether it holds the outcome of whole episodes: what it gives where no turn has anything in common with another.

    Tried on a group of one success among failures, a turn each, all states and actions different, nothing gained.
    """
    return bool(np.any(np.asarray(jax.jit(credit)(*_alone(members, most)))))


def _alone(members: int, most: int) -> tuple[GroupTurns, np.ndarray, np.ndarray]:
    """One success among failures, a turn each, that share nothing."""
    shape = (members, most)
    valid, numbers = np.zeros(shape, np.bool_), np.arange(members * most, dtype=np.int32).reshape(shape)
    valid[:, 0] = True
    nobody = np.full(members, -1, np.int32)
    turns = GroupTurns(
        valid=valid, state_ids=numbers, action_ids=numbers, answered=valid, gains=np.zeros(shape, np.float32),
        measured=np.zeros(shape, np.bool_), potentials=np.zeros((members, most + 1), np.float32),
        branch_member=nobody, branch_turn=nobody, violated=np.zeros(members, np.bool_),
        cut=np.zeros(members, np.int32),
    )  # fmt: skip
    rewards = (np.arange(members) == 0).astype(np.float32)
    return turns, rewards, np.ones(members, np.bool_)


def _takers(turns: GroupTurns) -> Array:
    """i32[G, K]: the member that took turn k of each member's path: itself, its source, or a source of that one."""
    members, most = turns.valid.shape
    columns = jnp.arange(most, dtype=jnp.int32)[None]

    def up(_: int, takers: Array) -> Array:
        return jnp.where(columns < turns.branch_turn[takers], turns.branch_member[takers], takers)

    themselves = jnp.broadcast_to(jnp.arange(members, dtype=jnp.int32)[:, None], (members, most))
    return lax.fori_loop(0, members, up, themselves)


def _below(rewards: Array, counted: Array, nodes: Array, own: Array) -> tuple[Array, Array]:
    """(mean reward of the members whose path leads through each turn, how many of them count): f32[G, K] each.

    Rewards are measured from one of them, so that equal ones leave exact zeros.
    """
    most = own.shape[1]
    ends = most - 1 - jnp.argmax(own[:, ::-1], axis=1).astype(jnp.int32)
    passed = counted[:, None] & (jnp.arange(most, dtype=jnp.int32)[None] <= ends[:, None])
    relative = jnp.where(counted, jnp.asarray(rewards, jnp.float32) - rewards[jnp.argmax(counted)], 0.0)
    total = partial(jax.ops.segment_sum, segment_ids=nodes.reshape(-1), num_segments=own.size)
    sums = total(jnp.where(passed, relative[:, None], 0.0).reshape(-1)).reshape(own.shape)
    leaves = total(passed.astype(jnp.float32).reshape(-1)).reshape(own.shape)
    return sums / jnp.maximum(leaves, 1.0), leaves
