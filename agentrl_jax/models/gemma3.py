"""Gemma 3, text: sandwich norms of 1 + scale, sliding windows with their own rotary base, scaled embeddings.

Gemma Team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_jax.errors import UserError
from agentrl_jax.models import huggingface
from agentrl_jax.models.config import DecoderConfig
from agentrl_jax.models.tensors import Tensor

MODEL_TYPES = ("gemma3_text",)
_ACTIVATION = "gelu_pytorch_tanh"
_NAMES = {
    **huggingface.LAYER,
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def config_from_json(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """`DecoderConfig` of a config.json. Raises `UserError` for what this decoder does not compute."""
    huggingface.refuse(raw, where, {"hidden_activation": _ACTIVATION, "use_bidirectional_attention": False})
    raw = {"head_dim": 256, "num_key_value_heads": 4, **raw}
    sizes = huggingface.sizes(raw, where)
    bias = bool(raw.get("attention_bias", False))
    scalar = raw.get("query_pre_attn_scalar", 256)
    return huggingface.build(
        where,
        **sizes,
        **_attention(raw, sizes["layers"], where),
        model_type="gemma3_text",
        activation="gelu_tanh",
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        norm_offset=True,
        post_norms=True,
        embedding_scale=True,
        attention_scale=None if scalar == sizes["head_width"] else float(scalar) ** -0.5,
        attention_soft_cap=_cap(raw, "attn_logit_softcapping"),
        final_soft_cap=_cap(raw, "final_logit_softcapping"),
        tied=bool(raw.get("tie_word_embeddings", True)),
    )


def _attention(raw: Mapping[str, Any], layers: int, where: str) -> dict[str, Any]:
    """Windows and rotary positions: every sixth layer is global unless the file says otherwise."""
    pattern = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    default = tuple(bool((index + 1) % pattern) for index in range(layers))
    found = huggingface.windows({"sliding_window": 4096, **raw}, layers, where, default)
    parameters = raw.get("rope_parameters") or {}
    full = {**(raw.get("rope_scaling") or {}), **(parameters.get("full_attention") or {})}
    local = parameters.get("sliding_attention") or {}
    context = int(raw.get("max_position_embeddings") or 0)
    if huggingface.rope_scaling(local, context, where) is not None:
        raise UserError(f"{where}: rope_parameters.sliding_attention: only rope_type 'default' is computed")
    found["rope_theta"] = float(full.get("rope_theta") or raw.get("rope_theta") or 1e6)
    found["rope_scaling"] = huggingface.rope_scaling(full, context, where)
    if "window" in found:
        found["window_rope_theta"] = float(local.get("rope_theta") or raw.get("rope_local_base_freq") or 1e4)
    return found


def _cap(raw: Mapping[str, Any], name: str) -> float | None:
    return None if raw.get(name) is None else float(raw[name])


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of Hugging Face's Gemma 3 (text) for this model."""
    return {
        **huggingface.common_json(config, "Gemma3ForCausalLM"),
        "hidden_activation": _ACTIVATION,
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": _whole(config.scale**-2),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
        "sliding_window": config.window or 4096,
        "layer_types": huggingface.layer_types(config),
        "rope_local_base_freq": config.window_rope_theta or 1e4,
    }


def _whole(value: float) -> int:
    """transformers takes a whole number only."""
    return round(value)


def tensors(config: DecoderConfig) -> Iterator[Tensor]:
    """Every tensor of the checkpoint."""
    return huggingface.tensors(config, _NAMES)
