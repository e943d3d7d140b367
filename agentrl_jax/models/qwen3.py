"""Qwen3: Llama with an RMSNorm on every query and key head. Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_jax.models import huggingface
from agentrl_jax.models.config import DecoderConfig
from agentrl_jax.models.tensors import Tensor

MODEL_TYPES = ("qwen3",)


def config_from_json(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """`DecoderConfig` of a config.json. Raises `UserError` for what this decoder does not compute."""
    huggingface.refuse(raw, where, {"hidden_act": "silu"})
    raw = {"head_dim": 128, **raw}  # Qwen3's width of a head is not D / H
    sizes = huggingface.sizes(raw, where)
    theta, scaling = huggingface.rope(raw, where)
    bias = bool(raw.get("attention_bias", False))
    return huggingface.build(
        where,
        **sizes,
        **huggingface.qwen_windows(raw, sizes["layers"], where),
        model_type="qwen3",
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of Hugging Face's Qwen3 for this model."""
    common = huggingface.common_json(config, "Qwen3ForCausalLM")
    rest = {"hidden_act": "silu", "attention_bias": config.qkv_bias}
    return {**common, **rest, **huggingface.qwen_windows_json(config)}


def tensors(config: DecoderConfig) -> Iterator[Tensor]:
    """Every tensor of the checkpoint."""
    return huggingface.tensors(config)
