"""Llama 2 and 3, and what shares their architecture (SmolLM2): the decoder without additions.

Touvron et al. 2023, arXiv:2302.13971.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_jax.models import huggingface
from agentrl_jax.models.config import DecoderConfig
from agentrl_jax.models.decoder import (
    Params,
    hidden,
    init,
    logical_axes,
    param_count,
    shapes,
    unembedding,
    unstack,
)  # fmt: skip
from agentrl_jax.models.tensors import Tensor

__all__ = [
    "MODEL_TYPES", "LlamaConfig", "Params", "config_from_json", "config_to_json", "hidden", "init", "logical_axes",
    "param_count", "shapes", "tensors", "unembedding", "unstack",
]  # fmt: skip

LlamaConfig = DecoderConfig
MODEL_TYPES = ("llama",)


def config_from_json(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """`DecoderConfig` of a config.json. Raises `UserError` for what this decoder does not compute."""
    huggingface.refuse(raw, where, {"hidden_act": "silu", "mlp_bias": False})
    theta, scaling = huggingface.rope(raw, where)
    bias = bool(raw.get("attention_bias", False))
    return huggingface.build(
        where,
        **huggingface.sizes(raw, where),
        model_type="llama",
        qkv_bias=bias,
        out_bias=bias,
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of Hugging Face's Llama for this model."""
    rest = {"hidden_act": "silu", "attention_bias": config.qkv_bias, "mlp_bias": False}
    return {**huggingface.common_json(config, "LlamaForCausalLM"), **rest}


def tensors(config: DecoderConfig) -> Iterator[Tensor]:
    """Every tensor of the checkpoint."""
    return huggingface.tensors(config)
