"""Low-rank adapters: a few matrices beside frozen projections, and the only thing that trains.

Hu et al. 2021, arXiv:2106.09685: a projection W [in, out] acts as W + (alpha / rank) A B, A [in, rank], B [rank, out].
Dettmers et al. 2023, arXiv:2305.14314 (QLoRA): the frozen W is kept in 4 or 8 bits.

The decoders know nothing of it. A projection that adapters belong to is replaced in the params tree by a box,
`Adapted`, which flax opens where a layer asks for its parameter: inside the scan over layers, so that neither a merged
copy of the model nor a gradient of its size ever exists. `qwix` quantises; its own LoRA is not used, since what it
intercepts are the operations of a flax module, and the sampler's decoding has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from flax.core.meta import AxisMetadata

from agentrl_jax.errors import UserError

# Our projections -> how many axes after [L] are summed over.
PROJECTIONS = {"query": 1, "key": 1, "value": 1, "out": 2, "gate": 1, "up": 1, "down": 1}
_BLOCK = 64  # inputs that share a scale in a quantised projection, at most


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which projections get adapters, and how large. `base`: the bits that the frozen projections are kept in."""

    rank: int = 16
    alpha: float = 32.0  # the adapters' product is multiplied by alpha / rank
    targets: tuple[str, ...] = tuple(PROJECTIONS)
    base: Literal["full", "int8", "int4", "nf4"] = "full"  # all but full need qwix


class LoraParams(struct.PyTreeNode):
    """A policy's params where adapters train: what does, and what is frozen."""

    adapters: Any  # {projection: {"a": [L, ...in, r], "b": [L, r, ...out]}}
    base: Any  # the model's params
    scale: float = struct.field(pytree_node=False)  # alpha / rank


class Adapted(struct.PyTreeNode, AxisMetadata):
    """A projection with its adapters, in the place of the projection. Every leaf is stacked over layers, or none."""

    base: Any  # [...in, ...out]; first, since flax compares its shape with the layer's
    a: jax.Array  # [...in, r]
    b: jax.Array  # [r, ...out]
    scale: float = struct.field(pytree_node=False)

    def unbox(self) -> jax.Array:
        """base + scale * a b, in the dtype of the adapters: in a base of fewer bits small products would be lost."""
        return _full(self.base).astype(self.a.dtype) + jnp.tensordot(self.a, self.b, 1) * self.scale

    def replace_boxed(self, val: Any) -> Any:
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> Adapted:
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Adapted:
        return self


def check(lora: Lora, shapes: Any) -> None:
    """Raises `UserError` naming the setting that the model with params of these shapes cannot take."""
    if lora.rank < 1:
        raise UserError(f"policy.lora.rank={lora.rank}: expected at least 1")
    if not lora.alpha > 0:
        raise UserError(f"policy.lora.alpha={lora.alpha}: expected a number above 0")
    if not lora.targets or len(set(lora.targets)) != len(lora.targets):
        raise UserError(f"policy.lora.targets={lora.targets}: expected different projections, at least one")
    for name in lora.targets:
        if name not in PROJECTIONS or name not in shapes["layers"]:
            raise UserError(f"policy.lora.targets: {name!r} is none of {', '.join(PROJECTIONS)}")
        if name in ("gate", "up", "down") and shapes["layers"][name].ndim > 3:
            raise UserError(f"policy.lora.targets: {name!r} is a projection of experts, which get no adapters")


def init(lora: Lora, params: Any, key: jax.Array) -> LoraParams:
    """Params whose adapters change nothing yet: A uniform in +-1/sqrt(in), B zero. f32, whatever the base is.

    Quantises the targeted projections where `lora.base` says so.
    """
    adapters = {}
    for name, drawn in zip(lora.targets, jax.random.split(key, len(lora.targets)), strict=True):
        inputs, outputs = _axes(name, params["layers"][name].shape)
        layers, bound = params["layers"][name].shape[0], prod(inputs) ** -0.5
        a = jax.random.uniform(drawn, (layers, *inputs, lora.rank), jnp.float32, -bound, bound)
        adapters[name] = {"a": a, "b": jnp.zeros((layers, lora.rank, *outputs), jnp.float32)}
    return LoraParams(adapters, quantized(lora, params), lora.alpha / lora.rank)


def quantized(lora: Lora, params: Any) -> Any:
    """The params with the targeted projections in fewer bits: absolute maxima of up to 64 inputs are their scales."""
    if lora.base == "full":
        return params
    qwix = _qwix()

    def pack(name: str, x: jax.Array) -> Any:
        axis = PROJECTIONS[name]  # the last of the inputs
        block = next(n for n in range(min(_BLOCK, x.shape[axis]), 0, -1) if x.shape[axis] % n == 0)
        others = [i for i in range(x.ndim) if i != axis]
        return qwix.quantize(x, lora.base, channelwise_axes=others, tiled_axes={axis: block})

    packed = {name: pack(name, params["layers"][name]) for name in lora.targets}
    return {**params, "layers": {**params["layers"], **packed}}


def attached(params: Any) -> Any:
    """Params as a decoder takes them: adapters boxed with their projections. Other params pass."""
    if not isinstance(params, LoraParams):
        return params
    layers = dict(params.base["layers"])
    for name, pair in params.adapters.items():
        layers[name] = Adapted(layers[name], pair["a"], pair["b"], params.scale)
    return {**params.base, "layers": layers}


def merged(params: Any) -> Any:
    """The params of a plain model that computes the same. Other params pass."""
    if not isinstance(params, LoraParams):
        return params
    layers = attached(params)["layers"]
    opened = {name: jax.vmap(Adapted.unbox)(layers[name]) for name in params.adapters}
    return {**params.base, "layers": {**layers, **opened}}


def trained(params: Any) -> Any:
    """The part of the params that an optimizer sees: the adapters where there are some, else everything."""
    return params.adapters if isinstance(params, LoraParams) else params


def with_trained(params: Any, part: Any) -> Any:
    """`params` with its trained part replaced; nothing frozen is copied."""
    return params.replace(adapters=part) if isinstance(params, LoraParams) else part


def _axes(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(inputs, outputs) of a stacked projection [L, ...in, ...out]."""
    cut = 1 + PROJECTIONS[name]
    return tuple(shape[1:cut]), tuple(shape[cut:])


def _full(base: Any) -> jax.Array:
    return base if isinstance(base, jax.Array) else _qwix().dequantize(base)


def _qwix() -> Any:
    try:
        import qwix
    except ImportError as error:
        raise UserError("policy.lora.base: quantised projections need qwix; type: pip install qwix") from error
    return qwix
