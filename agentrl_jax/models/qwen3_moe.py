"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer. Yang et al. 2025, arXiv:2505.09388."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_jax.models import huggingface
from agentrl_jax.models.config import DecoderConfig
from agentrl_jax.models.tensors import Tensor

MODEL_TYPES = ("qwen3_moe",)
_SIZES = {**huggingface.SIZES, "mlp_width": "moe_intermediate_size"}


def config_from_json(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """`DecoderConfig` of a config.json. Raises `UserError` for what this decoder does not compute."""
    dense = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # otherwise layers differ in shape
    huggingface.refuse(raw, where, {"hidden_act": "silu", "use_sliding_window": False, **dense})
    theta, scaling = huggingface.rope(raw, where)
    bias = bool(raw.get("attention_bias", False))
    experts = "num_experts" if "num_experts" in raw else "num_local_experts"
    return huggingface.build(
        where,
        **huggingface.sizes(raw, where, _SIZES),
        model_type="qwen3_moe",
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        experts=huggingface.integer(raw, experts, where),
        experts_per_token=huggingface.integer(raw, "num_experts_per_tok", where),
        normalize_experts=bool(raw.get("norm_topk_prob", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of Hugging Face's Qwen3-MoE for this model."""
    return {
        **huggingface.common_json(config, "Qwen3MoeForCausalLM", _SIZES),
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def tensors(config: DecoderConfig) -> Iterator[Tensor]:
    """Every tensor of the checkpoint."""
    return huggingface.tensors(config)
