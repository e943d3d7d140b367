"""The arithmetic of one decoder layer, for every family, once: the training forward and the sampler both call it.

What differs between the two comes in from outside: `attend` (forest rows, or a cache), and the layout of the
parameters, which may be separate (`config.layer_parameters`) or fused for decoding (`decoder.unstack`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentrl_jax.kernels.steady import steady
from agentrl_jax.models.config import DecoderConfig
from agentrl_jax.models.experts import mixture
from agentrl_jax.models.rotary import Rotation, rotate

# (q [B, T, H, C], k [B, T, J, C], v [B, T, J, C]) -> (attended [B, T, H, C], whatever it carries on)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Place = Callable[[jax.Array], jax.Array]  # the same array, put somewhere
_FEW = 64  # rows of a decode batch; of some hundred, turning the result back costs more than it spares


def _anywhere(x: jax.Array) -> jax.Array:
    return x


class OutputMajor(NamedTuple):
    """A projection with its outputs first, as decoding reads it.

    Of 32 rows and a weight in bf16, a CPU with matrix instructions computes 3 to 4 times as much in a second as with
    the inputs first (`benchmarks/RESULTS.md`), and again 1.6 times as much with the weight as left factor; in f32 there
    is little between them, but the order of a sum no longer depends on the number of rows, which there it would with
    the weight on the left.
    """

    weight: jax.Array  # [N, D]


def layer(
    config: DecoderConfig, p: dict[str, Any], x: jax.Array, rotation: Rotation, attend: Attend,
    *, fixed_places: bool = False, between: Place = _anywhere, within: Place = _anywhere,
) -> tuple[jax.Array, Any]:  # fmt: skip
    """One layer: x [B, T, D] -> (x, what `attend` carried on). `p` in the dtype of x.

    `x + attention(norm(x))`, then `x + mlp(norm(x))`; with `post_norms` both terms are normalised once more.
    `fixed_places`: a token's numbers may not depend on the other tokens, to the bit (see `experts.mixture`).
    `between`, `within`: where x lies on a mesh outside of both terms, and what they read once it is normalised.
    """
    normed = partial(norm, config, fixed_places=fixed_places)
    q, k, v = _query_key_value(config, p, within(normed(x, p["attention_norm"])), normed)
    attended, carried = attend(rotate(q, rotation), rotate(k, rotation), v)
    x = between(x + _post(config, _out(p, attended.astype(x.dtype)), p, "attention_post_norm", normed))
    y = within(normed(x, p["mlp_norm"]))
    if config.experts:
        y = mixture(config, p, y, activation(config), fixed_places=fixed_places)
    else:
        y = _mlp(config, p, y)
    return between(x + _post(config, y, p, "mlp_post_norm", normed)), carried


def embed(config: DecoderConfig, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding [V, D] in the compute dtype, times sqrt(D) where the family does so. -> [..., D]."""
    x = table[tokens].astype(jnp.dtype(config.compute_dtype))
    return x * jnp.asarray(config.width**0.5, x.dtype) if config.embedding_scale else x


def norm(config: DecoderConfig, x: jax.Array, scale: jax.Array, *, fixed_places: bool = False) -> jax.Array:
    """`rms_norm` as the family has it: times `scale`, or times 1 + `scale`. `fixed_places` as in `layer`."""

    def normed(x: jax.Array) -> jax.Array:
        return rms_norm(x, scale, config.norm_eps, offset=1.0 if config.norm_offset else 0.0)

    return steady(normed, x) if fixed_places else normed(x)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """Root-mean-square normalisation in f32: x / sqrt(mean(x^2) + eps) * (offset + scale), over the last axis.

    x [..., D], scale [D]; the result has x's dtype. Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    gain = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (wide * (gain + offset if offset else gain)).astype(x.dtype)


def activation(config: DecoderConfig) -> Callable[[jax.Array], jax.Array]:
    """What the gate of an MLP goes through. Shazeer 2020, arXiv:2002.05202."""
    return jax.nn.silu if config.activation == "silu" else _gelu_tanh


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap), or the logits themselves."""
    return logits if cap is None else cap * jnp.tanh(logits * (1.0 / cap))


def product(x: jax.Array, weight: jax.Array | OutputMajor) -> jax.Array:
    """x [..., D] and weight [D, ...] (or one laid out for decoding) -> [..., ...], as one product of two matrices.

    The gradient of the weight then sums over a single dimension. Over two, [B, T], a CPU first writes both factors
    anew in columns, which takes longer than the product.
    """
    if isinstance(weight, OutputMajor):
        return _by_outputs(x.reshape(-1, x.shape[-1]), weight.weight).reshape(*x.shape[:-1], -1)
    flat = x.reshape(-1, x.shape[-1]) @ weight.reshape(weight.shape[0], -1)
    return flat.reshape(*x.shape[:-1], *weight.shape[1:])


def _by_outputs(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [R, D] and weight [N, D] -> [R, N]."""
    turned = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if x.dtype == jnp.bfloat16 and x.shape[0] <= _FEW:
        # Else XLA swaps the factors to be rid of the turn, which a CPU takes 1.6 times as long for.
        turned = jax.lax.platform_dependent(turned, cpu=jax.lax.optimization_barrier, default=lambda x: x)
    return turned.T.astype(x.dtype)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _query_key_value(
    config: DecoderConfig, p: dict[str, Any], y: jax.Array, normed: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    h, j, c = config.heads, config.kv_heads, config.head_width
    if "qkv" in p:
        fused = _plus(product(y, p["qkv"]), p.get("qkv_bias"))
        fused = fused.reshape(*y.shape[:-1], h + 2 * j, c)
        q, k, v = fused[..., :h, :], fused[..., h : h + j, :], fused[..., h + j :, :]
    else:
        q, k, v = (_plus(product(y, p[name]), p.get(f"{name}_bias")) for name in ("query", "key", "value"))
    if config.qk_norm:
        q, k = normed(q, p["query_norm"]), normed(k, p["key_norm"])
    return q, k, v


def _out(p: dict[str, Any], attended: jax.Array) -> jax.Array:
    joined = attended.reshape(*attended.shape[:-2], -1)
    weight = p["out"] if isinstance(p["out"], OutputMajor) else p["out"].reshape(joined.shape[-1], -1)
    return _plus(product(joined, weight), p.get("out_bias"))


def _mlp(config: DecoderConfig, p: dict[str, Any], y: jax.Array) -> jax.Array:
    names = ("gate", "up")
    gate, up = jnp.split(product(y, p["gate_up"]), 2, -1) if "gate_up" in p else (product(y, p[name]) for name in names)
    inner = activation(config)(gate) * up
    return product(inner, p["down"])


def _post(
    config: DecoderConfig, y: jax.Array, p: dict[str, Any], name: str, normed: Callable[..., jax.Array]
) -> jax.Array:
    return normed(y, p[name]) if config.post_norms else y


def _plus(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
