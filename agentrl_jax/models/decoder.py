"""The decoder of every family: scanned layers on forest rows, from one `DecoderConfig`.

Touvron et al. 2023, arXiv:2302.13971, and what the families add to it. Parameters of the layers are stacked on a
leading axis [L, ...] for `nn.scan`; `unstack` lays them out for decoding. The layer itself is `layers.layer`.
"""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from agentrl_jax.kernels.attention import forest_attention
from agentrl_jax.models import layers, rotary
from agentrl_jax.models.config import DecoderConfig, RopeScaling, layer_parameters, top_parameters
from agentrl_jax.models.rotary import Rotation
from agentrl_jax.sharding import axes_of, by_rows, by_sequence, gathered

__all__ = [
    "DecoderConfig", "Params", "RopeScaling", "hidden", "init", "logical_axes", "param_count", "shapes",
    "unembedding", "unstack",
]  # fmt: skip

Params = dict[str, Any]
_SHALLOW = 4  # up to so many layers are laid out one after another: slicing stacks costs a CPU a third of a step
_UNBOUNDED = 1 << 30  # the window of a layer that reads everything, where others slide


def _initializer(name: str, config: DecoderConfig) -> nn.initializers.Initializer:
    """Fan-in scaled normals; what writes to the residual stream starts smaller by sqrt(2L)."""
    if name.endswith("norm"):
        return nn.initializers.zeros if config.norm_offset else nn.initializers.ones
    if name.endswith("bias"):
        return nn.initializers.zeros
    fan_in = {"out": config.heads * config.head_width, "down": config.mlp_width}.get(name, config.width)
    scale = fan_in**-0.5
    return nn.initializers.normal(scale / (2 * config.layers) ** 0.5 if name in ("out", "down") else scale)


class Block(nn.Module):
    """One layer on forest rows. `kind` and `window` are what differs between layers, as scanned arrays."""

    config: DecoderConfig
    sequence: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, tables: tuple[Rotation, ...], positions: jax.Array, subtree_ends: jax.Array,
        differences: tuple[jax.Array | None, jax.Array | None],
    ) -> tuple[jax.Array, None]:  # fmt: skip
        cfg, dtype = self.config, jnp.dtype(self.config.compute_dtype)
        p = {
            name: self.param(name, _initializer(name, cfg), shape, jnp.dtype(cfg.param_dtype)).astype(dtype)
            for name, (shape, _) in layer_parameters(cfg).items()
        }
        p = {name: gathered(p[name], axes, dtype) for name, (_, axes) in layer_parameters(cfg).items()}
        kind, window = differences
        rotation = tables[0] if kind is None else jax.tree.map(lambda a, b: jnp.where(kind == 0, a, b), *tables)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            reach: dict[str, Any] = {"positions": positions, "window": window, "soft_cap": cfg.attention_soft_cap}
            axes: dict[str, Any] = {"row_axes": axes_of("rows"), "head_axes": axes_of("kv_heads")}
            return forest_attention(q, k, v, subtree_ends, scale=cfg.scale, **reach, **axes), None

        if not self.sequence:
            return layers.layer(cfg, p, x, rotation, attend)
        return layers.layer(cfg, p, by_sequence(x), rotation, attend, between=by_sequence, within=by_rows)


class Decoder(nn.Module):
    """Tokens of forest rows to hidden states after the final norm."""

    config: DecoderConfig
    remat: bool | str = False
    sequence: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, subtree_ends: jax.Array) -> jax.Array:
        cfg = self.config
        top = {
            name: self.param(name, _top_initializer(name, cfg), shape, jnp.dtype(cfg.param_dtype))
            for name, (shape, _) in top_parameters(cfg).items()
        }
        axes = top_parameters(cfg)["embedding"][1]
        x = by_rows(layers.embed(cfg, gathered(top["embedding"], axes, cfg.compute_dtype), tokens))
        unrolled = cfg.layers <= _SHALLOW
        stack = nn.scan(
            _remat(self.remat, unrolled), variable_axes={"params": 0}, split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, nn.broadcast, 0),  # pyright: ignore[reportArgumentType]
            length=cfg.layers, unroll=cfg.layers if unrolled else 1,
        )  # fmt: skip
        tables = rotary.rotations(cfg, positions)
        x, _ = stack(cfg, self.sequence, name="layers")(x, tables, positions, subtree_ends, _differences(cfg))
        # In the compute dtype like every other parameter, as in decoding.
        x = layers.norm(cfg, x, top["final_norm"].astype(x.dtype))
        return (by_rows(x) if self.sequence else x).astype(jnp.float32)


def _top_initializer(name: str, config: DecoderConfig) -> nn.initializers.Initializer:
    return _initializer(name, config) if name.endswith("norm") else nn.initializers.normal(config.width**-0.5)


