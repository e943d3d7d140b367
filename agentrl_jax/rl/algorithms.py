"""Published algorithms as compositions; defaults are those of the papers.

What a paper does before the loss (which groups are kept, how rewards are shaped, the learning rate) is not here. Each
raises ValueError for a setting without a meaning: `beta` that is negative or not finite, `entropy_coef` that is not
finite, and what the pieces refuse.
"""

from __future__ import annotations

import math
from functools import partial

from agentrl_jax.rl import advantages, corrections, kl, ratios, surrogates, weights
from agentrl_jax.rl.objective import Objective, credit_only, outcome
from agentrl_jax.rl.types import Correction, Whitening


def reinforce() -> Objective:
    """REINFORCE: the reward of the trajectory times the gradient of its log-probability; one update per batch.

    Williams 1992 (https://doi.org/10.1007/BF00992696).
    """
    return Objective(
        advantage=outcome,
        ratio=ratios.on_policy,
        surrogate=surrogates.linear,
        weights=weights.constant(1.0),
    )


def rloo() -> Objective:
    """RLOO: REINFORCE on whole trajectories with a leave-one-out baseline; one update per batch.

    The paper's KL penalty is a term of the reward. Ahmadian et al. 2024 (https://arxiv.org/abs/2402.14740).
    """
    return Objective(
        advantage=advantages.leave_one_out,
        ratio=ratios.on_policy,
        surrogate=surrogates.linear,
        weights=weights.constant(1.0),
    )


def reinforce_plus_plus(*, clip: float = 0.2, eps: float = 1e-8) -> Objective:
    """REINFORCE++: rewards whitened over all action tokens of the step, token ratio, PPO clip; needs no groups.

    The paper's KL is a term of the reward: give `assign` as `credit` the reward-to-go of `-beta * k1` per token.
    Std of the population, as in the paper's own code. Hu et al. 2025 (https://arxiv.org/abs/2501.03262).
    """
    return Objective(
        advantage=outcome,
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(clip, clip),
        weights=weights.sequence_mean,
        whiten=partial(advantages.global_whitened, ddof=0, eps=eps),
    )


def reinforce_plus_plus_baseline(*, clip: float = 0.2, beta: float = 0.0, eps: float = 1e-8) -> Objective:
    """REINFORCE++ with a baseline: distance from the group's mean, in stds of the whole step; k2 to the reference.

    What is centered by group has mean 0, so only the scale is the step's, and a constant group stays at exactly 0;
    released trainers take the mean over tokens off again (`whiten` with `global_whitened`). `beta=0` leaves the
    reference out. Hu et al. 2025 (https://arxiv.org/abs/2501.03262).
    """
    _check("reinforce_plus_plus_baseline", beta=beta)
    return Objective(
        advantage=partial(advantages.group_centered, scale_by_std=False),
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(clip, clip),
        weights=weights.sequence_mean,
        kl=kl.k2 if beta else None,
        beta=beta,
        whiten=partial(advantages.batch_scaled, ddof=0, eps=eps),
    )


def ppo(
    *,
    clip: float = 0.2,
    dual: float | None = None,
    entropy_coef: float = 0.0,
    whiten: Whitening | None = None,
    correction: Correction | None = None,
) -> Objective:
    """PPO: advantages per token from a critic (`credit` of `assign`, by GAE), token ratio, clip, mean over tokens.

    `dual` bounds what a token with a negative advantage can do far off policy; `whiten` normalises the
    advantages of the step, as most implementations do. Schulman et al. 2017 (https://arxiv.org/abs/1707.06347).
    """
    _check("ppo", entropy_coef=entropy_coef)
    return Objective(
        advantage=credit_only,
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(clip, clip, dual),
        weights=weights.token_mean,
        entropy_coef=entropy_coef,
        correction=correction,
        whiten=whiten,
    )


def decoupled_ppo(*, clip: float = 0.2, cap: float = 5.0, eps: float = 1e-8) -> Objective:
    """Decoupled PPO, for stale samples: the clip is anchored at the rescored old policy, not at the sampler's.

    `min(pi_old / mu, cap) * min(r A, clip(r) A)` with r = pi / pi_old; without a critic, as AReaL runs it: the
    trajectory's reward, whitened over the step. With one, replace `advantage` by `credit_only`.
    Hilton et al. 2021 (https://arxiv.org/abs/2110.00641); Fu et al. 2025, AReaL (https://arxiv.org/abs/2505.24298).
    """
    return Objective(
        advantage=outcome,
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(clip, clip),
        weights=weights.token_mean,
        correction=corrections.truncated(cap),
        whiten=partial(advantages.global_whitened, ddof=0, eps=eps),
    )


