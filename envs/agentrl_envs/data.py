"""Data sets: where each comes from, under which licence, and how it is verified. The sets themselves: `sets/`.

A set is looked for in `AGENTRL_DATA/<name>`, then in the user's cache, then fetched from its origin at a fixed commit,
converted and put into the cache. Each file is verified by the sha256 of its content in canonical form (JSON with
sorted keys, lists line by line, text as it is, anything else byte by byte), so that neither compression nor layout
matters.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_jax.protocol import data_dir

TIMEOUT_S = 60.0
TEXT = (".md", ".txt", ".mm", ".jsonnet")  # read as text; JSON by name; whatever else is bytes


class DataError(RuntimeError):
    """A data set is missing or is not what the catalogue says; the message names what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a set: the sha256 of its canonical content, its path at the origin, and how the origin's bytes
    become that content (by default they are it). `origin` None: nothing there can be fetched as one file.
    `elsewhere`: the (repository, commit) that it comes from, where that is not the set's."""

    sha256: str
    origin: str | None
    convert: Callable[[bytes], Any] | None = None
    elsewhere: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    name: str
    repository: str
    commit: str
    licence: str
    files: Mapping[str, File]

    def url(self, file: str) -> str:
        repository, commit = self.source(file)
        return f"https://raw.githubusercontent.com/{repository}/{commit}/{self.files[file].origin}"

    def source(self, file: str) -> tuple[str, str]:
        """The repository and the commit that a file comes from."""
        return self.files[file].elsewhere or (self.repository, self.commit)


def locate(entry: DataSet) -> Path | None:
    """The folder that holds the set, from `AGENTRL_DATA` or the cache, or None. Never downloads."""
    given = data_dir()
    places = [Path(given) / entry.name] if given else []
    for place in (*places, _cache() / entry.name):
        if all((place / file).is_file() for file in entry.files):
            return place
    return None


def load(entry: DataSet) -> dict[str, Any]:
    """The set's files by name, parsed and verified: JSON values, lists, texts, bytes. Downloads what is missing."""
    place = locate(entry) or _download(entry)
    return {file: _verified(entry, file, _read(place / file)) for file in entry.files}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "data"


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return parse(path.name, gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it, or set AGENTRL_DATA to a good copy") from error


def parse(name: str, raw: bytes) -> Any:
    """The content of a file by the end of its name: JSON lines, JSON, text (without blank ends) or bytes."""
    plain = name.removesuffix(".gz")
    if plain.endswith(".jsonl"):
        return [json.loads(line) for line in raw.decode().splitlines() if line]
    if plain.endswith(".json"):
        return json.loads(raw)
    return raw.decode().strip() if plain.endswith(TEXT) else raw


def canonical(value: Any) -> bytes:
    """The bytes that a sha256 of the catalogue is taken over."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _verified(entry: DataSet, file: str, value: Any) -> Any:
    found = hashlib.sha256(canonical(value)).hexdigest()
    if found != entry.files[file].sha256:
        repository, commit = entry.source(file)
        raise DataError(
            f"data set {entry.name!r}: {file} is not the file of {repository} at {commit[:12]} "
            f"(sha256 {found[:12]}, expected {entry.files[file].sha256[:12]}); remove it to have it fetched again"
        )
    return value


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
        return reply.read()


def _download(entry: DataSet, fetch: Callable[[str], bytes] = _fetch) -> Path:
    """Fetches, converts and verifies every file, then moves the whole folder into the cache at once."""
    target = _cache() / entry.name
    wanted = f"set AGENTRL_DATA to a folder that holds {entry.name}/ with {', '.join(entry.files)}"
    made_elsewhere = [name for name, file in entry.files.items() if file.origin is None]
    if made_elsewhere:
        raise DataError(f"data set {entry.name!r} is not here, and {made_elsewhere[0]} cannot be fetched; {wanted}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            made = Path(temporary) / entry.name
            for file, source in entry.files.items():
                convert = source.convert or (lambda raw, file=file: parse(file, raw))
                value = _verified(entry, file, convert(fetch(entry.url(file))))
                rows = value if ".jsonl" in file else [value]
                body = b"\n".join(canonical(row) for row in rows)
                (made / file).parent.mkdir(parents=True, exist_ok=True)
                (made / file).write_bytes(gzip.compress(body, mtime=0) if file.endswith(".gz") else body)
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
    except (OSError, urllib.error.URLError) as error:
        raise DataError(
            f"data set {entry.name!r} is not here and cannot be fetched from {entry.repository} ({error}); {wanted}"
        ) from error
    return target
