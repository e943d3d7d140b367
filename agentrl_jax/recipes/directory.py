"""The run directory: made, checked and claimed before anything expensive begins."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_jax.errors import UserError
from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.describe import describe
from agentrl_jax.runtime.sinks import write_json

# Settings of the machines, not of what is computed: a run may go on under others.
_ELSEWHERE = ("mesh", "placement", "sampler_devices", "hosts")
_ROLLOUT_ELSEWHERE = ("slots", "tensor", "workers", "bank")  # what the devices and cores of one process ask for


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a config came from: its file and the overrides, kept beside the run so that it can be loaded again."""

    file: Path
    overrides: Sequence[str] = ()


def prepare(config: RunConfig, directory: Path, *, resume: bool, source: Source | None = None) -> None:
    """Create the directory of a new run, or check that the one to resume was written by the same config.

    Raises `UserError`: unwritable, already holding a run, nothing to resume, or another config.
    """
    target = directory / "config.json"
    described = json.loads(json.dumps(describe(config)))
    if resume:
        if not holds_run(directory):
            raise UserError(f"{directory}: nothing to resume (no config.json); leave out --resume to start a run")
        recorded = _read(target)
        changed = _differences(_computed(recorded), _computed(described))
        if changed:
            raise UserError(
                f"{directory}: --resume with another config: {', '.join(changed[:4])}; resume with the same settings "
                "or start under another name"
            )
        return
    if holds_run(directory):
        raise UserError(f"{directory}: already holds a run; continue it with --resume, or start another with name=...")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
        if source is not None:
            shutil.copyfile(source.file, directory / "config.py")
            write_json(directory / "overrides.json", list(source.overrides))
        write_json(target, described)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot write the run directory ({error.strerror}); give another place with runs=DIR"
        ) from error


def require_space(directory: Path, floor_gb: float) -> None:
    """Raises `UserError` where the disk of `directory` has less than `floor_gb` GB left: a full one tears files."""
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free / 1e9
    if free < floor_gb:
        raise UserError(
            f"{directory}: {free:.2f} GB of its disk are free, and a run needs rollout.free_space_gb={floor_gb:g}: "
            "make room, give another place with runs=DIR, or lower the setting"
        )


def _computed(described: dict[str, Any]) -> dict[str, Any]:
    """The settings that say what a run computes, without those of where."""
    rollout = {k: v for k, v in described["rollout"].items() if k not in _ROLLOUT_ELSEWHERE}
    return {k: v for k, v in described.items() if k not in _ELSEWHERE} | {"rollout": rollout}


def _differences(before: object, after: object, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(set(before) | set(after))
        return [line for k in keys for line in _differences(before.get(k), after.get(k), f"{path}.{k}" if path else k)]
    return [] if before == after else [f"{path} was {before!r}, is {after!r}"]


def source_of(directory: Path) -> Source:
    """The file and overrides that the run in `directory` was started with."""
    file, overrides = directory / "config.py", directory / "overrides.json"
    if not file.is_file() or not overrides.is_file():
        raise UserError(
            f"{directory}: holds no config.py and overrides.json; expected a run started by `agentrl train`"
        )
    return Source(file=file, overrides=tuple(_read(overrides)))


def is_run(directory: Path) -> bool:
    """Whether this is a run directory. A model's may hold `checkpoints` of whoever trained it, beside its tokenizer."""
    checkpointed = (directory / "checkpoints").is_dir() and not (directory / "tokenizer.json").is_file()
    return (directory / "overrides.json").is_file() or checkpointed


def began_from(directory: Path) -> str | None:
    """The `policy.path` that the run in `directory` began from, where its config has one."""
    recorded = _read(directory / "config.json") if holds_run(directory) else {}
    return (recorded.get("policy") or {}).get("path")


def holds_run(directory: Path) -> bool:
    try:
        return (directory / "config.json").is_file()
    except OSError as error:
        raise UserError(f"{directory}: cannot be read ({error.strerror}); give another place with runs=DIR") from error


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Hold the directory for one process: two would write over each other. The claim ends with the process."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{directory}: a run is at work here; wait for it, or start another with name=..."
            ) from error
        yield


def discard(directory: Path) -> None:
    """Take back what `prepare` and an opened run have written, where the run did not come to its first figure."""
    for name in ("checkpoints", "tensorboard", "published", "hosts"):
        shutil.rmtree(directory / name, ignore_errors=True)
    names = ("config.json", "config.py", "overrides.json", ".lock", "timing.json", "receipts.jsonl", "metrics.jsonl")
    for name in (*names, "evaluations.jsonl", "transcripts.jsonl", "infrastructure.jsonl"):
        (directory / name).unlink(missing_ok=True)
    with suppress(OSError):  # other files lie there: they are not ours
        directory.rmdir()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); mend it, or start under another name") from error
