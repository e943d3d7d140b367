"""Qwen2 and Qwen2.5: Llama with biases on query, key and value. Yang et al. 2024, arXiv:2407.10671."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_jax.models import huggingface
from agentrl_jax.models.config import DecoderConfig
from agentrl_jax.models.tensors import Tensor

MODEL_TYPES = ("qwen2",)


def config_from_json(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """`DecoderConfig` of a config.json. Raises `UserError` for what this decoder does not compute."""
    huggingface.refuse(raw, where, {"hidden_act": "silu"})
    sizes = huggingface.sizes(raw, where)
    theta, scaling = huggingface.rope(raw, where)
    return huggingface.build(
        where,
        **sizes,
        **huggingface.qwen_windows(raw, sizes["layers"], where),
        model_type="qwen2",
        qkv_bias=True,
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of Hugging Face's Qwen2 for this model."""
    common = huggingface.common_json(config, "Qwen2ForCausalLM")
    return {**common, "hidden_act": "silu", **huggingface.qwen_windows_json(config)}


def tensors(config: DecoderConfig) -> Iterator[Tensor]:
    """Every tensor of the checkpoint."""
    return huggingface.tensors(config)
