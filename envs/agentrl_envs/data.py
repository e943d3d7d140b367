"""The catalogue of data sets: where each comes from, under which licence, and how it is verified.

A set is looked for in `AGENTRL_DATA/<name>`, then in the user's cache, then fetched from its origin at a fixed commit,
converted and put into the cache. Each file is verified by the sha256 of its content in canonical form (JSON with
sorted keys, lists of tasks line by line), so that neither compression nor layout matters.
"""

from __future__ import annotations

import ast
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


class DataError(RuntimeError):
    """A data set is missing or is not what the catalogue says; the message names what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a set: its path at the origin, and the sha256 of its canonical content."""

    origin: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    name: str
    repository: str
    commit: str
    licence: str
    files: Mapping[str, File]

    def url(self, file: str) -> str:
        return f"https://raw.githubusercontent.com/{self.repository}/{self.commit}/{self.files[file].origin}"


_RETAIL = "tau_bench/envs/retail"
CATALOGUE: dict[str, DataSet] = {
    "retail": DataSet(
        name="retail",
        repository="sierra-research/tau-bench",
        commit="59a200c6d575d595120f1cb70fea53cef0632f6b",
        licence="MIT",
        files={
            "users.json.gz": File(
                origin=f"{_RETAIL}/data/users.json",
                sha256="c712a9b61256070e5c0dc676645b93d6f5ec2dc8a80182fab312d9de51cd0582",
            ),
            "orders.json.gz": File(
                origin=f"{_RETAIL}/data/orders.json",
                sha256="db372c34a4226c830305cb78feefbeaf79897de300f67db4c0b8214e205d194b",
            ),
            "products.json.gz": File(
                origin=f"{_RETAIL}/data/products.json",
                sha256="b739a976c91e39561b40e7064f8f65572978e7cbb5a72a5bf0f2bedfa6f584dc",
            ),
            "tasks_train.jsonl.gz": File(
                origin=f"{_RETAIL}/tasks_train.py",
                sha256="686d30de0363417187dc49a184c03843b1c2447767645bfb2f86fff9cb9abf4a",
            ),
            "tasks_dev.jsonl.gz": File(
                origin=f"{_RETAIL}/tasks_dev.py",
                sha256="add1f9bdd45e378c6550409843316ab63b1ca52459875719475b1ae3e13247ea",
            ),
            "tasks_test.jsonl.gz": File(
                origin=f"{_RETAIL}/tasks_test.py",
                sha256="d91fd69a5fd65f36551dcc8a677d7f56ad71c3c1b5ba0594572f9b9b67c818ae",
            ),
            "policy.md": File(
                origin=f"{_RETAIL}/wiki.md", sha256="2a064144f4a76e7b2aa205216724361729185b39ab04acea15e7ecb0737cc2bb"
            ),
        },
    )
}


def locate(name: str) -> Path | None:
    """The folder that holds the set, from `AGENTRL_DATA` or the cache, or None. Never downloads."""
    given = data_dir()
    places = [Path(given) / name] if given else []
    for place in (*places, _cache() / name):
        if all((place / file).is_file() for file in CATALOGUE[name].files):
            return place
    return None


def load(name: str) -> dict[str, Any]:
    """The set's files by name, parsed and verified: JSON values, lists of tasks, texts. Downloads what is missing."""
    entry = CATALOGUE[name]
    place = locate(name) or _download(entry)
    return {file: _verified(entry, file, _read(place / file)) for file in entry.files}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "data"


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        if ".jsonl" in path.name:
            return [json.loads(line) for line in text.splitlines() if line]
        return json.loads(text) if ".json" in path.name else text.strip()
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it, or set AGENTRL_DATA to a good copy") from error


def canonical(value: Any) -> bytes:
    """The bytes that a sha256 of the catalogue is taken over."""
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _verified(entry: DataSet, file: str, value: Any) -> Any:
    found = hashlib.sha256(canonical(value)).hexdigest()
    if found != entry.files[file].sha256:
        raise DataError(
            f"data set {entry.name!r}: {file} is not the file of {entry.repository} at {entry.commit[:12]} "
            f"(sha256 {found[:12]}, expected {entry.files[file].sha256[:12]}); remove it to have it fetched again"
        )
    return value


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
        return reply.read()


def _download(entry: DataSet, fetch: Callable[[str], bytes] = _fetch) -> Path:
    """Fetches, converts and verifies every file, then moves the whole folder into the cache at once."""
    target = _cache() / entry.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            made = Path(temporary) / entry.name
            made.mkdir()
            for file in entry.files:
                value = _verified(entry, file, _convert(file, fetch(entry.url(file)).decode()))
                rows = value if ".jsonl" in file else [value]
                body = b"\n".join(canonical(row) for row in rows)
                (made / file).write_bytes(gzip.compress(body, mtime=0) if file.endswith(".gz") else body)
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
    except (OSError, urllib.error.URLError) as error:
        raise DataError(
            f"data set {entry.name!r} is not here and cannot be fetched from {entry.repository} ({error}); "
            f"set AGENTRL_DATA to a folder that holds {entry.name}/ with {', '.join(entry.files)}"
        ) from error
    return target


def _convert(file: str, text: str) -> Any:
    """A file of the origin in our form; tasks are read from Python source without running it."""
    if ".jsonl" in file:
        return tasks_of(text, file.removeprefix("tasks_").partition(".")[0])
    return json.loads(text) if ".json" in file else text.strip()


def tasks_of(source: str, split: str) -> list[dict[str, Any]]:
    """The `Task(...)` calls of a list in Python source, as records with an id."""
    calls = [node for node in ast.walk(ast.parse(source)) if _is_call(node, "Task")]
    return [{"id": f"{split}-{i}", **_record(node)} for i, node in enumerate(calls)]


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _record(node: ast.AST) -> dict[str, Any]:
    assert isinstance(node, ast.Call)
    return {str(word.arg): _value(word.value) for word in node.keywords}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_record(item) if _is_call(item, "Action") else _value(item) for item in node.elts]
    return ast.literal_eval(node)
