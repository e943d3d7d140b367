"""How much each token counts in the loss. Computed once over all rows of a step, before any micro-batch.

Every denominator is a count over the whole step, so the loss stays one weighted sum and splitting the
rows over micro-batches or devices changes nothing. A trajectory that `keep` excludes leaves the numerator
and the denominator; one whose advantages are all 0 (a constant group) still counts in the denominator.

Under `jax.pmap` and `shard_map` an `axis_name` makes each count that of all devices; `trajectory_ids`,
`num_trajectories` and `keep` are those of the whole step on every device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from agentrl_jax.rl.ratios import check_tokens, pooled
from agentrl_jax.rl.types import Weights


def token_mean(
    action_mask: Array,
    trajectory_ids: Array,
    turn_ids: Array,
    *,
    num_trajectories: int,
    keep: Array | None = None,
    axis_name: str | None = None,
) -> Array:
    """`w = 1 / (action tokens of the step)`: every token alike, long trajectories weigh more.

    Args:
      action_mask: bool[B, T].
      trajectory_ids: i32[B, T] 0..N-1; N where shared or padding.
      turn_ids: i32[B, T], not used.
      num_trajectories: N.
      keep: bool[N] trajectories that count; None is all.
      axis_name: mapped axis over which the rows of the step are spread; None is one program.

    Returns:
      f32[B, T], 0 off actions and on excluded trajectories.

    Raises:
      ValueError: shapes differ, `action_mask` is not bool, or `keep` is not bool[N].

    Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476).
    """
    _check("token_mean", action_mask, trajectory_ids, turn_ids, num_trajectories, keep)
    counted = _counted(action_mask, trajectory_ids, num_trajectories, keep)
    return counted / jnp.maximum(_over(jnp.sum(counted), axis_name), 1.0)


def sequence_mean(
    action_mask: Array,
    trajectory_ids: Array,
    turn_ids: Array,
    *,
    num_trajectories: int,
    keep: Array | None = None,
    axis_name: str | None = None,
) -> Array:
    """`w = 1 / (trajectories * action tokens of this trajectory)`: every trajectory alike.

    A token of a long trajectory counts less than one of a short one. Trajectories without an action
    token are not counted.

    Args:
      action_mask: bool[B, T].
      trajectory_ids: i32[B, T] 0..N-1; N where shared or padding. A trajectory may span rows.
      turn_ids: i32[B, T], not used.
      num_trajectories: N.
      keep: bool[N] trajectories that count; None is all.
      axis_name: as in `token_mean`.

    Returns:
      f32[B, T], 0 off actions and on excluded trajectories; those of a counted trajectory add up to 1 / (how many
      there are).

    Raises:
      ValueError: as in `token_mean`.

    Shao et al. 2024, GRPO (https://arxiv.org/abs/2402.03300).
    """
    _check("sequence_mean", action_mask, trajectory_ids, turn_ids, num_trajectories, keep)
    counted = _counted(action_mask, trajectory_ids, num_trajectories, keep)
    lengths = _lengths(counted, trajectory_ids, num_trajectories, axis_name)
    return counted / (_present(lengths) * jnp.maximum(lengths, 1.0)[_safe(trajectory_ids, num_trajectories)])


def nested_turn_mean(
    action_mask: Array,
    trajectory_ids: Array,
    turn_ids: Array,
    *,
    num_trajectories: int,
    keep: Array | None = None,
    axis_name: str | None = None,
) -> Array:
    """`w = 1 / (trajectories * turns of this trajectory * action tokens of this turn)`: every turn alike.

    A mean over trajectories of means over turns of means over tokens. Turns without an action token are not
    counted. A turn lies in one row, as the packer promises. Arguments, result and errors as in `token_mean`, and:

    Args:
      turn_ids: i32[B, T] turn inside the trajectory, set when collected.

    Raises:
      ValueError: the arrays are not [B, T].

    Wei et al. 2025, WebAgent-R1 (https://arxiv.org/abs/2505.16421).
    """
    _check("nested_turn_mean", action_mask, trajectory_ids, turn_ids, num_trajectories, keep, rows=True)
    counted = _counted(action_mask, trajectory_ids, num_trajectories, keep)
    turn = jnp.maximum(pooled(counted, trajectory_ids, turn_ids), 1.0)
    # Each turn adds up to 1, but for rounding.
    turns = jnp.round(_lengths(counted / turn, trajectory_ids, num_trajectories, axis_name))
    return counted / (_present(turns) * jnp.maximum(turns, 1.0)[_safe(trajectory_ids, num_trajectories)] * turn)


def constant(length: float) -> Weights:
    """`w = 1 / (trajectories * length)`: a sum over tokens with a divisor that no batch can change.

    Args:
      length: the same for the whole run: the most action tokens that a trajectory may have (Dr. GRPO),
        or 1 for the plain sum over a trajectory (REINFORCE, RLOO).

    Returns:
      A weights function; its arguments, result and errors are as in `token_mean`.

    Raises:
      ValueError: `length` is not a finite number above 0.

    Liu et al. 2025, Dr. GRPO (https://arxiv.org/abs/2503.20783).
    """
    if not 0 < length < float("inf"):
        raise ValueError(f"constant: length: expected a finite number above 0, got {length}")

    def weights(
        action_mask: Array,
        trajectory_ids: Array,
        turn_ids: Array,
        *,
        num_trajectories: int,
        keep: Array | None = None,
        axis_name: str | None = None,
    ) -> Array:
        _check("constant", action_mask, trajectory_ids, turn_ids, num_trajectories, keep)
        counted = _counted(action_mask, trajectory_ids, num_trajectories, keep)
        lengths = _lengths(counted, trajectory_ids, num_trajectories, axis_name)
        return counted / (_present(lengths) * length)

    return weights


def _check(
    name: str,
    action_mask: Array,
    trajectory_ids: Array,
    turn_ids: Array,
    num_trajectories: int,
    keep: Array | None,
    *,
    rows: bool = False,
) -> None:
    check_tokens(name, action_mask, rows=rows, trajectory_ids=trajectory_ids, turn_ids=turn_ids)
    # A short `keep` would be read beyond its end, and exclude trajectories in silence.
    if keep is not None and (keep.shape != (num_trajectories,) or keep.dtype != jnp.bool_):
        found = f"{keep.dtype}{list(keep.shape)}"
        raise ValueError(f"{name}: keep: expected bool[{num_trajectories}], one a trajectory, got {found}")


def _safe(trajectory_ids: Array, num_trajectories: int) -> Array:
    return jnp.clip(trajectory_ids, 0, num_trajectories)


def _counted(action_mask: Array, trajectory_ids: Array, num_trajectories: int, keep: Array | None) -> Array:
    """f32[B, T], 1 on the action tokens of trajectories that count."""
    if keep is None:
        keep = jnp.ones((num_trajectories,), jnp.bool_)
    kept = jnp.append(jnp.asarray(keep), False)[_safe(trajectory_ids, num_trajectories)]
    return (action_mask & kept).astype(jnp.float32)


def _lengths(counted: Array, trajectory_ids: Array, num_trajectories: int, axis_name: str | None) -> Array:
    """f32[N + 1] action tokens per trajectory; the last entry is that of shared tokens and padding."""
    ids = _safe(trajectory_ids, num_trajectories)
    here = jax.ops.segment_sum(counted.reshape(-1), ids.reshape(-1), num_trajectories + 1)
    return _over(here, axis_name)


def _present(lengths: Array) -> Array:
    """How many trajectories have something that counts, and at least 1."""
    return jnp.maximum(jnp.sum((lengths > 0).astype(jnp.float32)), 1.0)


def _over(total: Array, axis_name: str | None) -> Array:
    return total if axis_name is None else lax.psum(total, axis_name)
