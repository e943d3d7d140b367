"""The Llama decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, optionally tied head.

Touvron et al. 2023, arXiv:2302.13971. Parameters of the layers are stacked on a leading axis [L, ...]
for `nn.scan`; `unstack` lays them out for decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.errors import UserError
from agentrl_jax.kernels.attention import forest_attention
from agentrl_jax.models.layers import rms_norm, rope, swiglu
from agentrl_jax.models.tensors import Tensor

MODEL_TYPES = ("llama",)

Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shapes and constants of one model. Raises `ValueError` naming the fields that do not fit together."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    context: int = 2048  # positions the model was made for
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True  # the head is the embedding
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    model_type: str = "llama"  # the family, in the word of config.json

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"LlamaConfig: kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_width % 2:
            raise ValueError(f"LlamaConfig: head_width={self.head_width} must be even, rotary positions pair channels")


def _shapes(config: LlamaConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shape, logical axes) of each parameter of one layer."""
    d, h, j, c, f = config.width, config.heads, config.kv_heads, config.head_width, config.mlp_width
    shapes = {
        "attention_norm": (d,), "query": (d, h, c), "key": (d, j, c), "value": (d, j, c), "out": (h, c, d),
        "mlp_norm": (d,), "gate": (d, f), "up": (d, f), "down": (f, d),
    }  # fmt: skip
    axes = {
        "attention_norm": (None,), "query": ("width", "heads", None), "key": ("width", "kv_heads", None),
        "value": ("width", "kv_heads", None), "out": ("heads", None, "width"), "mlp_norm": (None,),
        "gate": ("width", "mlp"), "up": ("width", "mlp"), "down": ("mlp", "width"),
    }  # fmt: skip
    return shapes, axes


def _initializer(name: str, config: LlamaConfig) -> nn.initializers.Initializer:
    """Fan-in scaled normals; what writes to the residual stream starts smaller by sqrt(2L)."""
    if name.endswith("norm"):
        return nn.initializers.ones
    fan_in = {"out": config.heads * config.head_width, "down": config.mlp_width}.get(name, config.width)
    scale = fan_in**-0.5
    return nn.initializers.normal(scale / (2 * config.layers) ** 0.5 if name in ("out", "down") else scale)


class Block(nn.Module):
    """One pre-norm decoder layer on forest rows."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array, subtree_ends: jax.Array) -> tuple[jax.Array, None]:
        cfg, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        p = {
            name: self.param(name, _initializer(name, cfg), shape, jnp.dtype(cfg.param_dtype)).astype(dtype)
            for name, shape in _shapes(cfg)[0].items()
        }
        y = rms_norm(x, p["attention_norm"], cfg.norm_eps)
        q = rope(jnp.einsum("btd,dhc->bthc", y, p["query"]), positions, cfg.rope_theta)
        k = rope(jnp.einsum("btd,djc->btjc", y, p["key"]), positions, cfg.rope_theta)
        v = jnp.einsum("btd,djc->btjc", y, p["value"])
        a = forest_attention(q, k, v, subtree_ends, scale=cfg.head_width**-0.5)
        x = x + jnp.einsum("bthc,hcd->btd", a.astype(dtype), p["out"])
        y = rms_norm(x, p["mlp_norm"], cfg.norm_eps)
        return x + swiglu(y @ p["gate"], y @ p["up"]) @ p["down"], None


class Llama(nn.Module):
    """Tokens of forest rows to hidden states after the final norm."""

    config: LlamaConfig
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, subtree_ends: jax.Array) -> jax.Array:
        cfg = self.config
        param, vocab = jnp.dtype(cfg.param_dtype), (cfg.vocab_size, cfg.width)
        normal = nn.initializers.normal(cfg.width**-0.5)
        x = self.param("embedding", normal, vocab, param)[tokens].astype(jnp.dtype(cfg.compute_dtype))
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        stack = nn.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast), length=cfg.layers,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        x, _ = stack(cfg, name="layers")(x, positions, subtree_ends)
        scale = self.param("final_norm", nn.initializers.ones, (cfg.width,), param)
        if not cfg.tied:
            self.param("unembedding", normal, vocab, param)
        return rms_norm(x, scale, cfg.norm_eps).astype(jnp.float32)


def init(config: LlamaConfig, key: jax.Array) -> Params:
    """Random parameters."""

    def draw(key: jax.Array) -> Params:
        tokens = jnp.zeros((1, 1), jnp.int32)
        return dict(Llama(config).init(key, tokens, tokens, tokens + 1)["params"])

    return jax.jit(draw)(key)


def hidden(
    config: LlamaConfig, params: Params, tokens: jax.Array, positions: jax.Array, subtree_ends: jax.Array,
    remat: bool = False,
) -> jax.Array:  # fmt: skip
    """Hidden states f32[B, T, D] after the final norm. tokens, positions, subtree_ends i32[B, T].

    `remat` recomputes each layer in the backward pass instead of keeping its intermediates.
    """
    return Llama(config, remat).apply({"params": params}, tokens, positions, subtree_ends)  # pyright: ignore


def unembedding(config: LlamaConfig, params: Params) -> jax.Array:
    """The head [V, D]: logits are hidden @ head.T."""
    return params["embedding"] if config.tied else params["unembedding"]


def param_count(config: LlamaConfig) -> int:
    """Number of parameters, computed from the shapes alone."""
    total = 0
    for shape in _shapes(config)[0].values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return config.layers * total + config.width + (1 if config.tied else 2) * config.vocab_size * config.width


def logical_axes(config: LlamaConfig) -> dict[str, Any]:
    """The logical axis names of every parameter, as a tree that matches `init`'s."""
    layers = {name: ("layers", *axes) for name, axes in _shapes(config)[1].items()}
    tree: dict[str, Any] = {"embedding": ("vocab", "width"), "layers": layers, "final_norm": (None,)}
    return tree if config.tied else {**tree, "unembedding": ("vocab", "width")}


