"""The optimizer that a stage's settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import optax

from agentrl_jax.learner.masters import with_masters
from agentrl_jax.learner.optimizers import adafactor, adamw, muon

if TYPE_CHECKING:
    from agentrl_jax.recipes.config import Loop, Sft

HOST = "pinned_host"


def make_optimizer(settings: Loop | Sft, *, updates: int) -> optax.GradientTransformation:
    """What applies the gradients of a stage of so many updates; with masters where the params are not f32."""
    shared: dict[str, Any] = {
        "warmup": settings.warmup,
        "total": updates,
        "schedule": settings.schedule,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
    }
    moments: dict[str, Any] = {} if settings.moment_dtype == "float32" else {"moment_dtype": settings.moment_dtype}
    made = {"adamw": adamw, "adafactor": adafactor, "muon": muon}[settings.optimizer]
    return with_masters(made(settings.learning_rate, **shared, **moments))


def memory_kind(settings: Loop | Sft) -> str | None:
    """Where the moments and masters of a stage lie between updates; None: on the devices."""
    return HOST if settings.offload else None


def can_offload() -> bool:
    """Whether the devices of this process can read and write their host's memory."""
    return HOST in {memory.kind for memory in jax.local_devices()[0].addressable_memories()}
