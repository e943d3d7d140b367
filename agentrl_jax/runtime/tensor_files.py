"""Safetensors of a Hugging Face directory: which file holds which tensor, reading one, writing shards."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agentrl_jax.errors import UserError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True)
class Stored:
    """A tensor on disk: its file, shape and dtype as safetensors spells it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def present(directory: Path) -> bool:
    """Whether the directory has weights as safetensors, broken ones among them."""
    return (directory / INDEX).is_file() or (directory / ONE_FILE).is_file()


def listing(directory: Path) -> dict[str, Stored]:
    """Every tensor of the directory by name, from the files' headers alone.

    Raises `UserError` naming the file: absent, cut short, no safetensors, or not what the index says.
    """
    index = directory / INDEX
    if not index.is_file():
        return header(directory / ONE_FILE)
    owner = read_json(index).get("weight_map")
    if not isinstance(owner, dict) or not all(isinstance(file, str) for file in owner.values()):
        raise UserError(f"{index}: lacks weight_map, the file of each tensor; download the index again")
    found: dict[str, Stored] = {}
    for file in sorted(set(owner.values())):
        found |= header(directory / file)
    absent = [name for name in owner if name not in found]
    if absent:
        raise UserError(f"{index}: names {absent[0]} in {owner[absent[0]]}, which lacks it; download both again")
    return found


def read(stored: Stored, name: str) -> np.ndarray:
    """One tensor in the dtype it has on disk, read by `pread`: no page of the file stays mapped."""
    with safe_open(stored.path, framework="numpy", backend="pread") as file:
        return file.get_tensor(name)


def write_one(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file, in the layout that the tensors' names claim."""
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, path, metadata={"format": "pt"})


def write(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], *, shard_bytes: int) -> None:
    """`model.safetensors`, or numbered files with an index where the tensors exceed `shard_bytes`.

    `tensors` is consumed one at a time; host memory holds one shard. Files of an earlier write are replaced.
    """
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    shards: list[list[str]] = []
    shard: dict[str, np.ndarray] = {}
    total = size = 0

    def flush() -> None:
        write_one(directory / f"model-{len(shards) + 1:05}.safetensors", shard)
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = np.ascontiguousarray(tensor)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    _name_shards(directory, shards, total)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    count, owner = len(shards), {}
    for number, names in enumerate(shards, start=1):
        name = ONE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        (directory / f"model-{number:05}.safetensors").rename(directory / name)
        owner |= dict.fromkeys(names, name)
    if count > 1:
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": owner})


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; `UserError` naming file and line where it is none."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a Hugging Face model directory")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON: {error.msg}; download the file again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not JSON: not text; download the file again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__}, expected an object; download the file again")
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises `UserError` where it is absent, broken or holds other than floats."""
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; expected weights as safetensors, or an Orbax checkpoint beside config.json"
        )
    try:
        with safe_open(path, framework="numpy", backend="pread") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            found = {name: Stored(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not safetensors, or cut short ({reason}); download the file again") from error
    for name, stored in found.items():
        if stored.dtype not in _DTYPES:
            raise UserError(
                f"{path}: tensor {name} is {stored.dtype}, expected {', '.join(_DTYPES)}; "
                "use the checkpoint before it was quantised"
            )
    return found
