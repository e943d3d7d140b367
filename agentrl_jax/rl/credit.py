"""Credit inside one trajectory: recursions that pass over whatever the policy did not choose.

Rewards and values count at action tokens only; an observation in between neither discounts nor resets
what is carried across it. What stands at an observation token is never read.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

_LOG_LIMIT = 20.0


class Credit(NamedTuple):
    """Who deserves what, and what a critic is to learn. Detached: no gradient flows through either."""

    advantages: Array  # f32[T], 0 off actions
    returns: Array  # f32[T] targets of the value function, 0 off actions


def gae(
    rewards: Array,
    values: Array,
    action_mask: Array,
    *,
    gamma: float,
    lam: float,
    bootstrap: Array | float = 0.0,
) -> Credit:
    """Generalised advantage estimation on the action tokens, as if the observations were not there.

    `delta_t = r_t + gamma * V_next - V_t` and `A_t = delta_t + gamma * lam * A_next`, where next is the next
    *action* token; returns are `A + V`. A reward on an observation token is not read: see `on_last_action`.

    Args:
      rewards: f32[T].
      values: f32[T], V of the prefix before each token.
      action_mask: bool[T].
      gamma: discount per action token, in [0, 1].
      lam: in [0, 1]; 1 gives return minus value, 0 the one-step error.
      bootstrap: f32[], value of the state after the last action: 0 where the episode terminated, V of that
        state where it was truncated.

    Returns:
      `Credit` of f32[T].

    Raises:
      ValueError: shapes disagree, the mask is not bool, or `gamma` or `lam` is outside [0, 1].

    Schulman et al. 2016 (https://arxiv.org/abs/1506.02438).
    """
    _check("gae", action_mask, bootstrap, rewards=rewards, values=values)
    _check_fractions("gae", gamma=gamma, lam=lam)
    rewards, values = _on_actions(rewards, action_mask), _on_actions(values, action_mask)
    deltas = _on_actions(rewards + gamma * _next_values(values, action_mask, bootstrap) - values, action_mask)
    advantages = _on_actions(_backward(gamma * lam, deltas, action_mask, 0.0), action_mask)
    return lax.stop_gradient(Credit(advantages, advantages + values))


def turn_gae(
    rewards: Array,
    values: Array,
    turn_ids: Array,
    action_mask: Array,
    *,
    gamma: float,
    lam: float,
    bootstrap: Array | float = 0.0,
) -> Credit:
    """GAE with one transition a turn; all action tokens of a turn share its advantage and its return.

    A turn without an action token (also: padding up to K) is passed over as an observation is in `gae`.

    Args:
      rewards: f32[K] reward of each turn.
      values: f32[K], V of the prefix before each turn's first action token.
      turn_ids: i32[T], 0..K-1 on action tokens.
      action_mask: bool[T].
      gamma: discount per turn.
      lam: as in `gae`.
      bootstrap: as in `gae`.

    Returns:
      `Credit` of f32[T]. An action token of a turn outside 0..K-1 gets NaN, and not another turn's credit.

    Raises:
      ValueError: as in `gae`; or `rewards` and `values` are not of one shape [K].

    Schulman et al. 2016 (https://arxiv.org/abs/1506.02438), with a turn as the step; no paper of its own.
    """
    _check("turn_gae", action_mask, bootstrap, turn_ids=turn_ids)
    if rewards.ndim != 1 or rewards.shape != values.shape:
        raise ValueError(f"turn_gae: expected rewards and values f32[K], got {rewards.shape} and {values.shape}")
    acted = jax.ops.segment_max(action_mask.astype(jnp.int32), turn_ids, rewards.shape[0]) > 0
    turns = gae(rewards, values, acted, gamma=gamma, lam=lam, bootstrap=bootstrap)
    return Credit(*(to_tokens(each, turn_ids, action_mask) for each in turns))


def reward_to_go(rewards: Array, action_mask: Array, *, gamma: float = 1.0, bootstrap: Array | float = 0.0) -> Array:
    """`G_t = r_t + gamma * G_next` over action tokens: what is still to come, observations passed over.

    Args:
      rewards: f32[T]; as in `gae` not read at observation tokens.
      action_mask: bool[T].
      gamma: discount per action token, in [0, 1].
      bootstrap: f32[], value of the state after the last action, as in `gae`.

    Returns:
      f32[T], 0 off actions.

    Raises:
      ValueError: as in `gae`.

    Williams 1992.
    """
    _check("reward_to_go", action_mask, bootstrap, rewards=rewards)
    _check_fractions("reward_to_go", gamma=gamma)
    return _on_actions(_backward(gamma, _on_actions(rewards, action_mask), action_mask, bootstrap), action_mask)


def vtrace(
    rewards: Array,
    values: Array,
    logprobs: Array,
    behavior_logprobs: Array,
    action_mask: Array,
    *,
    gamma: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    bootstrap: Array | float = 0.0,
) -> Credit:
    """V-trace: value targets and advantages of the current policy from another policy's actions.

    With `rho = min(pi / mu, rho_clip)` and `c = min(pi / mu, c_clip)` at action tokens, and next as in `gae`:
    `v_t - V_t = rho_t * (r_t + gamma * V_next - V_t) + gamma * c_t * (v_next - V_next)` and
    `A_t = rho_t * (r_t + gamma * v_next - V_t)`. The advantage already holds its importance weight: its
    loss is `-A * log pi`, not a ratio times A. On policy the targets are GAE's at lam 1.

    Args:
      rewards: f32[T].
      values: f32[T].
      logprobs: f32[T] of the current policy pi; the log-ratio is limited to [-20, 20].
      behavior_logprobs: f32[T] of the policy mu that sampled.
      action_mask: bool[T].
      gamma: discount per action token, in [0, 1].
      rho_clip: decides which policy's value is learned (infinite: pi's own), above 0.
      c_clip: decides how fast, and with how much variance; at most `rho_clip`.
      bootstrap: f32[], as in `gae`.

    Returns:
      `Credit` of f32[T], whose returns are the targets v.

    Raises:
      ValueError: as in `gae`, or clips that are not `0 < c_clip <= rho_clip`.

    Espeholt et al. 2018, IMPALA (https://arxiv.org/abs/1802.01561).
    """
    probabilities = {"logprobs": logprobs, "behavior_logprobs": behavior_logprobs}
    _check("vtrace", action_mask, bootstrap, rewards=rewards, values=values, **probabilities)
    _check_fractions("vtrace", gamma=gamma)
    if not 0 < c_clip <= rho_clip:
        raise ValueError(f"vtrace: c_clip: expected 0 < c_clip <= rho_clip, got {c_clip} and rho_clip={rho_clip}")
    rewards, values = _on_actions(rewards, action_mask), _on_actions(values, action_mask)
    log_ratio = _on_actions(logprobs, action_mask) - _on_actions(behavior_logprobs, action_mask)
    ratio = jnp.exp(jnp.clip(log_ratio, -_LOG_LIMIT, _LOG_LIMIT))
    rho = jnp.minimum(ratio, rho_clip)
    deltas = rho * (rewards + gamma * _next_values(values, action_mask, bootstrap) - values)
    corrections = _backward(gamma * jnp.minimum(ratio, c_clip), _on_actions(deltas, action_mask), action_mask, 0.0)
    targets = _on_actions(values + corrections, action_mask)
    advantages = rho * (rewards + gamma * _next_values(targets, action_mask, bootstrap) - values)
    return lax.stop_gradient(Credit(_on_actions(advantages, action_mask), targets))


def on_last_action(reward: Array | float, action_mask: Array) -> Array:
    """The reward of a whole trajectory, on its last action token and nowhere else.

    On a trailing observation or on padding it would be lost: no recursion of this module reads it there.

    Args:
      reward: f32[].
      action_mask: bool[T]; without an action token the reward has no place and all is 0.

    Returns:
      f32[T].

    Raises:
      ValueError: `reward` is not a scalar, or the mask is not bool[T].
    """
    _check("on_last_action", action_mask, reward)
    return on_last_actions(jnp.asarray(reward, jnp.float32)[None], jnp.zeros(action_mask.shape, jnp.int32), action_mask)


def on_last_actions(rewards: Array, turn_ids: Array, action_mask: Array) -> Array:
    """The reward of every turn, on the turn's last action token: rewards of turns as rewards of tokens.

    Args:
      rewards: f32[K]; that of a turn without an action token has no place and is dropped.
      turn_ids: i32[T], 0..K-1 on action tokens.
      action_mask: bool[T].

    Returns:
      f32[T].

    Raises:
      ValueError: shapes disagree, or the mask is not bool.
    """
    _check("on_last_actions", action_mask, turn_ids=turn_ids)
    if rewards.ndim != 1:
        raise ValueError(f"on_last_actions: rewards: expected f32[K], one a turn, got shape {rewards.shape}")
    length = action_mask.shape[0]
    columns = jnp.where(action_mask, jnp.arange(length, dtype=jnp.int32), -1)
    last = jax.ops.segment_max(columns, turn_ids, rewards.shape[0])
    empty = jnp.zeros((length,), jnp.float32)
    return empty.at[jnp.where(last < 0, length, last)].set(jnp.asarray(rewards, jnp.float32), mode="drop")


def to_tokens(per_turn: Array, turn_ids: Array, action_mask: Array) -> Array:
    """The figure of each turn, on all of the turn's action tokens; 0 off actions.

    Args:
      per_turn: f32[K].
      turn_ids: i32[T], 0..K-1 on action tokens; an action token outside gets NaN, and not another turn's figure.
      action_mask: bool[T].

    Returns:
      f32[T].

    Raises:
      ValueError: shapes disagree, or the mask is not bool.
    """
    _check("to_tokens", action_mask, turn_ids=turn_ids)
    if per_turn.ndim != 1:
        raise ValueError(f"to_tokens: per_turn: expected f32[K], one a turn, got shape {per_turn.shape}")
    known = (turn_ids >= 0) & (turn_ids < per_turn.shape[0])
    figures = jnp.asarray(per_turn, jnp.float32)[jnp.where(known, turn_ids, 0)]
    return jnp.where(action_mask, jnp.where(known, figures, jnp.nan), 0.0)


def _on_actions(values: Array, action_mask: Array) -> Array:
    return jnp.where(action_mask, jnp.asarray(values, jnp.float32), 0.0)


def _next_values(values: Array, action_mask: Array, bootstrap: Array | float) -> Array:
    """f32[T] value at the next action token; `bootstrap` after the last."""
    carried = _backward(0.0, values, action_mask, bootstrap)
    return jnp.append(carried[1:], jnp.asarray(bootstrap, jnp.float32))


def _backward(decay: Array | float, added: Array, action_mask: Array, last: Array | float) -> Array:
    """`x_t = added_t + decay_t * x_{t+1}` at action tokens, `x_t = x_{t+1}` elsewhere, from `x_T = last`.

    One step after the other, and not in log T: equal suffixes then give equal bits wherever they stand, and a
    group of equal returns stays constant whatever padding and observations its members have.
    """

    def step(carried: Array, now: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        decay_now, added_now, acts = now
        carried = jnp.where(acts, added_now + decay_now * carried, carried)
        return carried, carried

    decays = jnp.broadcast_to(jnp.asarray(decay, jnp.float32), added.shape)
    _, carried = lax.scan(step, jnp.asarray(last, jnp.float32), (decays, added, action_mask), reverse=True)
    return carried


def _check(name: str, action_mask: Array, scalar: Array | float = 0.0, **arrays: Array) -> None:
    if action_mask.ndim != 1 or action_mask.dtype != jnp.bool_:
        found = f"{action_mask.dtype}{list(action_mask.shape)}"
        raise ValueError(f"{name}: action_mask: expected bool[T], got {found}: vmap over trajectories")
    for argument, array in arrays.items():
        if array.shape != action_mask.shape:
            raise ValueError(f"{name}: {argument}: expected one shape [T] = {action_mask.shape}, got {array.shape}")
    if jnp.ndim(scalar) != 0:
        raise ValueError(f"{name}: expected one number for the trajectory, got shape {jnp.shape(scalar)}: vmap")


def _check_fractions(name: str, **fractions: float) -> None:
    for argument, fraction in fractions.items():
        if not 0 <= fraction <= 1:
            raise ValueError(f"{name}: {argument}: expected a number in [0, 1], got {fraction}")
