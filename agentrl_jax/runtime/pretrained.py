"""A policy as a directory: config.json, tokenizer.json and safetensors, as Hugging Face lays them out.

In place of safetensors an Orbax checkpoint is read, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from agentrl_jax.errors import UserError
from agentrl_jax.models.families import family_of
from agentrl_jax.models.llama import LlamaConfig, Params
from agentrl_jax.models.tensors import Tensor
from agentrl_jax.runtime import orbax_params, tensor_files
from agentrl_jax.runtime.tensor_files import Stored, read_json, write_json

_Path = tuple[str, ...]  # of a parameter in our tree
_OTHER_SENSES = re.compile("image|audio|video")


def load(
    directory: str | Path, shardings: Any = None, dtype: str | None = None
) -> tuple[LlamaConfig, Params, Tokenizer]:
    """Config, params and tokenizer of a Hugging Face directory, weights in f32, bf16 or f16, in one file or in shards.

    Each tensor is read once and copied to the shards that hold a part of it; host memory holds one tensor of the
    checkpoint and, of one parameter (stacked over layers), what this process's devices hold of it.

    Args:
      directory: holds config.json, tokenizer.json and the weights.
      shardings: one sharding, or a tree of them like the params; None: the default device.
      dtype: of the params; None: f32.

    Raises `UserError` in one line that names the file or field: absent, broken, another architecture, a tensor that is
    missing, left over or of another shape, a tokenizer with more ids than the embedding has rows.
    """
    directory = Path(directory)
    config, tokenizer = load_config(directory)
    config = config if dtype is None else replace(config, param_dtype=dtype)
    return config, load_params(directory, config, shardings), tokenizer


def load_config(directory: str | Path) -> tuple[LlamaConfig, Tokenizer]:
    """Config and tokenizer alone, without reading the weights. Raises as `load` does."""
    path, tokenizer_path = Path(directory) / "config.json", Path(directory) / "tokenizer.json"
    raw = read_json(path)
    kind = raw.get("model_type")
    family = family_of(kind if isinstance(kind, str) else repr(kind) if kind else None, str(path))
    config = family.config_from_json(raw, str(path))
    if not tokenizer_path.is_file():
        raise UserError(f"{tokenizer_path}: no such file; expected a tokenizer in the format of the tokenizers library")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{tokenizer_path}: not a tokenizer ({error}); download the file again") from error
    check_tokenizer(tokenizer_path, config, tokenizer)
    return config, tokenizer


def check_tokenizer(path: Path, config: LlamaConfig, tokenizer: Tokenizer) -> None:
    """Raises `UserError` where the tokenizer at `path` reads an id that the embedding has no row for out of text.

    The place of a picture or a sound, which no text spells, may lie beyond it: the text models of Gemma 3 have no row
    for their tokenizer's `<image_soft_token>`.
    """
    added = tokenizer.get_added_tokens_decoder()
    never = {index for index, token in added.items() if token.special and _OTHER_SENSES.search(token.content)}
    last = max(set(tokenizer.get_vocab(with_added_tokens=True).values()) - never, default=-1)
    if last >= config.vocab_size:
        raise UserError(
            f"{path}: has token id {last}, but the model's embedding has vocab_size={config.vocab_size} rows; use the "
            "tokenizer that belongs to this model"
        )


def load_params(directory: str | Path, config: LlamaConfig, shardings: Any = None) -> Params:
    """The params alone, as `config.param_dtype`. Largest first, so that the last staging buffer is the smallest.

    Where the directory has no safetensors they come from an Orbax checkpoint in it, under our own names or under
    Hugging Face's; of our own each device reads its shards, and the host holds them and one chunk as it was written, of
    the others up to three times a tensor.
    """
    directory = Path(directory)
    groups = _groups(config)
    shapes = {path: _stacked_shape(group) for path, group in groups.items()}
    places, dtype = _broadcast(shardings, groups), jnp.dtype(config.param_dtype)
    leaf = _reader(directory, config, groups, shapes)
    order = sorted(groups, key=lambda path: -int(np.prod(shapes[path])))
    leaves = {path: leaf(path, dtype, places[path]) for path in order}
    return _nested({path: leaves[path] for path in groups})


def _reader(directory: Path, config: LlamaConfig, groups: Mapping[_Path, Sequence[Tensor]],
            shapes: Mapping[_Path, tuple[int, ...]]) -> Callable[[_Path, Any, Any], jax.Array]:  # fmt: skip
    """A function from a parameter's path, dtype and sharding to the parameter. Raises `UserError` as `load` does."""

    def assembled(read: Callable[[str], np.ndarray]) -> Callable[[_Path, Any, Any], jax.Array]:
        def leaf(path: _Path, dtype: Any, place: Any) -> jax.Array:
            parts = ((t.index, t.to_ours(read(t.name))) for t in groups[path])
            return _place(shapes[path], dtype, place, parts)

        return leaf

    item = None if tensor_files.present(directory) else orbax_params.locate(directory)
    if item is None:
        stored = tensor_files.listing(directory)
        check_tensors(directory, config, stored)
        return assembled(lambda name: tensor_files.read(stored[name], name))
    tree = orbax_params.Tree(item)
    head, stored = tree.under(tensor.name for group in groups.values() for tensor in group)
    if stored:
        check_tensors(item, config, stored)
        return assembled(lambda name: tree.read(head + name))
    names = {".".join(path): shape for path, shape in shapes.items()}
    head, stored = tree.under(names)
    _check_own(tree, names, stored, config)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return lambda path, dtype, place: tree.read(head + ".".join(path), dtype, default if place is None else place)


