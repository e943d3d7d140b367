"""Llama models in GGUF, read into a Hugging Face directory: weights dequantised to f32, tokenizer rebuilt.

A quantised file makes a good pretrained policy; it is not equal to the checkpoint it was quantised from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl_jax.errors import UserError
from agentrl_jax.models.llama import LlamaConfig
from agentrl_jax.runtime.pretrained import config_to_json

_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL, _USER_DEFINED = 3, 4  # token types


def convert(path: str | Path, directory: str | Path) -> None:
    """Write config.json, tokenizer.json, chat_template.jinja and model.safetensors (f32) of a GGUF file.

    Raises `UserError` for another architecture or a tokenizer whose splitting rule is not known here.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize

    directory = Path(directory)
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    names = {tensor.name for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in names, where=str(path))
    tensors: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name = _rename(tensor.name)
        if name is None:
            continue  # rope_freqs and the like: derived from the config
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            array = _interleaved_to_halves(array, config.heads if ".attn_q." in tensor.name else config.kv_heads)
        tensors[name] = np.ascontiguousarray(array)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_to_json(config), indent=2) + "\n")
    _tokenizer(fields, str(path)).save(str(directory / "tokenizer.json"))
    if "tokenizer.chat_template" in fields:
        (directory / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _config(fields: dict[str, Any], *, tied: bool, where: str) -> LlamaConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise UserError(f"{where}: general.architecture is {architecture!r}, expected 'llama'")
    width, heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    return LlamaConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        width=width,
        layers=int(fields["llama.block_count"]),
        heads=heads,
        kv_heads=int(fields.get("llama.attention.head_count_kv", heads)),
        head_width=int(fields.get("llama.attention.key_length", width // heads)),
        mlp_width=int(fields["llama.feed_forward_length"]),
        context=int(fields["llama.context_length"]),
        rope_theta=_decimal(fields.get("llama.rope.freq_base", 10000.0)),
        norm_eps=_decimal(fields["llama.attention.layer_norm_rms_epsilon"]),
        tied=tied,
    )


def _decimal(value: float) -> float:
    """The number somebody typed before it became f32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rename(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "blk":
        layer = _LAYER.get(parts[2])
        return layer and f"model.layers.{parts[1]}.{layer}.weight"
    top = _TOP.get(parts[0])
    return top and f"{top}.weight"


def _interleaved_to_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of GGUF's q and k: there, channels 2c and 2c + 1 rotate together; here c and c + C/2."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: dict[str, Any], where: str) -> Tokenizer:
    """A byte-level BPE tokenizer with the splitting rule that `tokenizer.ggml.pre` names."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    rules = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "gpt-2": byte_level,
    }
    model, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or rule not in rules:
        raise UserError(
            f"{where}: tokenizer {model!r} with splitting rule {rule!r} is not known here; expected 'gpt2' with one of "
            f"{sorted(rules)}. Use a Hugging Face directory of this model instead, it has tokenizer.json"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = rules[rule]  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    kinds = list(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [AddedToken(token, special=special, normalized=False) for token, kind in kinds if kind == wanted]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer
