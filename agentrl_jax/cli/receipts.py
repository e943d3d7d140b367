"""Finds the receipt that `agentrl replay` was given."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl_jax.errors import UserError
from agentrl_jax.rollout.records import Receipt


def read_receipt(given: str) -> Receipt:
    """`path.json`, or `path.jsonl:N` for its N-th line (from 1). Raises `UserError` that names the file and line."""
    path, line = _split(given)
    if not path.is_file():
        raise UserError(f"{path}: no such receipt; expected a JSON file, or receipts.jsonl:N for its N-th line")
    lines = (
        path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text(encoding="utf-8")]
    )
    if line is None and len(lines) != 1:
        raise UserError(f"{path}: holds {len(lines)} receipts; name one, such as {path}:1")
    line = 1 if line is None else line
    if not 1 <= line <= len(lines):
        raise UserError(f"{path}:{line}: expected a line between 1 and {len(lines)}")
    try:
        return Receipt.from_json(json.loads(lines[line - 1]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}:{line}: not a receipt ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def _split(given: str) -> tuple[Path, int | None]:
    name, separator, number = given.rpartition(":")
    return (Path(name), int(number)) if separator and number.isdigit() else (Path(given), None)
