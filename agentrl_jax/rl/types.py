"""The type of every plug-in function of `rl`, in one place, and the metrics record they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jax import Array

from agentrl_jax.batch import GroupTurns, TokenBatch


class Metrics(NamedTuple):
    """Figures of a batch as parts that add up exactly over micro-batches and devices.

    `sums` holds (sum, count) pairs, divided only at the very end; `maxima` holds running maxima.
    """

    sums: Mapping[str, tuple[Array, Array]]
    maxima: Mapping[str, Array]


class Advantage(Protocol):
    """(rewards f32[G], valid bool[G]) -> f32[G], 0 where not valid."""

    def __call__(self, rewards: Array, valid: Array, /) -> Array: ...


class Whitening(Protocol):
    """(advantages f32[B, T], counted bool[B, T]), of the whole step -> f32[B, T], 0 where not counted.

    With `axis_name` its statistics are those of all devices that share the axis.
    """

    def __call__(self, advantages: Array, counted: Array, /, *, axis_name: str | None = None) -> Array: ...


class Ratio(Protocol):
    """(logprobs, old_logprobs, action_mask, trajectory_ids), each [B, T] -> f32[B, T], 0 off actions."""

    def __call__(self, logprobs: Array, old_logprobs: Array, action_mask: Array, trajectory_ids: Array, /) -> Array: ...


class Surrogate(Protocol):
    """(ratio, advantages), of one shape -> what is maximised, elementwise.

    Positively homogeneous in the advantage: `f(r, c * a) = c * f(r, a)` for c >= 0.
    """

    def __call__(self, ratio: Array, advantages: Array, /) -> Array: ...


class Kl(Protocol):
    """(logprobs, ref_logprobs), of one shape -> elementwise estimate of KL(policy || reference)."""

    def __call__(self, logprobs: Array, ref_logprobs: Array, /) -> Array: ...


class Weights(Protocol):
    """(action_mask, trajectory_ids, turn_ids), each [B, T], of the whole step -> f32[B, T], 0 off actions.

    `keep` bool[N] takes trajectories out of the numerators and out of the denominators. Where the rows of the
    step are spread over a mapped axis, `axis_name` makes every denominator the count over all devices.
    """

    def __call__(
        self,
        action_mask: Array,
        trajectory_ids: Array,
        turn_ids: Array,
        /,
        *,
        num_trajectories: int,
        keep: Array | None = None,
        axis_name: str | None = None,
    ) -> Array: ...


class Correction(Protocol):
    """(old_logprobs, behavior_logprobs, action_mask, trajectory_ids), each [B, T] -> detached f32[B, T] >= 0."""

    def __call__(
        self, old_logprobs: Array, behavior_logprobs: Array, action_mask: Array, trajectory_ids: Array, /
    ) -> Array: ...


class Reward(Protocol):
    """(violated bool, outcome f32, quality f32), of one shape -> rewards f32, elementwise."""

    def __call__(self, violated: Array, outcome: Array, quality: Array, /) -> Array: ...


class TurnCredit(Protocol):
    """(turns of one group, rewards f32[G], valid bool[G]) -> f32[G, K]: what each turn is due beside its trajectory.

    0 where a turn is not valid; trajectories that are not valid count nowhere and are not read. See `rl.turns`.
    """

    def __call__(self, turns: GroupTurns, rewards: Array, valid: Array, /) -> Array: ...


class Loss(Protocol):
    """(logprobs [B, T], entropy [B, T] or None, batch) -> a sum over tokens, and metrics whose names never change."""

    def __call__(self, logprobs: Array, entropy: Array | None, batch: TokenBatch, /) -> tuple[Array, Metrics]: ...