def _check_own(tree: orbax_params.Tree, names: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored],
               config: LlamaConfig) -> None:  # fmt: skip
    """Raises `UserError` unless an Orbax checkpoint holds our own params, each in its shape, and nothing else."""
    of = f"of a {config.model_type} model of this config"
    if not stored:
        theirs = next(iter(family_of(config.model_type).tensors(config))).name
        raise UserError(
            f"{tree.path}: {tree.describe()}; expected the params {of} under our names (layers.query) or Hugging "
            f"Face's ({theirs}): save it under one of them, or as safetensors, with the program that wrote it"
        )
    for name, shape in names.items():
        if name not in stored:
            raise UserError(f"{tree.path}: no array {name}, which the params {of} have: do both belong together?")
        if stored[name].shape != shape:
            raise UserError(f"{tree.path}: {name} has shape {stored[name].shape}, expected {shape} by config.json")
    if over := sorted(stored.keys() - names.keys()):
        more = f" and {len(over) - 1} more" if over[1:] else ""
        raise UserError(
            f"{tree.path}: array {over[0]}{more} left over; the params {of} have none: do both belong together?"
        )


def save(
    directory: str | Path,
    config: LlamaConfig,
    params: Params,
    tokenizer: Tokenizer,
    *,
    template: str | None = None,
    stop_ids: Sequence[int] = (),
    shard_bytes: int = 4 << 30,
) -> None:
    """Write what `load` reads bit for bit and `transformers` takes: config, tokenizer, weights in the dtype they have.

    `template` is the chat template (Jinja); `stop_ids` end a turn, the first one is the end-of-sequence token. Above
    `shard_bytes` the weights go to numbered files with an index. Files of an earlier save are replaced.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ends: dict[str, Any] = {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)} if stop_ids else {}
    dtype = {"torch_dtype": str(jax.tree.leaves(params)[0].dtype)}
    write_json(directory / "config.json", {**config_to_json(config), **dtype, **ends})
    tokenizer.save(str(directory / "tokenizer.json"))
    end = {"eos_token": tokenizer.id_to_token(stop_ids[0])} if stop_ids else {}
    general = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context}
    write_json(directory / "tokenizer_config.json", {**general, "clean_up_tokenization_spaces": False, **end})
    if stop_ids:
        write_json(directory / "generation_config.json", ends)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    tensor_files.write(directory, tensors_from_params(config, params), shard_bytes=shard_bytes)


def config_to_json(config: LlamaConfig) -> dict[str, Any]:
    """The config.json of a model, in its family's words."""
    return family_of(config.model_type).config_to_json(config)


