"""How old a sample may be, and how fast the learner may move while it waits. Plain numbers, on the host.

Lag counts optimiser steps between the params that sampled and the params that are updated; several updates per batch
count as several. The largest lag in a batch decides, so one straggler sets it. The law below holds for one
learning rate: under warm-up and decay, check the rate of the moment. It is about a loss that knows the behavior policy:
`behavior_logprobs` from the sampler, not rescored ones.

Song et al. 2026 (https://arxiv.org/abs/2607.01083).
"""

from __future__ import annotations

import math
import warnings


def bias_bound(lag: int, learning_rate: float, update_norm: float, *, smoothness: float = 1.0) -> float:
    """The bias of one step's gradient from stale samples is at most proportional to how far the params moved.

    `smoothness * lag * learning_rate * update_norm`, the paper's O(S * eta). Only ratios mean something until
    `smoothness` is fitted.

    Args:
      lag: largest lag in the batch, in optimiser steps.
      learning_rate: of this step.
      update_norm: bound on the norm of one update divided by the learning rate.
      smoothness: gradient bias per unit that the params moved.

    Returns:
      The bound, in units of the gradient's norm.

    Raises:
      ValueError: an argument is negative.
    """
    _check("bias_bound", 0.0, lag=lag, learning_rate=learning_rate, update_norm=update_norm, smoothness=smoothness)
    return smoothness * lag * learning_rate * update_norm


def learning_rate_cap(
    max_lag: int, horizon: int, *, batch_radius: float, critical_radius: float, update_norm: float
) -> float:
    """The learning rate must stay well below `min(R_batch / (S * G), R_crit / (T * G))`.

    The first bound keeps a sample within the clipping radius of its batch for as long as it may lag; the second keeps
    the whole run within the radius at which it collapses. Below `crossover_lag` the second binds, and lag
    seems not to matter. The radii are properties of a run and are fitted on it: there are no universal values.

    Args:
      max_lag: S, largest lag, in optimiser steps; 0 is on-policy, and then only the horizon bounds.
      horizon: T, optimiser steps of the run.
      batch_radius: R_batch, how far the params may move before stale samples leave the clip range.
      critical_radius: R_crit, how far before training collapses.
      update_norm: G, bound on the norm of one update divided by the learning rate.

    Returns:
      The cap.

    Raises:
      ValueError: `max_lag` is negative, or another argument is not above 0.
    """
    _check("learning_rate_cap", 0.0, max_lag=max_lag)
    positive = {"horizon": horizon, "batch_radius": batch_radius, "critical_radius": critical_radius}
    _check("learning_rate_cap", None, **positive, update_norm=update_norm)
    by_horizon = critical_radius / (horizon * update_norm)
    return min(batch_radius / (max_lag * update_norm), by_horizon) if max_lag else by_horizon


def crossover_lag(horizon: int, *, batch_radius: float, critical_radius: float) -> float:
    """The lag above which lag, and no longer the horizon, bounds the learning rate: `R_batch * T / R_crit`.

    Args and errors are those of `learning_rate_cap`.
    """
    _check("crossover_lag", None, horizon=horizon, batch_radius=batch_radius, critical_radius=critical_radius)
    return batch_radius * horizon / critical_radius


def check_stable(
    lag: int,
    learning_rate: float,
    horizon: int,
    *,
    batch_radius: float,
    critical_radius: float,
    update_norm: float,
    margin: float = 1.0,
) -> bool:
    """Whether lag and learning rate are inside the stable region; warns, with what to change, where they are not.

    Stable is `learning_rate <= margin * learning_rate_cap(...)`.

    Args:
      lag: the largest lag seen, or the largest allowed.
      learning_rate: of this step.
      horizon: as in `learning_rate_cap`, and so are the radii and `update_norm`.
      batch_radius: see `horizon`.
      critical_radius: see `horizon`.
      update_norm: see `horizon`.
      margin: share of the cap that may be used, in (0, 1]; the law says "well below".

    Returns:
      True where stable.

    Raises:
      ValueError: as `learning_rate_cap`, `learning_rate` is negative, or `margin` is outside (0, 1].
    """
    _check("check_stable", 0.0, learning_rate=learning_rate)
    if not 0 < margin <= 1:
        raise ValueError(f"check_stable: margin: expected a number in (0, 1], got {margin}")
    cap = margin * learning_rate_cap(
        lag, horizon, batch_radius=batch_radius, critical_radius=critical_radius, update_norm=update_norm
    )
    if learning_rate <= cap:
        return True
    oldest = math.floor(margin * batch_radius / (learning_rate * update_norm))
    longest = math.floor(margin * critical_radius / (learning_rate * update_norm))
    changes = [f"a lag of at most {oldest}"] if lag > oldest else []
    changes += [f"a run of at most {longest} steps"] if horizon > longest else []
    advice = " or ".join([f"set learning_rate to at most {cap:.3g}", *([" and ".join(changes)] if changes else [])])
    warnings.warn(
        f"lag {lag} with learning_rate {learning_rate:.3g} over {horizon} steps is unstable: {advice}",
        stacklevel=2,
    )
    return False


def admission_capacity(
    *, max_concurrent: int, running: int, max_lag: int, version: int, batch: int, accepted: int
) -> int:
    """How many rollouts may start now so that none is older than `max_lag` when its turn to train comes.

    `max(0, min(max_concurrent - running, (max_lag + version + 1) * batch - (accepted + running)))`: at version v
    the learner has used v batches, so whatever is beyond `max_lag + 1` further ones would wait too long.

    After a restart from a checkpoint, count `accepted = version * batch`; from 0, the rule admits a burst that is stale
    before it trains.

    Args:
      max_concurrent: most rollouts in flight.
      running: rollouts in flight.
      max_lag: in versions; 0 is on-policy.
      version: of the learner, batches trained so far.
      batch: rollouts that one version consumes.
      accepted: finished rollouts accepted for training since version 0.

    Returns:
      0 or more.

    Raises:
      ValueError: an argument is negative, or `max_concurrent` or `batch` is 0.

    Fu et al. 2025, AReaL (https://arxiv.org/abs/2505.24298).
    """
    _check("admission_capacity", 0.0, running=running, max_lag=max_lag, version=version, accepted=accepted)
    _check("admission_capacity", None, max_concurrent=max_concurrent, batch=batch)
    fresh = (max_lag + version + 1) * batch - (accepted + running)
    return max(0, min(max_concurrent - running, fresh))


def _check(name: str, least: float | None, **numbers: float) -> None:
    """Finite, and at least `least`; None is above 0."""
    for argument, value in numbers.items():
        if not math.isfinite(value) or (value <= 0 if least is None else value < least):
            expected = "above 0" if least is None else f"of {least:g} or more"
            raise ValueError(f"{name}: {argument}: expected a finite number {expected}, got {value}")
