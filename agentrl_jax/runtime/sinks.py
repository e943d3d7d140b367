"""Where a run writes what happened: JSON lines for programs and the report, TensorBoard for curves.

A run directory holds config.json, metrics.jsonl, evaluations.jsonl, transcripts.jsonl, receipts.jsonl,
infrastructure.jsonl (the receipts of episodes that failed for reasons outside the policy), timing.json, summary.json
and tensorboard/. Every line is complete or absent, also after SIGKILL.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentrl_jax.errors import UserError

Row = Mapping[str, Any]


def to_plain(value: Any) -> Any:
    """`value` as strict JSON: array scalars become numbers, numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if not isinstance(value, float) and hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    raise TypeError(f"cannot write {type(value).__name__} as JSON; expected numbers, text, lists or mappings")


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` to `path` whole or not at all (a temporary file, then a rename)."""
    path = Path(path)
    text = json.dumps(to_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    _replace(path, text.encode("utf-8", "backslashreplace"))


class JsonlSink:
    """Appends rows to a JSON-lines file; each row is on disk as one whole line when `write` returns.

    A last line that a killed process left torn is dropped on opening.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _drop_torn_line(self.path)
        self._descriptor: int | None = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, row: Row) -> None:
        if self._descriptor is None:
            raise ValueError(f"{self.path}: written to after it was closed")
        line = json.dumps(to_plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
        # A lone surrogate, which a policy can write as an escape in JSON, goes back to its escape.
        rest = memoryview(line.encode("utf-8", "backslashreplace"))
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def truncate_after(self, is_later: Callable[[Row], bool]) -> int:
        """Drops every row for which `is_later(row)` holds and returns how many; used when a run resumes
        from a checkpoint that is older than the last rows."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for number, line in enumerate(lines, 1) if not is_later(_parse(self.path, number, line))]
        if len(kept) < len(lines):
            self.close()
            _replace(self.path, b"".join(kept))
            self._descriptor = self._open()
        return len(lines) - len(kept)

    def rows(self) -> list[dict[str, Any]]:
        """Every row that the file holds."""
        return [_parse(self.path, number, line) for number, line in enumerate(self.path.read_bytes().splitlines(), 1)]

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class TensorBoardSink:
    """Writes the numbers of each row as scalars `stage/name`, at the row's step."""

    def __init__(self, directory: str | Path) -> None:
        from tensorboardX import SummaryWriter

        self.directory = Path(directory)
        self._writer = SummaryWriter(logdir=str(directory))

    def write(self, row: Row) -> None:
        plain = to_plain(row)
        for name, value in plain.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{plain.get('stage', 'run')}/{name}", value, int(plain.get("step", 0)))

    def close(self) -> None:
        self._writer.close()


class RunSinks:
    """All the sinks of one run directory; use it as a context manager.

    `metrics`, `evaluation`, `transcript`, `receipt` and `broken` each write one row. Without `figures` the first two
    write nothing: of several processes one has them.
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True, figures: bool = True) -> None:
        run_dir = Path(run_dir)
        tensorboard = tensorboard and figures
        self._metrics = JsonlSink(run_dir / "metrics.jsonl") if figures else None
        self._evaluations = JsonlSink(run_dir / "evaluations.jsonl") if figures else None
        self._transcripts = JsonlSink(run_dir / "transcripts.jsonl")
        self._receipts = JsonlSink(run_dir / "receipts.jsonl")
        self._broken = JsonlSink(run_dir / "infrastructure.jsonl")
        self._board = TensorBoardSink(run_dir / "tensorboard") if tensorboard else None

    def metrics(self, row: Row) -> None:
        if self._metrics is not None:
            self._metrics.write(row)
        if self._board is not None:
            self._board.write(row)

    def evaluation(self, row: Row) -> None:
        if self._evaluations is not None:
            self._evaluations.write(row)
        if self._board is not None:
            self._board.write(_as_evaluation(row))

    def transcript(self, row: Row) -> None:
        self._transcripts.write(row)

    def receipt(self, row: Row) -> None:
        self._receipts.write(row)

    def broken(self, row: Row) -> None:
        """The receipt of an episode that left the batch."""
        self._broken.write(row)

    def truncate_after(self, is_later: Callable[[Row], bool]) -> int:
        """Drops the later rows of metrics, evaluations and transcripts, and from TensorBoard. Receipts carry no
        step of the run: they are a log of what was executed, and what was executed stays executed."""
        sinks = (self._metrics, self._evaluations, self._transcripts)
        dropped = sum(sink.truncate_after(is_later) for sink in sinks if sink is not None)
        if dropped and self._board is not None:
            self._rebuild_board()
        return dropped

    def _rebuild_board(self) -> None:
        """TensorBoard's files cannot lose a row, so they are written anew from the rows that stayed."""
        assert self._board is not None and self._metrics is not None and self._evaluations is not None
        self._board.close()
        shutil.rmtree(self._board.directory, ignore_errors=True)
        self._board = TensorBoardSink(self._board.directory)
        for row in self._metrics.rows():
            self._board.write(row)
        for row in self._evaluations.rows():
            self._board.write(_as_evaluation(row))

    def close(self) -> None:
        for sink in (self._metrics, self._evaluations, self._transcripts, self._receipts, self._broken, self._board):
            if sink is not None:
                sink.close()

    def __enter__(self) -> RunSinks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _as_evaluation(row: Row) -> Row:
    return {**row, "stage": f"{row.get('stage', 'run')}/{row.get('split', 'evaluation')}"}


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not JSON ({error}); mend or remove that line") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
    return row


def _drop_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
