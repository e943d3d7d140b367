"""A policy as a directory: config.json, tokenizer.json and safetensors, in the names of Hugging Face's Llama."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from agentrl_jax.errors import UserError
from agentrl_jax.models.llama import LlamaConfig, Params

_LAYER = {
    "attention_norm": "input_layernorm", "query": "self_attn.q_proj", "key": "self_attn.k_proj",
    "value": "self_attn.v_proj", "out": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def load(directory: str | Path) -> tuple[LlamaConfig, Params, Tokenizer]:
    """Config, params (f32, on the default device) and tokenizer of a Llama-architecture directory.

    Weights may be f32, bf16 or f16, in one file or in shards with an index. Raises `UserError` that names
    the file and what is wrong with it: absent, another architecture, a tensor missing or of another shape.
    """
    directory = Path(directory)
    config, tokenizer = load_config(directory)
    return config, params_from_tensors(config, _open(directory), str(directory)), tokenizer


def load_config(directory: str | Path) -> tuple[LlamaConfig, Tokenizer]:
    """Config and tokenizer alone, without reading the weights. Raises as `load` does."""
    directory = Path(directory)
    config = config_from_json(_read_json(directory / "config.json"), str(directory / "config.json"))
    tokenizer_path = directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise UserError(f"{tokenizer_path}: no such file; expected a tokenizer in the format of the tokenizers library")
    return config, Tokenizer.from_file(str(tokenizer_path))


def save(directory: str | Path, config: LlamaConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Write what `load` reads (and transformers too), weights in the dtype they have."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_to_json(config), indent=2) + "\n")
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(tensors_from_params(config, params), directory / "model.safetensors", metadata={"format": "pt"})


def config_from_json(raw: dict[str, Any], where: str) -> LlamaConfig:
    """`LlamaConfig` from a Hugging Face config.json. Raises `UserError` for what this decoder does not compute."""
    if raw.get("model_type") != "llama":
        raise UserError(f"{where}: model_type is {raw.get('model_type')!r}, expected 'llama'")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    expected = {"rope_type": (kind, "default"), "hidden_act": (raw.get("hidden_act", "silu"), "silu")}
    expected |= {name: (bool(raw.get(name, False)), False) for name in ("attention_bias", "mlp_bias")}
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise UserError(f"{where}: {name} is {found!r}; this decoder computes {wanted!r} only")
    missing = [name for name in _FIELDS.values() if name not in raw]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}")
    sizes: dict[str, Any] = {ours: int(raw[theirs]) for ours, theirs in _FIELDS.items()}
    return LlamaConfig(
        **sizes,
        kv_heads=int(raw.get("num_key_value_heads") or sizes["heads"]),
        head_width=int(raw.get("head_dim") or sizes["width"] // sizes["heads"]),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


_FIELDS = {
    "vocab_size": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "mlp_width": "intermediate_size", "context": "max_position_embeddings",
}  # fmt: skip


def config_to_json(config: LlamaConfig) -> dict[str, Any]:
    """The config.json of Hugging Face's Llama for this model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": config.param_dtype,
    }


def tensors_from_params(config: LlamaConfig, params: Params) -> dict[str, np.ndarray]:
    """Hugging Face tensors (projections [out, in]) of our params."""
    host = jax.device_get(params)
    out = {"model.embed_tokens.weight": host["embedding"], "model.norm.weight": host["final_norm"]}
    if not config.tied:
        out["lm_head.weight"] = host["unembedding"]
    for name, stacked in host["layers"].items():
        inputs = 2 if name == "out" else 1  # leading axes that are summed over
        for index, x in enumerate(stacked):
            flat = x if x.ndim == 1 else x.reshape(int(np.prod(x.shape[:inputs])), -1).T
            out[f"model.layers.{index}.{_LAYER[name]}.weight"] = flat
    return {name: np.ascontiguousarray(x) for name, x in out.items()}


def params_from_tensors(config: LlamaConfig, read: Callable[[str], np.ndarray], where: str) -> Params:
    """Our params of Hugging Face tensors, as f32 on the default device. `read(name)` returns one tensor."""
    d, h, j, c, f = config.width, config.heads, config.kv_heads, config.head_width, config.mlp_width
    shapes = {
        "attention_norm": (d,), "query": (d, h, c), "key": (d, j, c), "value": (d, j, c), "out": (h, c, d),
        "mlp_norm": (d,), "gate": (d, f), "up": (d, f), "down": (f, d),
    }  # fmt: skip

    def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        x = read(name)
        if x.size != np.prod(shape):
            raise UserError(f"{where}: tensor {name} has shape {x.shape}, which does not hold {shape} of config.json")
        return x.astype(np.float32)

    def stack(name: str) -> np.ndarray:
        shape = shapes[name]
        out = np.empty((config.layers, *shape), np.float32)
        for index in range(config.layers):
            out[index] = tensor(f"model.layers.{index}.{_LAYER[name]}.weight", shape).T.reshape(shape)
        return out

    vocab = (config.vocab_size, d)
    params: Params = {
        "embedding": tensor("model.embed_tokens.weight", vocab),
        "layers": {name: stack(name) for name in shapes},
        "final_norm": tensor("model.norm.weight", (d,)),
    }
    if not config.tied:
        params["unembedding"] = tensor("lm_head.weight", vocab)
    return jax.device_put(params)


def _open(directory: Path) -> Callable[[str], np.ndarray]:
    """A reader of tensors by name over one safetensors file or the shards of an index."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(_read_json(index)["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    owner = dict(_names(directory, files))

    def read(name: str) -> np.ndarray:
        if name not in owner:
            raise UserError(f"{directory}: no tensor {name} in {', '.join(files)}")
        with safe_open(owner[name], framework="numpy") as file:
            return file.get_tensor(name)

    return read


def _names(directory: Path, files: list[str]) -> Iterator[tuple[str, Path]]:
    for name in files:
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path}: no such file; expected weights as safetensors")
        with safe_open(path, framework="numpy") as file:
            yield from ((tensor, path) for tensor in file.keys())  # noqa: SIM118 (not a mapping)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a Hugging Face model directory")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
