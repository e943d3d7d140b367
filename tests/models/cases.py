"""Tiny random models of every family: a config.json each, and weights and tokens from a seeded numpy generator.

Every tensor is random, norms and biases too, so that nothing hides behind a one or a zero.
"""

import math
import zlib

import numpy as np

from agentrl_jax.models.families import family_of

VOCABULARY, LENGTH = 29, 12
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 100.0,
}  # fmt: skip
# The original contexts are so short that some channels of 8 are stretched, some kept and some in between.
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_GEMMA = {
    "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4,
    "query_pre_attn_scalar": 6, "rope_theta": 400.0, "rope_local_base_freq": 50.0,
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"

CASES = {
    "llama, tied, llama3 rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_scaling": _LLAMA3},
    "llama, untied, biases, linear rope": {
        "model_type": "llama", "attention_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
    "qwen2, tied, sliding windows": {
        "model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen2, untied, yarn": {"model_type": "qwen2", "rope_scaling": _YARN},
    "qwen3, untied": {"model_type": "qwen3"},
    "qwen3, tied, biases, yarn with its own attention factor": {
        "model_type": "qwen3", "tie_word_embeddings": True, "attention_bias": True,
        "rope_scaling": _YARN | {"attention_factor": 1.3, "truncate": False},
    },
    "qwen3_moe, untied": {"model_type": "qwen3_moe", "norm_topk_prob": True, **_MOE},
    "qwen3_moe, tied, shares not normalised": {
        "model_type": "qwen3_moe", "tie_word_embeddings": True, "norm_topk_prob": False, **_MOE,
    },
    "gemma3, tied, windows, linear rope": {
        **_GEMMA, "tie_word_embeddings": True, "layer_types": [_SLIDING, _FULL, _SLIDING],
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "gemma3, untied, soft caps": {
        **_GEMMA, "tie_word_embeddings": False, "layer_types": [_SLIDING, _SLIDING, _FULL],
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
    },
}  # fmt: skip
# One case a family, for what does not depend on its details.
ONE_EACH = [
    "llama, untied, biases, linear rope", "qwen2, tied, sliding windows",
    "qwen3, tied, biases, yarn with its own attention factor", "qwen3_moe, untied", "gemma3, untied, soft caps",
]  # fmt: skip


def config_of(case):
    raw = {**_BASE, "tie_word_embeddings": False, **CASES[case]}
    return family_of(raw["model_type"]).config_from_json(raw, case)


def weights_of(case):
    """Every tensor of the checkpoint, f32, by its Hugging Face name."""
    config = config_of(case)
    rng = np.random.default_rng(zlib.crc32(case.encode()))
    found = {}
    for tensor in family_of(config.model_type).tensors(config):
        draw = rng.normal(size=tensor.shape)
        if tensor.name.endswith("norm.weight"):
            draw = 0.3 * draw + (0.0 if config.norm_offset else 1.0)
        elif tensor.name.endswith("bias"):
            draw = 0.5 * draw
        elif len(tensor.shape) == 2:
            draw = draw / math.sqrt(tensor.shape[1])
        found[tensor.name] = draw.astype(np.float32)
    return found


def params_of(case):
    """The same weights as our params, in numpy."""
    from agentrl_jax.models import decoder

    config, weights = config_of(case), weights_of(case)
    empty = {name: leaf for name, leaf in decoder.shapes(config).items() if name != "layers"}
    params = {name: np.zeros(leaf.shape, np.float32) for name, leaf in empty.items()}
    params["layers"] = {
        name: np.zeros(leaf.shape, np.float32) for name, leaf in decoder.shapes(config)["layers"].items()
    }
    for tensor in family_of(config.model_type).tensors(config):
        assert weights[tensor.name].shape == tensor.shape
        at(params, tensor)[tensor.index] = tensor.to_ours(weights[tensor.name])
    return params


def at(params, tensor):
    for name in tensor.path:
        params = params[name]
    return params


def tokens_of(case):
    return np.random.default_rng(zlib.crc32(case.encode()) + 1).integers(0, VOCABULARY, (2, LENGTH)).astype(np.int32)