def unstack(config: LlamaConfig, params: Params, dtype: str | None = None) -> Params:
    """The same parameters laid out for decoding: a dict a layer, query/key/value and gate/up fused, cast.

    One wide product instead of three narrow ones is what a decode step of a small batch is made of.
    """
    dtype = dtype or config.compute_dtype
    d, h, j, c = config.width, config.heads, config.kv_heads, config.head_width

    def layer(index: int) -> Params:
        p = jax.tree.map(lambda x: x[index].astype(dtype), params["layers"])
        return {
            "attention_norm": p["attention_norm"],
            "qkv": jnp.concatenate(
                [p["query"].reshape(d, h * c), p["key"].reshape(d, j * c), p["value"].reshape(d, j * c)], axis=1
            ),
            "out": p["out"].reshape(h * c, d),
            "mlp_norm": p["mlp_norm"],
            "gate_up": jnp.concatenate([p["gate"], p["up"]], axis=1),
            "down": p["down"],
        }

    rest = {name: x.astype(dtype) for name, x in params.items() if name != "layers"}
    return {**rest, "layers": tuple(layer(index) for index in range(config.layers))}


def config_from_json(raw: dict[str, Any], where: str) -> LlamaConfig:
    """`LlamaConfig` from a Hugging Face config.json. Raises `UserError` for what this decoder does not compute."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    expected = {"rope_type": (kind, "default"), "hidden_act": (raw.get("hidden_act", "silu"), "silu")}
    expected |= {name: (bool(raw.get(name, False)), False) for name in ("attention_bias", "mlp_bias")}
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise UserError(f"{where}: {name} is {found!r}; this decoder computes {wanted!r} only")
    missing = [name for name in _FIELDS.values() if name not in raw]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}")
    sizes: dict[str, Any] = {ours: int(raw[theirs]) for ours, theirs in _FIELDS.items()}
    return LlamaConfig(
        **sizes,
        kv_heads=int(raw.get("num_key_value_heads") or sizes["heads"]),
        head_width=int(raw.get("head_dim") or sizes["width"] // sizes["heads"]),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


_FIELDS = {
    "vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "mlp_width": "intermediate_size", "context": "max_position_embeddings",
}  # fmt: skip


def config_to_json(config: LlamaConfig) -> dict[str, Any]:
    """The config.json of Hugging Face's Llama for this model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": config.param_dtype,
    }


_LAYER = {
    "attention_norm": "input_layernorm", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
    "value": "self_attn.v_proj", "out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def tensors(config: LlamaConfig) -> Iterator[Tensor]:
    """Every tensor of a Hugging Face checkpoint of this model."""
    vocab = (config.vocab_size, config.width)
    yield Tensor("model.embed_tokens.weight", ("embedding",), None, vocab, np.asarray, np.asarray)
    yield Tensor("model.norm.weight", ("final_norm",), None, (config.width,), np.asarray, np.asarray)
    if not config.tied:
        yield Tensor("lm_head.weight", ("unembedding",), None, vocab, np.asarray, np.asarray)
    for layer in range(config.layers):
        for name, shape in _shapes(config)[0].items():
            yield _tensor(f"model.layers.{layer}.{_LAYER[name]}.weight", name, layer, shape)


def _tensor(theirs: str, name: str, layer: int, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return Tensor(theirs, ("layers", name), layer, shape, np.asarray, np.asarray)
    inputs = 2 if name == "out" else 1  # leading axes that are summed over
    rows, columns = prod(shape[:inputs]), prod(shape[inputs:])
    return Tensor(
        theirs, ("layers", name), layer, (columns, rows),
        lambda x: x.T.reshape(shape), lambda x: x.reshape(rows, columns).T,
    )  # fmt: skip
