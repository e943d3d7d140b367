"""The trajectory store: what a run sampled, as append-only columns on TensorStore, on a disk or in object storage.

A store is a place (a path, a URL, or the spec of any key-value store of TensorStore) with one Zarr 3 array a column and
`commit.json`, which says how long the columns are. An append writes behind what is committed and then, in one atomic
write, the new lengths: a writer that is killed at any moment leaves the store as its last commit had it, what it wrote
beyond is never read, and the next append writes over it. A chunk that holds committed and new entries is replaced
whole, so that readers go on while the store grows.

Of N trajectories with T tokens, K bytes of kept sets, R bytes of receipts and F bytes of facts together, in order:

    i32[T] tokens policy_versions turn_ids kept_sizes, i8[T] sources, bool[T] action_mask, f64[T] behavior_logprobs
    u8[K] kept, u8[R] receipts (JSON), u8[F] facts (JSON: the fields of `Trajectory` that no other column holds)
    i64[N] token_ends kept_ends receipt_ends fact_ends: where each trajectory's part of those ends
    i64[N] steps (of the run's optimizer), bool[N] valid, bool[N] success
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import tensorstore as ts

from agentrl_jax.errors import UserError
from agentrl_jax.rollout.codec import Record, to_json
from agentrl_jax.rollout.records import Trajectory

Place = str | Mapping[str, Any]  # a path, a URL such as gs://bucket/name, or TensorStore's spec of a key-value store

_PER_TOKEN = {  # fields of `Trajectory`
    "tokens": "int32",
    "sources": "int8",
    "action_mask": "bool",
    "behavior_logprobs": "float64",  # a server's log-probabilities need not be f32; those that are take no more room
    "policy_versions": "int32",
    "turn_ids": "int32",
}
_ENDS = {"tokens": "token_ends", "kept": "kept_ends", "receipts": "receipt_ends", "facts": "fact_ends"}
_COLUMNS: dict[str, tuple[str, str]] = {  # dtype, and which length of the commit it has
    **{name: (dtype, "tokens") for name, dtype in _PER_TOKEN.items()},
    "kept_sizes": ("int32", "tokens"),
    **{name: ("uint8", name) for name in ("kept", "receipts", "facts")},
    **dict.fromkeys((*_ENDS.values(), "steps"), ("int64", "trajectories")),
    **dict.fromkeys(("valid", "success"), ("bool", "trajectories")),
}
_ELSEWHERE = {*_PER_TOKEN, "kept", "receipt"}
_CHUNK = {"tokens": 2**16, "kept": 2**20, "receipts": 2**18, "facts": 2**18, "trajectories": 2**13}  # entries
_ENDLESS = 2**53  # of every array; the commit knows how much of it there is
_COMMIT = "commit.json"
_CACHE_BYTES = 128 << 20  # decoded chunks, of all stores of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Record):
    """What `commit.json` holds: lengths, who may append, and what the writer said of the trajectories."""

    trajectories: int = 0
    tokens: int = 0
    kept: int = 0
    receipts: int = 0
    facts: int = 0
    writer: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    format: int = 1


class Store:
    """The trajectories of a store as it was when opened: a sequence, and so a random-access source for grain.

        store = Store("runs/small/trajectories")
        steps = store.column("steps").read().result()
        for trajectory in grain.MapDataset.source(store).shuffle(seed=0): ...

    Open it again to see what was appended since. What is read stays right while a writer appends; after a writer has
    gone back (`Writer.truncate`), a store that was opened before must be opened anew. It can be pickled.

    Raises `UserError` where there is no store, or none of this format.
    """

    def __init__(self, place: Place) -> None:
        found = committed(place)
        if found is None:
            raise UserError(f"{place}: no trajectory store (no {_COMMIT}); expected what a run with store=... wrote")
        self.place, self.commit = place, found

    def first(self, count: int) -> Store:
        """The same store, with no more than its first `count` trajectories."""
        other = object.__new__(type(self))
        other.place, other.commit = self.place, _cut(self._columns, self.commit, min(count, len(self)))
        return other

    def column(self, name: str) -> ts.TensorStore:
        """One column, as long as it was committed; `[a:b].read().result()` reads a part into numpy."""
        return self._columns[name][: getattr(self.commit, _COLUMNS[name][1])]

    @functools.cached_property
    def _columns(self) -> dict[str, ts.TensorStore]:
        with _told(self.place):
            return _open_columns(_kvstore(self.place), create=False)

    def __len__(self) -> int:
        return self.commit.trajectories

    def __getitem__(self, index: int) -> Trajectory:
        at = range(len(self))[index]
        with _told(self.place):
            spans = _spans(self._columns, at)
            parts = {
                name: self._columns[name][slice(*spans[level])].read()
                for name, (_, level) in _COLUMNS.items()
                if level in _ENDS
            }
            return _trajectory({name: part.result() for name, part in parts.items()})

    def __iter__(self) -> Iterator[Trajectory]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"Store({self.place!r}, trajectories={len(self)})"

    def __getstate__(self) -> dict[str, Any]:
        return {"place": self.place, "commit": self.commit}


class Writer:
    """Appends to the store at `place`, which is made where there is none. `about` is kept with it.

    One writer at a time: opening another takes the store over, and the first then raises `UserError` at its next
    append. Closed without a trajectory in it, a store leaves nothing behind.
    """

    def __init__(self, place: Place, about: Mapping[str, Any] | None = None) -> None:
        self.place = place
        with _told(place):
            self._kv = _kvstore(place)
            found, self._generation = _read_commit(self._kv, place)
            before = found or Commit()
            self._columns = _open_columns(self._kv, create=True)
            about = before.about if about is None else about
            self._write_commit(replace(before, writer=uuid.uuid4().hex, about=about))

    def __len__(self) -> int:
        return self.commit.trajectories

    def append(self, trajectories: Sequence[Trajectory], *, step: int = 0) -> None:
        """Commit the trajectories, all or none; returns when they are durable. `step` is the run's when they came.

        Raises `UserError` where the place cannot be written to, or another writer took it over.
        """
        if not trajectories:
            return
        entries = _entries(trajectories, step, self.commit)
        with _told(self.place):
            if self._taken():  # what another writer has committed must not be written over
                raise UserError(_TAKEN.format(place=self.place))
            writes = []
            for name, (dtype, level) in _COLUMNS.items():
                values = np.asarray(entries[name], dtype)
                begin = getattr(self.commit, level)
                if len(values):
                    writes.append(self._columns[name][begin : begin + len(values)].write(values).commit)
            for write in writes:
                write.result()
            added = {level: int(entries[ends][-1]) for level, ends in _ENDS.items()}
            self._write_commit(replace(self.commit, trajectories=len(self) + len(trajectories), **added))

    def truncate(self, count: int) -> int:
        """Drop all but the first `count` trajectories and say how many those were; the next append follows them.

        Raises `UserError` where there are fewer.
        """
        dropped = len(self) - count
        if dropped < 0:
            raise UserError(f"{self.place}: has {len(self)} trajectories, expected at least {count}: was it replaced?")
        if dropped:
            with _told(self.place):
                self._write_commit(_cut(self._columns, self.commit, count))
        return dropped

    def close(self) -> None:
        with _told(self.place):
            if not len(self) and not self._taken():
                self._kv.delete_range(ts.KvStore.KeyRange()).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write_commit(self, commit: Commit) -> None:
        text = json.dumps(to_json(commit), indent=2).encode()
        stamp = self._kv.write(_COMMIT, text, if_equal=self._generation).result()
        if not stamp.generation:  # it was not what this writer left
            raise UserError(_TAKEN.format(place=self.place))
        self.commit, self._generation = commit, stamp.generation

    def _taken(self) -> bool:
        return self._kv.read(_COMMIT, if_not_equal=self._generation).result().state != "unspecified"


_TAKEN = "{place}: another writer opened this trajectory store meanwhile; give each run a store of its own"


def committed(place: Place) -> Commit | None:
    """What the store at `place` holds; None where there is none."""
    with _told(place):
        return _read_commit(_kvstore(place), place)[0]


# -- the place -------------------------------------------------------------------------------------------------------


@functools.cache
def _context() -> ts.Context:
    return ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})


def _kvstore(place: Place) -> ts.KvStore:
    if isinstance(place, str) and "://" not in place:
        place = {"driver": "file", "path": os.path.abspath(os.path.expanduser(place))}
    kv = ts.KvStore.open(place if isinstance(place, str) else dict(place), context=_context()).result()
    if kv.path and not kv.path.endswith("/"):
        kv.path += "/"
    return kv


def _open_columns(kv: ts.KvStore, *, create: bool) -> dict[str, ts.TensorStore]:
    opened = {name: ts.open(_spec(kv, name), context=_context(), open=True, create=create) for name in _COLUMNS}
    return {name: column.result() for name, column in opened.items()}


def _spec(kv: ts.KvStore, name: str) -> dict[str, Any]:
    dtype, level = _COLUMNS[name]
    size = np.dtype(dtype).itemsize
    # Bits of one weight together: ids, versions and turns vary in their low bits only.
    packed = {"cname": "zstd", "clevel": 5, "shuffle": "noshuffle" if dtype == "uint8" else "bitshuffle"}
    codecs = [
        {"name": "bytes", **({"configuration": {"endian": "little"}} if size > 1 else {})},
        {"name": "blosc", "configuration": {**packed, "typesize": size}},
    ]
    grid = {"name": "regular", "configuration": {"chunk_shape": [_CHUNK[level]]}}
    metadata = {"shape": [_ENDLESS], "chunk_grid": grid, "data_type": dtype, "codecs": codecs}
    where = (kv / f"{name}/").spec().to_json()
    # A chunk read after the store was opened holds all that was committed by then.
    fresh = {"recheck_cached_data": "open", "recheck_cached_metadata": "open"}
    return {"driver": "zarr3", "kvstore": where, "metadata": metadata, **fresh}


def _read_commit(kv: ts.KvStore, place: Place) -> tuple[Commit | None, bytes]:
    """The commit, None where there is no store, and the generation that the next one replaces."""
    found = kv.read(_COMMIT).result()
    if found.state == "missing":
        return None, found.stamp.generation
    data = json.loads(found.value)
    written = data.get("format") if isinstance(data, dict) else None
    if written != Commit().format:
        raise UserError(f"{place}: {_COMMIT} has format {written!r}, expected {Commit().format}: of another version")
    return Commit.from_json(data), found.stamp.generation


@contextmanager
def _told(place: Place) -> Iterator[None]:
    """What TensorStore raises, in one line that names the place."""
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{place}: the trajectory store cannot be used: {reason:.300}") from error


# -- columns <-> trajectories ----------------------------------------------------------------------------------------


def _entries(trajectories: Sequence[Trajectory], step: int, before: Commit) -> dict[str, Any]:
    """What each column gains."""
    kept = [[b""] * len(t.tokens) if t.kept is None else t.kept for t in trajectories]
    texts = {
        "kept": [b"".join(sets) for sets in kept],
        "receipts": [_json(to_json(t.receipt)) for t in trajectories],
        "facts": [_json(_facts(t)) for t in trajectories],
    }
    sizes = {"tokens": [len(t.tokens) for t in trajectories]} | {n: list(map(len, x)) for n, x in texts.items()}
    return {
        **{name: list(itertools.chain(*(getattr(t, name) for t in trajectories))) for name in _PER_TOKEN},
        "kept_sizes": [len(item) for sets in kept for item in sets],
        **{name: np.frombuffer(b"".join(parts), np.uint8) for name, parts in texts.items()},
        **{ends: np.cumsum(sizes[level]) + getattr(before, level) for level, ends in _ENDS.items()},
        "steps": [step] * len(trajectories),
        "valid": [t.valid for t in trajectories],
        "success": [t.success for t in trajectories],
    }


def _facts(t: Trajectory) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(Trajectory) if f.name not in _ELSEWHERE]
    return {name: to_json(getattr(t, name)) for name in names} | {"kept": t.kept is not None}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _spans(columns: Mapping[str, ts.TensorStore], index: int) -> dict[str, tuple[int, int]]:
    """(begin, end) of trajectory `index` in the columns of each length."""
    reads = {level: columns[ends][max(0, index - 1) : index + 1].read() for level, ends in _ENDS.items()}
    found = {level: read.result().tolist() for level, read in reads.items()}
    return {level: (ends[0] if index else 0, ends[-1]) for level, ends in found.items()}


def _cut(columns: Mapping[str, ts.TensorStore], commit: Commit, count: int) -> Commit:
    """The commit with its first `count` trajectories only."""
    spans = _spans(columns, count - 1) if count else dict.fromkeys(_ENDS, (0, 0))
    return replace(commit, trajectories=count, **{level: end for level, (_, end) in spans.items()})


def _trajectory(parts: Mapping[str, np.ndarray]) -> Trajectory:
    facts = json.loads(parts["facts"].tobytes())
    sizes, sets = parts["kept_sizes"].tolist(), parts["kept"].tobytes()
    ends = list(itertools.accumulate(sizes))
    kept = tuple(sets[end - size : end] for size, end in zip(sizes, ends, strict=True)) if facts.pop("kept") else None
    columns = {name: parts[name].tolist() for name in _PER_TOKEN}
    receipt = json.loads(parts["receipts"].tobytes())
    return replace(Trajectory.from_json({**facts, **columns, "receipt": receipt}), kept=kept)
