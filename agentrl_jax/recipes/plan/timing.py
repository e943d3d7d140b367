"""How long a step could take: a bracket, never a single number, from matrix work and bytes between chips.

No run of this package on a TPU stands behind it. The shares of the peak (0.85, 0.75) were chosen on five published
runs of other trainers (MaxText 16B and 32B on v5e-256, 32B on v5p-128, Llama 3.1 8B on v6e-256, 70B on TPU7x), on which
the point came out within 12 % and the bracket held all five: in sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agentrl_jax.models.llama import LlamaConfig
from agentrl_jax.recipes.plan.topology import Topology

FLOOR, POINT, CEILING = 0.85, 0.75, 0.55  # shares of the peak; a compiled plan's ceiling is from cycles instead
CALIBRATION = "5 published runs of other trainers, in sample; no run of this package on a TPU"


class Work(NamedTuple):
    """Operations of one step over all devices, and of the model's own arithmetic."""

    matmul: float  # executed, without attention
    attention: float  # executed, causal
    ideal: float  # 3 x forward: what MFU counts


class Bracket(NamedTuple):
    """Seconds of one update step."""

    floor: float
    point: float
    ceiling: float
    tokens_per_s: float
    mfu: float  # at the point


def forward_flops(model: LlamaConfig, tokens: int, width: int) -> tuple[float, float]:
    """(matmuls without the head, causal attention) of one forward pass over rows of `width` tokens."""
    d, h, j, c = model.width, model.heads, model.kv_heads, model.head_width
    experts = max(1, model.experts_per_token)
    layer = d * c * (2 * h + 2 * j) + 3 * d * model.mlp_width * experts + d * model.experts
    causal = 2.0 * 2.0 * tokens * (width / 2) * h * c
    return 2.0 * tokens * layer * model.layers, causal * model.layers


def head_flops(model: LlamaConfig, tokens: int) -> float:
    """One projection of all tokens to the vocabulary."""
    return 2.0 * tokens * model.width * model.vocab_size


def work(model: LlamaConfig, tokens: int, width: int, *, remat: bool, updates: int, scores: int) -> Work:
    """A step of `updates` gradients and `scores` forward passes over its tokens; the loss takes 3 products of the head.

    `remat` recomputes a layer but for its last product, which nobody reads again.
    """
    layers, attention = forward_flops(model, tokens, width)
    head = head_flops(model, tokens)
    last = 2.0 * tokens * model.width * model.mlp_width * model.layers if not model.experts else 0.0
    again = (layers - last) if remat else 0.0
    update = 3 * layers + again + 3 * head
    # Backward by tiles recomputes the scores twice: 2 products forward, 7 backward, 2 more with remat.
    tiles = 1 + 3.5 + (1 if remat else 0)
    matmul = updates * update + scores * (layers + head)
    return Work(matmul, attention * (updates * tiles + scores), updates * 3 * (layers + attention + head))


def bracket(
    topology: Topology, devices: int, found: Work, tokens: int, link_s: float, cycles_s: float | None = None
) -> Bracket:
    """Seconds from work over all `devices` that learn; `link_s`: between chips; `cycles_s`: the compiler's estimate."""
    chip = topology.chip
    peak = chip.tflops * 1e12 * devices
    attention = found.attention / (peak * chip.attention)
    floor = max(found.matmul / (FLOOR * peak) + attention, link_s)
    point = max(found.matmul / (POINT * peak) + attention, link_s)
    ceiling = (found.matmul / (CEILING * peak) if cycles_s is None else cycles_s) + attention + link_s
    ceiling = max(ceiling, point)
    return Bracket(floor, point, ceiling, tokens / point, found.ideal / (point * peak))


def link_seconds(topology: Topology, moved: dict[str, float]) -> float:
    """Seconds for bytes a device sends by collective kind; unverified. All axes of the torus carry a share."""
    total = sum(bytes_ * (2.0 if kind == "all-reduce" else 1.0) for kind, bytes_ in moved.items())
    axes = sum(size > 1 for size in topology.shape) or 1
    wraps = all(size >= 4 for size in topology.shape)
    return total / (axes * topology.chip.link) * (1.0 if wraps else 2.0)


def to_json(found: Bracket) -> dict[str, Any]:
    return found._asdict() | {"calibrated_on": CALIBRATION}
