"""What the families' config.json and tensor names have in common. Each family adds its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from agentrl_jax.errors import UserError
from agentrl_jax.models.config import DecoderConfig, RopeScaling, layer_parameters, top_parameters
from agentrl_jax.models.tensors import Tensor

SIZES = {
    "vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "mlp_width": "intermediate_size", "context": "max_position_embeddings",
}  # fmt: skip
TOP = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "unembedding": "lm_head.weight"}
LAYER = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight", "query_bias": "self_attn.q_proj.bias", "query_norm": "self_attn.q_norm.weight",
    "key": "self_attn.k_proj.weight", "key_bias": "self_attn.k_proj.bias", "key_norm": "self_attn.k_norm.weight",
    "value": "self_attn.v_proj.weight", "value_bias": "self_attn.v_proj.bias",
    "out": "self_attn.o_proj.weight", "out_bias": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight", "router": "mlp.gate.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
_SLIDING, _FULL = "sliding_attention", "full_attention"


# -- config.json -> DecoderConfig ------------------------------------------------------------------------------------


def refuse(raw: Mapping[str, Any], where: str, expected: Mapping[str, Any]) -> None:
    """`UserError` for the first setting (absent: as expected) that says something this decoder does not compute."""
    for name, wanted in expected.items():
        found = raw.get(name, wanted)
        if found != wanted and (found or wanted):  # null, false and 0 say the same: not used
            raise UserError(f"{where}: {name} is {found!r}; this decoder computes {wanted!r} only")


def sizes(raw: Mapping[str, Any], where: str, fields: Mapping[str, str] = SIZES) -> dict[str, Any]:
    """The fields that every family has. `fields`: ours -> theirs. Raises `UserError` naming what is missing."""
    missing = [name for name in fields.values() if raw.get(name) is None]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}")
    found: dict[str, Any] = {ours: integer(raw, theirs, where) for ours, theirs in fields.items()}
    found["kv_heads"] = integer(raw, "num_key_value_heads", where, found["heads"])
    found["head_width"] = integer(raw, "head_dim", where, found["width"] // max(1, found["heads"]))
    found["norm_eps"] = float(raw.get("rms_norm_eps", 1e-6))
    return found


def integer(raw: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """A whole number above 0, or the default where the file has none."""
    value = raw.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
        raise UserError(f"{where}: {name} is {value!r}, expected a whole number above 0")
    return int(value)


def build(where: str, **fields: Any) -> DecoderConfig:
    """`DecoderConfig`, with what does not fit together named with the file."""
    try:
        return DecoderConfig(**fields)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def rope(raw: Mapping[str, Any], where: str, theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, in the words of transformers 4 (rope_scaling) or of 5 (rope_parameters)."""
    found = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(found.get("rope_theta") or raw.get("rope_theta") or theta)
    return theta, rope_scaling(found, int(raw.get("max_position_embeddings") or 0), where)


def rope_scaling(found: Mapping[str, Any], context: int, where: str) -> RopeScaling | None:
    """`RopeScaling` of one dict of rope settings, None for the default. Raises `UserError` for what is not computed."""
    kind = found.get("rope_type", found.get("type", "default")) or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise UserError(f"{where}: rope_type is {kind!r}; this decoder computes default, linear, llama3, yarn only")
    if float(found.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{where}: partial_rotary_factor is {found['partial_rotary_factor']!r}; expected 1.0")
    original = int(found.get("original_max_position_embeddings") or context)
    factor = float(found.get("factor") or (context / original if kind == "yarn" and original else 0.0))
    needed = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    missing = [name for name in needed if found.get(name) is None] + ([] if factor else ["factor"])
    if missing:
        raise UserError(f"{where}: rope_type {kind!r} lacks {', '.join(missing)}")
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor)
    if kind == "llama3":
        low, high = (float(found[name]) for name in _LLAMA3.values())
        return RopeScaling(kind=kind, factor=factor, original_context=original, low_frequency=low, high_frequency=high)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=float(found.get("beta_fast") or 32.0),
        beta_slow=float(found.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(found, factor),
        truncate=bool(found.get("truncate", True)),
    )


_LLAMA3 = {"low_frequency": "low_freq_factor", "high_frequency": "high_freq_factor"}


