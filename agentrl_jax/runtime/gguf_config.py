"""The config.json that the fields of a GGUF file say."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentrl_jax.errors import UserError

_MODEL_TYPES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text",
}  # fmt: skip
_SIZES = {
    "hidden_size": "embedding_length", "num_hidden_layers": "block_count", "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count", "max_position_embeddings": "context_length",
}  # fmt: skip
_GEMMA3_27B_LAYERS = 62  # the one Gemma 3 whose scores are scaled by width / heads; no field says so


def config(fields: dict[str, Any], vocab_size: int, *, tied: bool, where: str) -> dict[str, Any]:
    """A Hugging Face config.json, as a dict. Raises `UserError` naming a field that is missing or not known here."""
    architecture = fields.get("general.architecture")
    if architecture not in _MODEL_TYPES:
        known = ", ".join(sorted(_MODEL_TYPES))
        raise UserError(f"{where}: general.architecture is {architecture!r}, expected one of {known}")

    def get(name: str, default: Any = None) -> Any:
        value = fields.get(f"{architecture}.{name}", default)
        if value is None:
            raise UserError(f"{where}: lacks the field {architecture}.{name}; download the file again")
        return value

    raw = {theirs: int(get(name)) for theirs, name in _SIZES.items() if (architecture, name) != _NO_DENSE}
    heads = raw["num_attention_heads"]
    raw |= {
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": vocab_size,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": int(get("attention.key_length", raw["hidden_size"] // max(1, heads))),
        "rope_theta": _decimal(get("rope.freq_base", 1e6 if architecture == "gemma3" else 10000.0)),
        "rms_norm_eps": _decimal(get("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": tied,
    }
    scaling = _scaling(fields, architecture, where)
    raw |= {"rope_scaling": scaling} if scaling else {}
    if architecture == "qwen3moe":
        raw |= {
            "num_experts": int(get("expert_count")),
            "num_experts_per_tok": int(get("expert_used_count")),
            "moe_intermediate_size": int(get("expert_feed_forward_length")),
            "intermediate_size": int(get("feed_forward_length", get("expert_feed_forward_length"))),
            "norm_topk_prob": True,  # what llama.cpp computes for this architecture
        }
    return raw | (_gemma3(raw, get) if architecture == "gemma3" else {})


_NO_DENSE = ("qwen3moe", "feed_forward_length")  # every MLP is a mixture


def _gemma3(raw: dict[str, Any], get: Any) -> dict[str, Any]:
    large = raw["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scalar = raw["hidden_size"] // raw["num_attention_heads"] if large else raw["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(get("attention.sliding_window")),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": _decimal(get("rope.freq_base_swa", 10000.0)),
    }


def _scaling(fields: dict[str, Any], architecture: str, where: str) -> dict[str, Any] | None:
    kind = fields.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UserError(f"{where}: {architecture}.rope.scaling.type is {kind!r}, expected none, linear or yarn")
    found: dict[str, Any] = {"rope_type": kind}
    for theirs, name in (("factor", "factor"), ("original_max_position_embeddings", "original_context_length")):
        value = fields.get(f"{architecture}.rope.scaling.{name}")
        if value is not None:
            found[theirs] = _decimal(value) if name == "factor" else int(value)
    return found


def llama3_scaling(divisors: np.ndarray, raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The llama3 rope scaling whose frequency divisors f32[C/2] the file carries in place of its constants.

    The constants that every Llama 3 has been published with are tried; `UserError` where others were used.
    """
    half = raw["head_dim"] // 2
    if divisors.shape != (half,):
        raise UserError(f"{where}: tensor rope_freqs.weight has shape {divisors.shape}, expected ({half},)")
    found = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = found["original_max_position_embeddings"] / (2 * np.pi * raw["rope_theta"] ** (np.arange(half) / half))
    share = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)  # of the unscaled frequency
    expected = 1.0 / ((1.0 - share) / found["factor"] + share)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise UserError(
            f"{where}: rope_freqs.weight is not Llama 3's scaling by factor {found['factor']}; use the Hugging Face "
            "directory of this model instead"
        )
    return found


def _decimal(value: float) -> float:
    """The number somebody typed before it became f32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
