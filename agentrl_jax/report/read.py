"""Reads a run directory. A missing file is a section that says so; a broken line is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_jax.errors import UserError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run directory holds. Rows keep the order in which they were written; absent files are empty."""

    name: str
    config: Row = field(default_factory=dict)
    metrics: tuple[Row, ...] = ()
    evaluations: tuple[Row, ...] = ()
    transcripts: tuple[Row, ...] = ()
    timing: Row = field(default_factory=dict)
    summary: Row = field(default_factory=dict)
    receipts: int = 0


def read(run_dir: str | Path) -> RunRecord:
    """Raises `UserError` if `run_dir` is no run directory, or names the file and line that cannot be read."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir}: no such run directory; expected one that `agentrl train` wrote, such as runs/quickstart"
        )
    config, metrics = _read_json(run_dir / "config.json"), _read_lines(run_dir / "metrics.jsonl")
    evaluations = _read_lines(run_dir / "evaluations.jsonl")
    if not (config or metrics or evaluations):
        raise UserError(
            f"{run_dir}: holds no run (no config.json, metrics.jsonl or evaluations.jsonl); is it the right directory?"
        )
    return RunRecord(
        name=str(config.get("name") or run_dir.resolve().name),
        config=config,
        metrics=metrics,
        evaluations=evaluations,
        transcripts=tuple(row for place in _sampled(run_dir) for row in _read_lines(place / "transcripts.jsonl")),
        timing=_read_json(run_dir / "timing.json"),
        summary=_read_json(run_dir / "summary.json"),
        receipts=sum(_count_lines(place / "receipts.jsonl") for place in _sampled(run_dir)),
    )


def _sampled(run_dir: Path) -> list[Path]:
    """Where the processes of a run have written what they sampled: the first in the run's directory."""
    return [run_dir, *sorted(run_dir.glob("hosts/*"))]


def _read_json(path: Path) -> Row:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_lines(path: Path) -> tuple[Row, ...]:
    if not path.is_file():
        return ()
    rows: list[Row] = []
    # A last line without its newline was torn by a killed process or is being written this moment.
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    return tuple(rows)


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def number(row: Row, *names: str) -> float | None:
    """The first of `names` that the row holds as a number."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None
