"""Models in GGUF, read into a Hugging Face directory: weights dequantised to f32, config and tokenizer rebuilt.

A quantised file makes a good pretrained policy; it is not equal to the checkpoint it was quantised from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.errors import UserError
from agentrl_jax.models.families import family_of
from agentrl_jax.runtime import gguf_config, gguf_tokenizer, pretrained, tensor_files

_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_SANDWICH = {  # of gemma3, where the MLP has norms on both sides and attention one more
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_DERIVED = ("rope_freqs", "attn_rot_embd")  # what `gguf_config` has read into the config


def convert(path: str | Path, directory: str | Path, *, shard_bytes: int = 4 << 30) -> None:
    """Write a Hugging Face directory of a GGUF file: config, tokenizer, chat template, stop ids and weights (f32).

    Architectures: llama, qwen2, qwen3, qwen3moe, gemma3. Raises `UserError` in one line for a broken file, another
    architecture, missing or mis-shaped tensors, and a tokenizer whose splitting rule is not known here.
    """
    path, directory = Path(path), Path(directory)
    fields, stored = _open(path)
    tensors = {name: _dequantised(tensor, str(path)) for name, tensor in stored.items()}
    tied = "output.weight" not in stored
    raw = gguf_config.config(fields, _shape(stored, "token_embd.weight", path)[0], tied=tied, where=str(path))
    if "rope_freqs.weight" in stored:
        raw["rope_scaling"] = gguf_config.llama3_scaling(tensors["rope_freqs.weight"](), raw, str(path))
    config = family_of(raw["model_type"], str(path)).config_from_json(raw, str(path))
    renamed = dict(_renamed(stored, fields["general.architecture"], str(path)))
    listed = {name: tensor_files.Stored(path, shape, "F32") for name, (_, shape, _) in renamed.items()}
    pretrained.check_tensors(path, config, listed)
    tokenizer, side = gguf_tokenizer.tokenizer(fields, str(path)), gguf_tokenizer.side_files(fields)
    pretrained.check_tokenizer(path, config, tokenizer)

    def all_tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, (theirs, _, expert) in renamed.items():
            x = tensors[theirs]()
            yield name, _laid_out(theirs, x if expert is None else x[expert], raw, fields["general.architecture"])

    directory.mkdir(parents=True, exist_ok=True)
    ends = {name: value for name, value in side.generation.items() if name == "eos_token_id"}
    family = family_of(config.model_type)
    tensor_files.write_json(directory / "config.json", {**family.config_to_json(config), **ends})
    tokenizer.save(str(directory / "tokenizer.json"))
    tensor_files.write_json(directory / "tokenizer_config.json", side.tokenizer)
    if side.generation:
        tensor_files.write_json(directory / "generation_config.json", side.generation)
    if side.template is not None:
        (directory / "chat_template.jinja").write_text(side.template, encoding="utf-8")
    tensor_files.write(directory, all_tensors(), shard_bytes=shard_bytes)


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields, tensors) of the file. The gguf package raises whatever its parsing stumbles over."""
    from gguf import GGUFReader

    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a GGUF file")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: not GGUF, or cut short ({reason}); download the file again") from error


def _dequantised(tensor: Any, where: str) -> Any:
    """A function that reads one tensor as f32; the file is mapped, so nothing is read before."""

    def read() -> np.ndarray:
        from gguf.quants import dequantize

        try:
            return dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UserError(f"{where}: tensor {tensor.name} is {kind}, which cannot be dequantised here") from error

    return read


def _shape(stored: dict[str, Any], name: str, where: Path) -> tuple[int, ...]:
    if name not in stored:
        raise UserError(f"{where}: no tensor {name}; download the file again")
    return tuple(int(n) for n in reversed(stored[name].shape))  # GGUF lists the fastest axis first


def _renamed(
    stored: dict[str, Any], architecture: str, where: str
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int | None]]]:
    """Hugging Face's name of each tensor -> (its name in the file, its shape, the expert in it or None)."""
    layer_names = _LAYER | _SANDWICH if architecture == "gemma3" else _LAYER
    for theirs in stored:
        head, *rest = theirs.split(".")
        shape = _shape(stored, theirs, Path(where))
        if head in _DERIVED or (rest and len(rest) > 1 and rest[1] in _DERIVED):
            continue
        if head == "blk" and len(rest) == 3 and rest[1] in layer_names:
            name = f"model.layers.{rest[0]}.{layer_names[rest[1]]}.{rest[2]}"
        elif head in _TOP and len(rest) == 1:
            name = f"{_TOP[head]}.{rest[0]}"
        else:
            raise UserError(f"{where}: tensor {theirs} of a {architecture} model is not known here")
        if "{}" not in name:
            yield name, (theirs, shape, None)
        else:
            yield from ((name.format(e), (theirs, shape[1:], e)) for e in range(shape[0]))


def _laid_out(theirs: str, x: np.ndarray, raw: dict[str, Any], architecture: str) -> np.ndarray:
    """Undo what llama.cpp's converter does to a tensor beyond renaming it."""
    if architecture == "llama":
        for part, heads in ((".attn_q.", "num_attention_heads"), (".attn_k.", "num_key_value_heads")):
            if part in theirs:
                return _interleaved_to_halves(x, raw[heads])
    if architecture == "gemma3" and "norm.weight" in theirs:
        return x - np.float32(1.0)  # the file holds the factor, Hugging Face what is added to 1
    return x


def _interleaved_to_halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of llama's q and k: there, channels 2c and 2c + 1 rotate together; here c and c + C/2."""
    rows = x.shape[0]
    return x.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(x.shape)