def grpo(
    *,
    clip: float = 0.2,
    beta: float = 0.04,
    eps: float = 1e-6,
    entropy_coef: float = 0.0,
    correction: Correction | None = None,
) -> Objective:
    """GRPO: group-normalised rewards (sample std), token ratio, PPO clip, k3 to the reference, mean per sequence.

    `beta=0` leaves the reference out. Shao et al. 2024 (https://arxiv.org/abs/2402.03300).
    """
    _check("grpo", beta=beta, entropy_coef=entropy_coef)
    return Objective(
        advantage=partial(advantages.group_centered, eps=eps),
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(clip, clip),
        weights=weights.sequence_mean,
        kl=kl.k3 if beta else None,
        beta=beta,
        entropy_coef=entropy_coef,
        correction=correction,
    )


def m_grpo(*, clip: float = 0.2, beta: float = 0.001, eps: float = 1e-4) -> Objective:
    """M-GRPO: GRPO with a mean over tokens inside each turn, over turns, over trajectories: long turns weigh no more.

    `beta=0` leaves the reference out. Wei et al. 2025, WebAgent-R1 (https://arxiv.org/abs/2505.16421); beta and eps
    are those of its released configuration.
    """
    _check("m_grpo", beta=beta)
    return Objective(
        advantage=partial(advantages.group_centered, eps=eps),
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(clip, clip),
        weights=weights.nested_turn_mean,
        kl=kl.k3 if beta else None,
        beta=beta,
    )


def dr_grpo(length: float, *, clip: float = 0.2, correction: Correction | None = None) -> Objective:
    """Dr. GRPO: no division by the std and none by the sequence's length; no KL.

    `length` is the most action tokens a trajectory may have, the same for the whole run.
    Liu et al. 2025 (https://arxiv.org/abs/2503.20783).
    """
    return Objective(
        advantage=partial(advantages.group_centered, scale_by_std=False),
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(clip, clip),
        weights=weights.constant(length),
        correction=correction,
    )


def dapo(*, low: float = 0.2, high: float = 0.28, correction: Correction | None = None) -> Objective:
    """DAPO's objective: clip-higher and a mean over tokens; no KL.

    Its dynamic sampling (groups without a signal are replaced) and its soft penalty on overlong answers
    concern which trajectories arrive, not this loss. Yu et al. 2025 (https://arxiv.org/abs/2503.14476).
    """
    return Objective(
        advantage=advantages.group_centered,
        ratio=ratios.token,
        surrogate=surrogates.ppo_clip(low, high),
        weights=weights.token_mean,
        correction=correction,
    )


def gspo(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """GSPO: one ratio per trajectory, the geometric mean of its tokens', clipped as a whole; no KL.

    The clip range is about a thousand times narrower than a token ratio's: 0.2 would clip nothing.
    Zheng et al. 2025 (https://arxiv.org/abs/2507.18071).
    """
    return Objective(
        advantage=advantages.group_centered,
        ratio=ratios.sequence,
        surrogate=surrogates.ppo_clip(low, high),
        weights=weights.sequence_mean,
    )


def gspo_token(*, low: float = 3e-4, high: float = 4e-4) -> Objective:
    """GSPO-token: GSPO's ratio and clip with a gradient for each token by itself, for advantages that differ by token.

    Zheng et al. 2025 (https://arxiv.org/abs/2507.18071).
    """
    return Objective(
        advantage=advantages.group_centered,
        ratio=ratios.sequence_token,
        surrogate=surrogates.ppo_clip(low, high),
        weights=weights.sequence_mean,
    )


def cispo(*, low: float = 1.0, high: float = 4.0) -> Objective:
    """CISPO: the ratio, clipped and detached, weighs the log-probability, so no token is left out; no KL.

    A weight is at most `1 + high`; see `surrogates.cispo` for where the bound comes from.
    MiniMax 2025 (https://arxiv.org/abs/2506.13585).
    """
    return Objective(
        advantage=advantages.group_centered,
        ratio=ratios.token,
        surrogate=surrogates.cispo(low, high),
        weights=weights.token_mean,
    )


def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Objective:
    """SAPO: a smooth gate on the token ratio in place of the clip, narrower where the advantage is negative; no KL.

    Combines with no correction: the gate already damps what is off policy. Gao et al. 2025
    (https://arxiv.org/abs/2511.20347).
    """
    return Objective(
        advantage=advantages.group_centered,
        ratio=ratios.token,
        surrogate=surrogates.sapo(tau_pos, tau_neg),
        weights=weights.sequence_mean,
    )


def _check(name: str, *, beta: float = 0.0, entropy_coef: float = 0.0) -> None:
    if not 0 <= beta < math.inf:
        raise ValueError(f"{name}: beta: expected a finite number of 0 or more, got {beta}: 0 leaves the reference out")
    if not math.isfinite(entropy_coef):
        raise ValueError(f"{name}: entropy_coef: expected a finite number, got {entropy_coef}")
