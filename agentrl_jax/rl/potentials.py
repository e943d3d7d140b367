"""Process rewards as differences of a potential along one trajectory of K turns and K + 1 states.

A difference telescopes: whatever loops a trajectory makes, it is paid for where it ends. The absolute
potential pays for every visit, and so for loitering. All functions take `valid` bool[K], True on the
turns that took place, first to last; None is all. What lies beyond them is never read and gets 0.
Potentials are detached: one that moves with the policy should be frozen, or its version recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


def shaping(potentials: Array, valid: Array | None = None, *, gamma: float, terminated: Array | bool = True) -> Array:
    """Potential-based shaping, the one addition to a reward that changes no optimal policy.

    `F_k = gamma * Phi(s_{k+1}) - Phi(s_k)`, with the potential of a terminal state taken as 0. Then
    `sum_k gamma^k F_k = -Phi(s_0)` on every path. It holds for the return's own gamma, and for F as it
    is: normalised or clipped turn by turn it is a different reward.

    Args:
      potentials: f32[K + 1] of s_0..s_K.
      valid: bool[K].
      gamma: the discount of the return, in [0, 1].
      terminated: bool[], the last state is terminal and its potential counts as 0; False where the episode was
        truncated, which leaves `gamma^K Phi(s_K) - Phi(s_0)` and wants the same bootstrap as the return.

    Returns:
      f32[K].

    Raises:
      ValueError: a shape, or `gamma` outside [0, 1].

    Ng, Harada and Russell 1999, Policy invariance under reward transformations.
    """
    valid = _turns("shaping", potentials, valid)
    before, after = _ends("shaping", potentials, valid, gamma, terminated)
    return lax.stop_gradient(gamma * after - before)


def conservation_error(
    shaped: Array,
    potentials: Array,
    valid: Array | None = None,
    *,
    gamma: float,
    terminated: Array | bool = True,
) -> Array:
    """How far shaped rewards are from telescoping: `|sum_k gamma^k F_k - (gamma^K Phi(s_K) - Phi(s_0))|`.

    Args and errors as in `shaping`, and `shaped` f32[K], the rewards it returned. Returns f32[].
    """
    found, expected = _totals("conservation_error", shaped, potentials, valid, gamma, terminated)
    return jnp.abs(found - expected)


def check_conservation(
    shaped: Array,
    potentials: Array,
    valid: Array | None = None,
    *,
    gamma: float,
    terminated: Array | bool = True,
    tolerance: float = 1e-4,
) -> None:
    """Refuse shaped rewards that do not telescope. Runs on the host, on one trajectory's figures.

    Args as in `conservation_error`, and `tolerance`, the largest error to pass over as rounding, beside the largest
    potential (and 1). The sums are taken in float64.

    Raises:
      ValueError: names both sums. Also for NaN.
    """
    turns = np.asarray(_turns("check_conservation", potentials, valid))
    phi, paid = np.asarray(potentials, np.float64), np.asarray(shaped, np.float64)
    if paid.shape != turns.shape:
        raise ValueError(f"check_conservation: shaped: expected {turns.shape}, one a turn, got {paid.shape}")
    count = int(turns.sum())
    if count == 0:
        return
    found = float(np.sum(np.power(gamma, np.arange(count)) * paid[:count]))
    expected = (0.0 if terminated else gamma**count * float(phi[count])) - float(phi[0])
    largest = max(1.0, float(np.abs(phi[: count + 1]).max()))
    if not abs(found - expected) <= tolerance * largest:
        raise ValueError(
            f"check_conservation: the shaped rewards sum to {found:.6g} and the potentials say {expected:.6g}, "
            f"{abs(found - expected):.3g} apart with a tolerance of {tolerance * largest:g}: shape with the return's "
            f"own gamma ({gamma:g} here), and neither normalise nor clip the differences"
        )


def potential_difference(potentials: Array, valid: Array | None = None) -> Array:
    """`r_k = Phi(s_{k+1}) - Phi(s_k)`: sums to what was gained from start to end, by whatever path.

    For undiscounted returns; with a discount only `shaping` telescopes.

    Args:
      potentials: f32[K + 1].
      valid: bool[K].

    Returns:
      f32[K].

    Raises:
      ValueError: a shape.
    """
    valid = _turns("potential_difference", potentials, valid)
    before, after = _ends("potential_difference", potentials, valid, 1.0, False)
    return lax.stop_gradient(after - before)


def best_of(q_values: Array, *, samples: int) -> Array:
    """`1 - (1 - Q)^samples`: the chance that the best of some attempts succeeds, from the chance Q of one.

    The prover of Setlur et al.: of any shape, f32 in [0, 1].

    Raises:
      ValueError: `samples` is below 1.
    """
    if samples < 1:
        raise ValueError(f"best_of: samples: expected 1 or more, got {samples}")
    return 1.0 - (1.0 - jnp.asarray(q_values, jnp.float32)) ** int(samples)


def pav(q_policy: Array, q_prover: Array, valid: Array | None = None, *, alpha: float) -> Array:
    """Process advantage verifier: the policy's own prospects plus the progress that a prover sees.

    `r_k = Q^pi_{k+1} + alpha * (Q^mu_{k+1} - Q^mu_k)`, where index k + 1 is after turn k. Q^pi is the
    outcome's estimate; adding the outcome as well counts it twice. The prover mu must differ from the policy,
    as `best_of(q_policy)` does, or its advantage says nothing new.

    Args:
      q_policy: f32[K + 1] chance of success under the policy, first before any turn.
      q_prover: f32[K + 1] under the prover.
      valid: bool[K].
      alpha: weight of the progress, 0 or more.

    Returns:
      f32[K].

    Raises:
      ValueError: shapes disagree, or `alpha` is negative.

    Setlur et al. 2024 (https://arxiv.org/abs/2410.08146).
    """
    valid = _turns("pav", q_policy, valid)
    if q_prover.shape != q_policy.shape:
        raise ValueError(f"pav: q_prover: expected {q_policy.shape} as q_policy has, got {q_prover.shape}")
    if alpha < 0:
        raise ValueError(f"pav: alpha: expected 0 or more, got {alpha}")
    prospects = jnp.where(valid, jnp.asarray(q_policy, jnp.float32)[1:], 0.0)
    return lax.stop_gradient(prospects) + alpha * potential_difference(q_prover, valid)


def trace_gap(answer_logprobs: Array, *, eps: float = 0.1) -> Array:
    """`d = -ell + eps`: how far the reference is from the right answer, elementwise.

    `eps` belongs to the definition: it bounds what the last step to certainty can be worth, log(d_0 / eps).

    Args:
      answer_logprobs: f32, any shape, 0 or less: mean log-probability per token of the right answer.
      eps: above 0.

    Raises:
      ValueError: `eps` is not above 0.
    """
    if not eps > 0:
        raise ValueError(f"trace_gap: eps: expected a number above 0, got {eps}")
    return eps - jnp.asarray(answer_logprobs, jnp.float32)


def trace_gap_potential(answer_logprobs: Array, valid: Array | None = None, *, eps: float = 0.1) -> Array:
    """`V_k = log(d_0 / d_k)`: the share of the gap to the right answer that is closed; 0 at the start.

    Args:
      answer_logprobs: f32[K + 1] under the frozen reference, teacher-forced after each tool call and first
        before any. The right answer itself is never shown to the policy.
      valid: bool[K].
      eps: as in `trace_gap`.

    Returns:
      f32[K + 1], 0 beyond the last state.

    Raises:
      ValueError: a shape, or `eps` is not above 0.

    TRACE, 2026 (https://arxiv.org/abs/2607.13988).
    """
    reached = jnp.append(True, _turns("trace_gap_potential", answer_logprobs, valid))
    log_gap = jnp.log(trace_gap(jnp.where(reached, jnp.asarray(answer_logprobs, jnp.float32), 0.0), eps=eps))
    return lax.stop_gradient(jnp.where(reached, log_gap[0] - log_gap, 0.0))


def trace_turn_credit(
    potentials: Array,
    outcome_advantage: Array | float,
    valid: Array | None = None,
    *,
    first_index: int,
    window: int = 3,
    gamma: float = 0.8,
    terminal_scale: float = 2.0,
) -> Array:
    """What a turn's next few differences are worth, filled up with the outcome near the end.

    `c_k = sum_{j<n} gamma^j delta_{k+j} / sum_{j<n} gamma^j` with delta the potential differences and
    `n = min(window, turns left)`. Where the window reaches the last turn, `terminal_scale * gamma^(K - k) *
    outcome_advantage` is added. This smooths credit over turns: it no longer telescopes, and it is not to be
    normalised within the group.

    Args:
      potentials: f32[K + 1], as of `trace_gap_potential`.
      outcome_advantage: f32[] of the trajectory in its group.
      valid: bool[K].
      first_index: what k counts from in the fill, 0 or 1. The paper's text leaves both readings: the last
        turn's fill is `terminal_scale * gamma` with 0, `terminal_scale` with 1.
      window: turns looked ahead, 1 or more.
      gamma: in (0, 1].
      terminal_scale: of the fill.

    Returns:
      f32[K].

    Raises:
      ValueError: a shape, or a static argument outside the range above.

    TRACE, 2026 (https://arxiv.org/abs/2607.13988).
    """
    if first_index not in (0, 1):
        raise ValueError(f"trace_turn_credit: first_index: expected 0 or 1, got {first_index}")
    if window < 1 or not 0 < gamma <= 1:
        raise ValueError(f"trace_turn_credit: expected window >= 1 and gamma in (0, 1], got {window} and {gamma}")
    valid = _turns("trace_turn_credit", potentials, valid)
    turns = valid.shape[0]
    ahead = jnp.arange(turns)[:, None] + jnp.arange(window)[None]
    within = jnp.append(valid, False)[jnp.minimum(ahead, turns)]
    decays = jnp.where(within, gamma ** jnp.arange(window, dtype=jnp.float32)[None], 0.0)
    differences = potential_difference(potentials, valid)[jnp.minimum(ahead, turns - 1)]
    local = jnp.sum(decays * differences, axis=1) / jnp.maximum(jnp.sum(decays, axis=1), 1.0)
    # Beyond the last turn the power would overflow, and its gradient with it.
    left = jnp.where(valid, jnp.sum(valid.astype(jnp.float32)) - jnp.arange(turns, dtype=jnp.float32), 1.0)
    fill = terminal_scale * jnp.asarray(outcome_advantage, jnp.float32) * gamma ** (left - first_index)
    return jnp.where(valid, local + jnp.where(left <= window, fill, 0.0), 0.0)


def trace_advantages(
    turn_credit: Array,
    outcome_advantage: Array | float,
    turn_ids: Array,
    action_mask: Array,
    *,
    outcome_weight: float = 1.0,
    turn_weight: float = 0.2,
) -> Array:
    """`A_t = outcome_weight * outcome_advantage + turn_weight * credit of t's turn`, on action tokens.

    Tokens after the last tool call belong to no turn with credit and get the first term alone.

    Args:
      turn_credit: f32[K], as of `trace_turn_credit`.
      outcome_advantage: f32[].
      turn_ids: i32[T]; K or more after the last tool call.
      action_mask: bool[T].
      outcome_weight: of the outcome.
      turn_weight: of the turn's credit.

    Returns:
      f32[T], 0 off actions.

    Raises:
      ValueError: shapes disagree.

    TRACE, 2026 (https://arxiv.org/abs/2607.13988).
    """
    if turn_credit.ndim != 1 or action_mask.ndim != 1 or turn_ids.shape != action_mask.shape:
        shapes = f"{turn_credit.shape}, {turn_ids.shape}, {action_mask.shape}"
        raise ValueError(f"trace_advantages: expected turn_credit [K], turn_ids and action_mask [T], got {shapes}")
    credited = (turn_ids >= 0) & (turn_ids < turn_credit.shape[0])
    local = jnp.where(credited, jnp.asarray(turn_credit, jnp.float32)[jnp.where(credited, turn_ids, 0)], 0.0)
    outcome = outcome_weight * jnp.asarray(outcome_advantage, jnp.float32)
    return jnp.where(action_mask, outcome + turn_weight * local, 0.0)


def tips(answer_logprobs: Array, valid: Array | None = None) -> Array:
    """`r_k = ell_{k+1} - ell_k`: what a turn adds to the log-likelihood of the right answer.

    Args:
      answer_logprobs: f32[K + 1] of the right answer after each turn, first before any.
      valid: bool[K].

    Returns:
      f32[K].

    Raises:
      ValueError: a shape.

    TIPS, 2026 (https://arxiv.org/abs/2603.22293).
    """
    return potential_difference(answer_logprobs, valid)


class RisingSegments(NamedTuple):
    """The turns of a trajectory that are worth imitating, whatever came of it."""

    differences: Array  # f32[K] V(s_{k+1}) - V(s_k)
    mask: Array  # bool[K] the difference is above the threshold
    segment_ids: Array  # i32[K] which run of such turns, from 0; -1 outside


def rising_segments(values: Array, valid: Array | None = None, *, threshold: float = 0.0) -> RisingSegments:
    """The contiguous runs of turns over which the value rises: credit-assignment fine-tuning learns only these.

    Of a failed trajectory; one that succeeded trains as a whole. What comes before a segment stays in its
    context, with weight 0.

    Args:
      values: f32[K + 1] chance of success at each state, estimated with the outcome known.
      valid: bool[K].
      threshold: a turn counts when its difference is above it, 0 or more.

    Returns:
      `RisingSegments`.

    Raises:
      ValueError: a shape, or a negative threshold.

    Orchard, 2026 (https://arxiv.org/abs/2605.15040).
    """
    if threshold < 0:
        raise ValueError(f"rising_segments: threshold: expected 0 or more, got {threshold}")
    differences = potential_difference(values, valid)
    mask = differences > threshold
    starts = mask & ~jnp.append(False, mask[:-1])
    return RisingSegments(differences, mask, jnp.where(mask, jnp.cumsum(starts.astype(jnp.int32)) - 1, -1))


def _turns(name: str, potentials: Array, valid: Array | None) -> Array:
    """bool[K]; refuses potentials that are not one per state."""
    if potentials.ndim != 1 or potentials.shape[0] < 2:
        raise ValueError(
            f"{name}: expected f32[K + 1], one a state, got shape {potentials.shape}: vmap over trajectories"
        )
    turns = potentials.shape[0] - 1
    if valid is None:
        return jnp.ones((turns,), jnp.bool_)
    if valid.shape != (turns,) or valid.dtype != jnp.bool_:
        found = f"{valid.dtype}{list(valid.shape)}"
        raise ValueError(f"{name}: valid: expected bool[{turns}], one a turn between {turns + 1} states, got {found}")
    return jnp.asarray(valid)


def _ends(name: str, potentials: Array, valid: Array, gamma: float, terminated: Array | bool) -> tuple[Array, Array]:
    """The potentials before and after each turn, f32[K] each; 0 after a terminal turn, and off valid."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"{name}: gamma: expected a number in [0, 1], got {gamma}")
    potentials = jnp.asarray(potentials, jnp.float32)
    last = valid & ~jnp.append(valid[1:], False)
    after = jnp.where(valid & ~(last & jnp.asarray(terminated, jnp.bool_)), potentials[1:], 0.0)
    return jnp.where(valid, potentials[:-1], 0.0), after


def _totals(
    name: str, shaped: Array, potentials: Array, valid: Array | None, gamma: float, terminated: Array | bool
) -> tuple[Array, Array]:
    """The discounted sum of shaped rewards, and what it has to be: f32[] each."""
    valid = _turns(name, potentials, valid)
    if shaped.shape != valid.shape:
        raise ValueError(f"{name}: shaped: expected {valid.shape}, one a turn, got {shaped.shape}")
    before, after = _ends(name, potentials, valid, gamma, terminated)
    steps = jnp.arange(valid.shape[0], dtype=jnp.float32)
    last = valid & ~jnp.append(valid[1:], False)
    found = jnp.sum(jnp.where(valid, gamma**steps * shaped, 0.0))
    expected = jnp.sum(jnp.where(last, gamma ** (steps + 1.0) * after, 0.0)) - before[0]
    return found, expected