def _yarn_attention_factor(found: Mapping[str, Any], factor: float) -> float:
    if found.get("attention_factor") is not None:
        return float(found["attention_factor"])

    def magnitude(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0

    if found.get("mscale") and found.get("mscale_all_dim"):
        return magnitude(float(found["mscale"])) / magnitude(float(found["mscale_all_dim"]))
    return magnitude()


def windows(raw: Mapping[str, Any], layers: int, where: str, default: tuple[bool, ...]) -> dict[str, Any]:
    """`window` and `window_layers`: layer_types where the file has them, else `default`."""
    types = raw.get("layer_types")
    if types is None:
        sliding = default
    elif set(types) <= {_SLIDING, _FULL} and len(types) == layers:
        sliding = tuple(kind == _SLIDING for kind in types)
    else:
        raise UserError(f"{where}: layer_types is {types!r}, expected {layers} times {_SLIDING!r} or {_FULL!r}")
    if not any(sliding):
        return {}
    return {"window": integer(raw, "sliding_window", where), "window_layers": sliding}


def qwen_windows(raw: Mapping[str, Any], layers: int, where: str) -> dict[str, Any]:
    """Qwen's rule: with use_sliding_window, the layers from max_window_layers on slide."""
    if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
        return {}
    first = int(raw.get("max_window_layers", 28))
    return windows(raw, layers, where, tuple(index >= first for index in range(layers)))


# -- DecoderConfig -> config.json ------------------------------------------------------------------------------------


def common_json(config: DecoderConfig, architecture: str, fields: Mapping[str, str] = SIZES) -> dict[str, Any]:
    """The settings that every family writes."""
    return {
        "architectures": [architecture],
        "model_type": config.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in fields.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "torch_dtype": config.param_dtype,
        "rope_theta": config.rope_theta,
        **({"rope_scaling": rope_scaling_json(config.rope_scaling)} if config.rope_scaling else {}),
    }


def rope_scaling_json(scaling: RopeScaling) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    found["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        return found | {theirs: getattr(scaling, ours) for ours, theirs in _LLAMA3.items()}
    names = ("beta_fast", "beta_slow", "attention_factor", "truncate")
    return found | {name: getattr(scaling, name) for name in names}


def qwen_windows_json(config: DecoderConfig) -> dict[str, Any]:
    if config.window is None:
        return {"use_sliding_window": False}
    sliding = {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0}
    return sliding | {"layer_types": layer_types(config)}


def layer_types(config: DecoderConfig) -> list[str]:
    return [_FULL if config.window_of(index) is None else _SLIDING for index in range(config.layers)]


# -- tensors ---------------------------------------------------------------------------------------------------------


def tensors(config: DecoderConfig, names: Mapping[str, str] = LAYER) -> Iterator[Tensor]:
    """Every tensor of the checkpoint. `names`: our parameter of a layer -> theirs after "model.layers.N."."""
    for name, (shape, _) in top_parameters(config).items():
        yield Tensor(TOP[name], (name,), None, shape, np.asarray, np.asarray)
    for layer in range(config.layers):
        for name, (shape, axes) in layer_parameters(config).items():
            prefix = f"model.layers.{layer}."
            if axes[0] == "experts":
                for expert in range(config.experts):
                    theirs = names[name].replace("mlp.", f"mlp.experts.{expert}.")
                    yield _tensor(prefix + theirs, name, layer, shape[1:], expert)
            else:
                yield _tensor(prefix + names[name], name, layer, shape)


def _tensor(theirs: str, name: str, layer: int, shape: tuple[int, ...], expert: int | None = None) -> Tensor:
    path = ("layers", name)
    if name.endswith(("norm", "bias")):
        flat = (math.prod(shape),)
        return Tensor(theirs, path, layer, flat, _reshape(shape), _reshape(flat), expert)
    inputs = 2 if name == "out" else 1  # leading axes that are summed over
    rows, columns = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    return Tensor(theirs, path, layer, (columns, rows), _transpose_to(shape), _transpose_from(rows, columns), expert)


def _reshape(shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.reshape(shape)


def _transpose_to(shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.T.reshape(shape)


def _transpose_from(rows: int, columns: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.reshape(rows, columns).T
