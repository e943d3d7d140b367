"""Parameters out of an Orbax checkpoint of another program: which arrays it holds, and one of them at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from agentrl_jax.errors import UserError
from agentrl_jax.runtime.tensor_files import Stored

_TREE = "_METADATA"  # Orbax's record of a pytree, beside its arrays
_ITEMS = ("params", "state", "default", "items")  # what a step of a CheckpointManager calls its pytree, best first
_FLOATS = ("float32", "bfloat16", "float16", "float64")


def locate(directory: Path) -> Path | None:
    """The pytree in `directory`, or in one folder of it: saved there as such, or an item of the newest step.

    Raises `UserError` where several folders hold one.
    """
    if (at := _item(directory)) is not None:
        return at
    below = [path for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.isdigit()]
    found = {path.name: at for path in below if (at := _item(path)) is not None}
    if len(found) > 1 and not (found := {name: at for name, at in found.items() if name in _ITEMS[:1]}):
        named = ", ".join(path.name for path in below if _item(path) is not None)
        raise UserError(f"{directory}: Orbax checkpoints in {named}; leave one of them beside config.json")
    return next(iter(found.values()), None)


def _item(directory: Path) -> Path | None:
    steps = (path for path in directory.iterdir() if re.fullmatch(r"(?:\w+_)?\d+", path.name) and path.is_dir())
    newest = sorted(steps, key=lambda path: -int(path.name.rpartition("_")[2]))
    places = [place / name for place in (directory, *newest) for name in ("", *_ITEMS)]
    return next((place for place in places if (place / _TREE).is_file()), None)


class Tree:
    """The arrays of one pytree on disk, each by its keys with dots between them: `params.layers.query`."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        with self._told("its record of arrays"), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found: Any = reader.metadata(self.path)
            if found.item_metadata is None:
                raise ValueError("an array or its record is gone")
            leaves, self._structure = jax.tree_util.tree_flatten_with_path(found.item_metadata.tree)
        self._places = {_dotted(keys): place for place, (keys, _) in enumerate(leaves)}
        self._stored = {_dotted(keys): _stored(self.path, leaf) for keys, leaf in leaves}

    def under(self, names: Iterable[str]) -> tuple[str, Mapping[str, Stored]]:
        """The prefix under which most of `names` lie, and all arrays under it, by the rest of their names; nothing
        where fewer than half of `names` lie under any. Of equal ones, `params.` comes before an optimizer's moments."""
        known = set(names)
        heads = Counter(key[: len(key) - len(name)] for key in self._stored for name in _tails(key) if name in known)
        ranked = sorted(heads, key=lambda head: (-heads[head], "params" not in head.split("."), len(head), head))
        if not ranked or 2 * heads[ranked[0]] < len(known):
            return "", {}
        head = ranked[0]
        return head, {key[len(head) :]: stored for key, stored in self._stored.items() if key.startswith(head)}

    def describe(self) -> str:
        """What is there, in a few words."""
        some = [f"{name} {stored.shape}" for name, stored in self._stored.items() if stored.shape][:3]
        return f"{len(self._stored)} arrays, such as {', '.join(some)}" if some else "no arrays"

    def read(self, name: str, dtype: Any = None, sharding: Any = None) -> Any:
        """One array, in the dtype it has on disk or in another: the shards that this process has of it, or without a
        sharding the whole as numpy's.

        Raises `UserError` where it cannot be read.
        """
        stored, place = self._stored[name], self._places[name]
        if stored.dtype not in _FLOATS:
            raise UserError(f"{self.path}: {name} is {stored.dtype}, expected {', '.join(_FLOATS)}")
        dtype = jnp.dtype(stored.dtype) if dtype is None else dtype
        wanted: list[Any] = [ocp.PLACEHOLDER] * len(self._places)
        how: list[Any] = [ocp.RestoreArgs()] * len(self._places)
        wanted[place] = jax.ShapeDtypeStruct(stored.shape, dtype, sharding=sharding)
        how[place] = (
            ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
            if sharding is None
            else ocp.ArrayRestoreArgs(sharding=sharding, global_shape=stored.shape, dtype=dtype)
        )
        tree, arguments = (jax.tree.unflatten(self._structure, part) for part in (wanted, how))
        with self._told(name), jax.transfer_guard("allow"), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = reader.restore(self.path, args=ocp.args.PyTreeRestore(item=tree, restore_args=arguments))
            return jax.block_until_ready(jax.tree.leaves(found, is_leaf=lambda x: x is ocp.PLACEHOLDER)[place])

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self.path}: Orbax cannot read {what} ({reason:.200}); copy the checkpoint again"
            ) from error


def _stored(path: Path, leaf: Any) -> Stored:
    return Stored(path, tuple(getattr(leaf, "shape", None) or ()), str(getattr(leaf, "dtype", type(leaf).__name__)))


def _dotted(keys: Iterable[Any]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)


def _tails(key: str) -> Iterator[str]:
    """The key, and what is left of it as its beginning goes, a part at a time."""
    while key:
        yield key
        key = key.partition(".")[2]
