"""Published algorithms as compositions; defaults are those of the papers."""

from __future__ import annotations

from functools import partial

from agentrl_jax.rl import advantages, kl, ratios, surrogates, weights
from agentrl_jax.rl.objective import Objective
from agentrl_jax.rl.types import Correction


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