def tensors_from_params(config: LlamaConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) in Hugging Face's names and layout, fetched from the devices one parameter at a time."""
    for path, group in _groups(config).items():
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        host = jax.device_get(leaf)
        for tensor in group:
            yield tensor.name, tensor.to_theirs(host[tensor.index])


def _groups(config: LlamaConfig) -> dict[tuple[str, ...], list[Tensor]]:
    """The tensors that make up each parameter."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for tensor in family_of(config.model_type).tensors(config):
        groups.setdefault(tensor.path, []).append(tensor)
    return groups


def _stacked_shape(group: Sequence[Tensor]) -> tuple[int, ...]:
    leading = tuple(1 + max(axis) for axis in zip(*(t.index for t in group), strict=True))
    nothing = np.broadcast_to(np.zeros((), np.int8), group[0].shape)  # the shape without the memory
    return leading + group[0].to_ours(nothing).shape


def check_tensors(where: Path, config: LlamaConfig, stored: Mapping[str, Stored]) -> None:
    """Raises `UserError` unless every tensor of the model is there, in its shape, and none is left over."""
    wanted = list(family_of(config.model_type).tensors(config))
    for tensor in wanted:
        found = stored.get(tensor.name)
        if found is None:
            raise UserError(
                f"{where}: no tensor {tensor.name}; the config asks for {config.layers} layers of a "
                f"{config.model_type} model: do both belong to the same checkpoint?"
            )
        if found.shape != tensor.shape:
            raise UserError(
                f"{found.path}: tensor {tensor.name} has shape {found.shape}, expected {tensor.shape} by the config; "
                "do both belong to the same checkpoint?"
            )
    over = sorted(stored.keys() - {tensor.name for tensor in wanted})
    over = [name for name in over if not _is_derived(name, config)]
    if over:
        raise UserError(
            f"{stored[over[0]].path}: tensor {over[0]}{f' and {len(over) - 1} more' if over[1:] else ''} left over; "
            f"a {config.model_type} model of this config has none: do both belong to the same checkpoint?"
        )


def _is_derived(name: str, config: LlamaConfig) -> bool:
    """Tensors that some checkpoints carry although something else determines them."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _broadcast(shardings: Any, paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return dict.fromkeys(paths, shardings)
    found = {}
    for path in paths:
        found[path] = shardings
        for key in path:
            found[path] = found[path][key]
    return found


def _place(
    shape: tuple[int, ...], dtype: Any, sharding: Any, parts: Iterable[tuple[tuple[int, ...], np.ndarray]]
) -> jax.Array:
    """An array of `shape` that holds `part` at `index`, for (index, part) of `parts`. Only local shards are made."""
    whole = tuple(slice(0, size) for size in shape)
    devices = {None: whole} if sharding is None else sharding.addressable_devices_indices_map(shape)
    regions = {device: _region(shape, where) for device, where in devices.items()}
    buffers = {region: np.empty([stop - start for start, stop in region], dtype) for region in set(regions.values())}
    for index, part in parts:
        for region, buffer in buffers.items():
            leading, rest = region[: len(index)], region[len(index) :]
            if all(start <= i < stop for i, (start, stop) in zip(index, leading, strict=True)):
                at = tuple(i - start for i, (start, _) in zip(index, leading, strict=True))
                buffer[at] = part[tuple(slice(start, stop) for start, stop in rest)]
    # Copied: an update writes new params over the old ones, but never into numpy's memory, which a CPU would share.
    put = partial(jax.device_put, may_alias=False)
    if sharding is None:
        return jax.block_until_ready(put(buffers[regions[None]]))
    arrays = [put(buffers[region], device) for device, region in regions.items()]
    jax.block_until_ready(arrays)  # or the next parameter would be staged beside this one
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _region(shape: tuple[int, ...], where: Sequence[slice]) -> tuple[tuple[int, int], ...]:
    return tuple(s.indices(size)[:2] for s, size in zip(where, shape, strict=True))


def _nested(leaves: dict[tuple[str, ...], Any]) -> Params:
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