def _differences(config: DecoderConfig) -> tuple[jax.Array | None, jax.Array | None]:
    """(which rotation, window) of each layer, i32[L] each; None where the layers do not differ."""
    if config.window is None:
        return None, None
    every = range(config.layers)
    windows = jnp.asarray([config.window_of(index) or _UNBOUNDED for index in every], jnp.int32)
    kinds = jnp.asarray([rotary.kind_of(config, index) for index in every], jnp.int32)
    return (None if config.window_rope_theta is None else kinds), windows


def _remat(remat: bool | str, unrolled: bool) -> type[Block]:
    name = {False: "none", True: "full"}.get(remat, remat)  # type: ignore[arg-type]
    if name == "none":
        return Block
    if name == "full":
        return nn.remat(Block, prevent_cse=unrolled)
    policy = getattr(jax.checkpoint_policies, str(name), None)
    if name not in POLICIES or policy is None:
        raise ValueError(f"remat: {remat!r}, expected one of none, full, {', '.join(POLICIES)}")
    return nn.remat(Block, prevent_cse=unrolled, policy=policy)


# Those of `jax.checkpoint_policies` that need no arguments and keep something.
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable")


def init(config: DecoderConfig, key: jax.Array) -> Params:
    """Random parameters."""

    def draw(key: jax.Array) -> Params:
        tokens = jnp.zeros((1, 1), jnp.int32)
        return dict(Decoder(config).init(key, tokens, tokens, tokens + 1)["params"])

    return jax.jit(draw)(key)


def hidden(
    config: DecoderConfig, params: Params, tokens: jax.Array, positions: jax.Array, subtree_ends: jax.Array,
    remat: bool | str = False, sequence: bool = False,
) -> jax.Array:  # fmt: skip
    """Hidden states f32[B, T, D] after the final norm. tokens, positions, subtree_ends i32[B, T].

    `remat`: what the backward pass recomputes of each layer instead of keeping it. "none" (False); "full" (True),
    everything; or the name of a policy of `jax.checkpoint_policies`, one of `POLICIES`: "dots_saveable" keeps the
    matrix products and recomputes what lies between them.

    `sequence`: on a mesh, the residual stream between the layers is split by columns as well (`sharding.by_sequence`),
    as in Korthikanti et al. 2022, arXiv:2205.05198. The same numbers, in less memory: for long rows.
    """
    return Decoder(config, remat, sequence).apply({"params": params}, tokens, positions, subtree_ends)  # pyright: ignore


def unembedding(config: DecoderConfig, params: Params) -> jax.Array:
    """The head [V, D], in the compute dtype: logits are hidden @ head.T, bounded by `config.final_soft_cap`."""
    return (params["embedding"] if config.tied else params["unembedding"]).astype(jnp.dtype(config.compute_dtype))


def shapes(config: DecoderConfig) -> Params:
    """`jax.ShapeDtypeStruct` of every parameter, as a tree that matches `init`'s."""

    def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(config.param_dtype))

    stacked = {name: leaf((config.layers, *shape)) for name, (shape, _) in layer_parameters(config).items()}
    return {**{name: leaf(shape) for name, (shape, _) in top_parameters(config).items()}, "layers": stacked}


def param_count(config: DecoderConfig) -> int:
    """Number of parameters, computed from the shapes alone."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(config)))


def logical_axes(config: DecoderConfig) -> dict[str, Any]:
    """The logical axis names of every parameter, as a tree that matches `init`'s."""
    stacked = {name: ("layers", *axes) for name, (_, axes) in layer_parameters(config).items()}
    return {**{name: axes for name, (_, axes) in top_parameters(config).items()}, "layers": stacked}


def unstack(config: DecoderConfig, params: Params, dtype: str | None = None, *, fused: bool = True) -> Params:
    """The same parameters laid out for decoding: a dict a layer, query/key/value and gate/up fused, cast.

    One wide product instead of three narrow ones is what a decode step of a small batch is made of, and each weight
    stands in the order that such products read (`layers.OutputMajor`). Not `fused`, each keeps the shape it has in a
    layer (`layer_parameters`), so that devices can share its heads.
    """
    dtype = dtype or config.compute_dtype
    d = config.width

    def one(index: int) -> Params:
        p = jax.tree.map(lambda x: x[index].astype(dtype), params["layers"])
        if not fused:
            return p
        heads = ("query", "key", "value")
        joined = {
            "qkv": jnp.concatenate([p.pop(name).reshape(d, -1) for name in heads], axis=1),
            "out": p.pop("out").reshape(-1, d),
            "gate_up": jnp.concatenate([p.pop("gate"), p.pop("up")], axis=-1),
            "down": p.pop("down"),
        }
        turned = joined if not config.experts else {name: joined[name] for name in ("qkv", "out")}
        joined |= {name: layers.OutputMajor(weight.T) for name, weight in turned.items()}
        if config.qkv_bias:
            joined["qkv_bias"] = jnp.concatenate([p.pop(f"{name}_bias").reshape(-1) for name in heads])
        return {**p, **joined}

    rest = {name: x.astype(dtype) for name, x in params.items() if name != "layers"}
    return {**rest, "layers": tuple(one(index) for index in range(config.layers))}
