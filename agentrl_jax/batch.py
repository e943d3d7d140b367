"""TokenBatch: the arrays that cross from host to device. numpy on one side, `jax.Array` on the other. `GroupTurns`
crosses beside it where turns have credit of their own.

Alignment: column t always speaks of token t. `behavior_logprobs[b, t]` is the log-probability
of `tokens[b, t]` given its ancestors; nothing is shifted on this side of the border.

A packed row is a forest laid out depth-first. Token i may read token j exactly when
`j <= i < subtree_ends[j]`; no second mask exists.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np


class Source(IntEnum):
    """Who produced a token. Set when the token is collected, never guessed from text."""

    PADDING = 0
    SYSTEM = 1
    USER = 2
    POLICY = 3
    ENVIRONMENT = 4
    TEACHER = 5


class TokenBatch(NamedTuple):
    """B packed rows of T tokens. Optional fields are None until something computes them."""

    tokens: Any  # i32[B, T] token ids
    parents: Any  # i32[B, T] column of the token this one continues; -1 at a root
    subtree_ends: Any  # i32[B, T] first column after this token's subtree; own column on padding
    positions: Any  # i32[B, T] distance from the root
    trajectory_ids: Any  # i32[B, T] 0..N-1; N where shared or padding
    turn_ids: Any  # i32[B, T] turn inside the trajectory; 0 where shared or padding
    sources: Any  # i8[B, T] Source
    action_mask: Any  # bool[B, T] True where the policy (or the teacher) chose the token
    behavior_logprobs: Any  # f32[B, T]
    advantages: Any  # f32[B, T] credit, already corrected; 0 off actions
    weights: Any  # f32[B, T] aggregation, filters, failures; 0 off actions
    policy_versions: Any  # i32[B, T] params that sampled the token; -1 off policy tokens
    old_logprobs: Any = None  # f32[B, T] or None
    ref_logprobs: Any = None  # f32[B, T] or None
    values: Any = None  # f32[B, T] or None
    returns: Any = None  # f32[B, T] or None
    kept: Any = None  # u32[B, T, ceil(V / 32)] or None: token v could be drawn where bit v % 32 of word v // 32 is set


class GroupTurns(NamedTuple):
    """P groups of G trajectories turn by turn, up to K turns each: what credit is given by. Without P, one group.

    A branch continues another member of its group from the state before one of that member's turns. The turns before
    are its source's: they are not valid in the branch, so that each turn is there once.
    """

    valid: Any  # bool[P, G, K] the policy took an action in it; False from the last turn on, and where it is a source's
    state_ids: Any  # i32[P, G, K] equal in a group where turns start in the same observable state; 0 off valid
    action_ids: Any  # i32[P, G, K] equal in a group where turns do the same, whatever was said before; 0 off valid
    answered: Any  # bool[P, G, K] the environment answered it; not where a token limit or a budget came before
    gains: Any  # f32[P, G, K] evidence that the turn brought, as the environment measured it; 0 off measured
    measured: Any  # bool[P, G, K] it was measured
    potentials: Any  # f32[P, G, K + 1] evidence gained before each turn and after the last, a source's turns included
    branch_member: Any  # i32[P, G] whose state it continues; -1 where it began with the task
    branch_turn: Any  # i32[P, G] before which turn of that member; -1 where it began with the task
    violated: Any  # bool[P, G] a constraint was broken, by a trajectory that counts
    cut: Any  # i32[P, G] turns from the K-th on: they have no place here, and no credit of their own


_DTYPES = {
    "tokens": np.int32, "parents": np.int32, "subtree_ends": np.int32, "positions": np.int32,
    "trajectory_ids": np.int32, "turn_ids": np.int32, "sources": np.int8, "action_mask": np.bool_,
    "behavior_logprobs": np.float32, "advantages": np.float32, "weights": np.float32,
    "policy_versions": np.int32, "old_logprobs": np.float32, "ref_logprobs": np.float32,
    "values": np.float32, "returns": np.float32,
}  # fmt: skip
_OPTIONAL = ("old_logprobs", "ref_logprobs", "values", "returns")


def validate(batch: TokenBatch, *, vocab_size: int) -> TokenBatch:
    """Check a host batch against every rule of the border and return it unchanged.

    Raises `ValueError` that names the field, the row and the column of the first breach.
    """
    tokens: Any = batch.tokens
    shape = np.shape(tokens)
    if len(shape) != 2:
        raise ValueError(f"TokenBatch.tokens: expected [B, T], got shape {shape}")
    for name, dtype in _DTYPES.items():
        array: Any = getattr(batch, name)
        if array is None and name in _OPTIONAL:
            continue
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
            found = f"{type(array).__name__}{getattr(array, 'shape', '')} of {getattr(array, 'dtype', '?')}"
            raise ValueError(f"TokenBatch.{name}: expected {np.dtype(dtype)}{shape}, got {found}")
    _check_kept(batch, vocab_size)
    columns = np.arange(shape[1], dtype=np.int32)[None]
    real = batch.sources != Source.PADDING
    _check_forest(batch, columns, real)
    _check_credit(batch, real)
    _refuse(
        "tokens", real & ((batch.tokens < 0) | (batch.tokens >= vocab_size)), f"token id outside 0..{vocab_size - 1}"
    )
    return batch


def _check_forest(batch: TokenBatch, columns: np.ndarray, real: np.ndarray) -> None:
    ends, parents = batch.subtree_ends, batch.parents
    _refuse("subtree_ends", ~real & (ends != columns), "padding must end at its own column")
    _refuse("subtree_ends", real & ((ends <= columns) | (ends > columns.shape[1])), "outside (t, T]")
    _refuse("parents", real & ((parents >= columns) | (parents < -1)), "a parent must come before its child")
    safe = np.maximum(parents, 0)
    has_parent = real & (parents >= 0)
    parent_ends = np.take_along_axis(ends, safe, axis=1)
    _refuse("parents", has_parent & ~np.take_along_axis(real, safe, axis=1), "the parent is padding")
    _refuse("subtree_ends", has_parent & (ends > parent_ends), "a subtree must lie inside its parent's")
    depth = np.where(has_parent, np.take_along_axis(batch.positions, safe, axis=1) + 1, 0)
    _refuse("positions", real & (batch.positions != depth), "must be the distance from the root")


def _check_credit(batch: TokenBatch, real: np.ndarray) -> None:
    mask = batch.action_mask
    chosen = (batch.sources == Source.POLICY) | (batch.sources == Source.TEACHER)
    _refuse("action_mask", mask & ~(real & chosen), "True on a token that neither the policy nor a teacher chose")
    _refuse("action_mask", mask & (batch.parents < 0), "a root has no ancestors to predict it from")
    for name in ("behavior_logprobs", "advantages", "weights", *_OPTIONAL):
        array = getattr(batch, name)
        if array is not None:
            _refuse(name, ~np.isfinite(array), "not finite")
    _refuse("advantages", ~mask & (batch.advantages != 0), "must be 0 off actions")
    _refuse("weights", ~mask & (batch.weights != 0), "must be 0 off actions")
    sampled = batch.sources == Source.POLICY
    _refuse("policy_versions", mask & sampled & (batch.policy_versions < 0), "a sampled token needs its version")


def _check_kept(batch: TokenBatch, vocab_size: int) -> None:
    if batch.kept is None:
        return
    expected = (*batch.tokens.shape, -(-vocab_size // 32))
    if not isinstance(batch.kept, np.ndarray) or batch.kept.shape != expected or batch.kept.dtype != np.uint32:
        found = f"{getattr(batch.kept, 'dtype', type(batch.kept).__name__)}{getattr(batch.kept, 'shape', '')}"
        raise ValueError(f"TokenBatch.kept: expected uint32{expected}, got {found}")
    rows, columns = np.nonzero(batch.action_mask)
    tokens = batch.tokens[rows, columns]
    words = np.clip(tokens // 32, 0, expected[2] - 1)
    missing = np.zeros_like(batch.action_mask)
    missing[rows, columns] = batch.kept[rows, columns, words] >> (tokens % 32).astype(np.uint32) & 1 == 0
    _refuse("kept", missing, "the token itself is not in its set")


def _refuse(name: str, wrong: np.ndarray, why: str) -> None:
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(f"TokenBatch.{name}: {why} (row {row}, column {column})")
