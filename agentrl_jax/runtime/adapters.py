"""Adapters on disk as PEFT keeps them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from agentrl_jax.errors import UserError
from agentrl_jax.models.families import family_of
from agentrl_jax.models.llama import LlamaConfig
from agentrl_jax.models.lora import PROJECTIONS, Lora
from agentrl_jax.runtime import tensor_files

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PLAIN = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}


class Place(NamedTuple):
    """Where the pair of one projection of one layer lies."""

    module: str  # "model.layers.3.self_attn.q_proj"
    name: str  # "query"
    layer: int
    shape: tuple[int, int]  # of the projection as Hugging Face has it, [out, in]


def save(directory: str | Path, config: LlamaConfig, lora: Lora, adapters: Any, *, base_model: str = "") -> None:
    """Write what `peft.PeftModel.from_pretrained` and `load` read. `base_model`: what the adapters belong to."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    host, tensors = jax.device_get(adapters), {}
    for place in _places(config, lora.targets):
        a, b = (host[place.name][part][place.layer] for part in ("a", "b"))
        tensors[_key(place, "A")] = a.reshape(-1, lora.rank).T
        tensors[_key(place, "B")] = b.reshape(lora.rank, -1).T
    tensor_files.write_one(directory / WEIGHTS, tensors)
    modules = {place.module.split(".")[-1] for place in _places(config, lora.targets)}
    described = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(modules), "lora_dropout": 0.0}
    general = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base_model, "inference_mode": True}
    tensor_files.write_json(directory / CONFIG, {**_PLAIN, **general, **described})


def load(directory: str | Path, config: LlamaConfig) -> tuple[Lora, Any]:
    """(settings, adapters f32 on the default device) of a PEFT directory for this model.

    Raises `UserError` naming the file or field: absent, broken, of another kind or model.
    """
    directory = Path(directory)
    path = directory / CONFIG
    raw = tensor_files.read_json(path)
    for field, expected in _PLAIN.items():
        if raw.get(field, expected) != expected:
            raise UserError(f"{path}: {field} is {raw[field]!r}, expected {expected!r}")
    for field in ("rank_pattern", "alpha_pattern"):  # ranks and scales of single projections
        if raw.get(field):
            raise UserError(f"{path}: {field} is {raw[field]!r}, expected one rank and one alpha for all projections")
    if not isinstance(raw.get("r"), int) or not isinstance(raw.get("lora_alpha"), int | float):
        raise UserError(f"{path}: lacks r or lora_alpha as numbers; download the file again")
    stored = tensor_files.header(directory / WEIGHTS)
    places = [place for place in _places(config, tuple(PROJECTIONS)) if _key(place, "A") in stored]
    lora = Lora(
        rank=raw["r"], alpha=float(raw["lora_alpha"]), targets=tuple(dict.fromkeys(place.name for place in places))
    )
    wanted = {_key(place, part): place for place in _places(config, lora.targets) for part in "AB"}
    odd = sorted(wanted.keys() ^ stored.keys())
    if odd or not wanted:
        what = f"{'lacks' if odd and odd[0] in wanted else 'has'} {odd[0] if odd else 'no adapters'}"
        raise UserError(
            f"{directory / WEIGHTS}: {what}, not what adapters of a {config.model_type} model with "
            f"{config.layers} layers have"
        )
    return lora, _read(config, lora, stored, wanted)


def _read(config: LlamaConfig, lora: Lora, stored: Any, wanted: dict[str, Place]) -> Any:
    family = family_of(config.model_type)
    shapes = {t.path[-1]: t.to_ours(np.broadcast_to(np.int8(0), t.shape)).shape for t in family.tensors(config)}
    parts: dict[str, dict[str, list[Any]]] = {name: {"a": [], "b": []} for name in lora.targets}
    for key, place in wanted.items():
        part, (rows, columns) = key.split(".")[-2][-1], place.shape
        expected = (lora.rank, columns) if part == "A" else (rows, lora.rank)
        if stored[key].shape != expected:
            raise UserError(f"{stored[key].path}: tensor {key} has shape {stored[key].shape}, expected {expected}")
        cut = PROJECTIONS[place.name]
        inputs, outputs = shapes[place.name][:cut], shapes[place.name][cut:]
        ours = (*inputs, lora.rank) if part == "A" else (lora.rank, *outputs)
        x = tensor_files.read(stored[key], key).astype(np.float32)
        parts[place.name][part.lower()].append(x.T.reshape(ours))
    return jax.tree.map(lambda xs: jnp.asarray(np.stack(xs)), parts, is_leaf=lambda x: isinstance(x, list))


def _places(config: LlamaConfig, targets: tuple[str, ...]) -> Iterator[Place]:
    for tensor in family_of(config.model_type).tensors(config):
        if tensor.path[-1] in targets and tensor.layer is not None and len(tensor.index) == 1:
            rows, columns = tensor.shape
            yield Place(tensor.name.removesuffix(".weight"), tensor.path[-1], tensor.layer, (rows, columns))


def _key(place: Place, part: str) -> str:
    return f"base_model.model.{place.module}.lora_{part}.weight"
