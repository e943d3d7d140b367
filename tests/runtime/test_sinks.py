"""Sinks: whole lines or none, strict JSON, and dropping what a resumed run will write again."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2

from agentrl_jax.errors import UserError
from agentrl_jax.runtime.sinks import JsonlSink, RunSinks, TensorBoardSink, to_plain, write_json


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_row_is_on_disk_when_write_returns(tmp_path):
    sink = JsonlSink(tmp_path / "deep" / "metrics.jsonl")
    sink.write({"step": 1, "name": "é\n"})
    assert rows(sink.path) == [{"step": 1, "name": "é\n"}]
    sink.write({"step": 2, "loss": np.float32(0.5), "counts": np.arange(2), "bad": float("nan")})
    assert rows(sink.path)[1] == {"step": 2, "loss": 0.5, "counts": [0, 1], "bad": None}
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write({})


def test_a_line_torn_by_a_kill_is_dropped_on_opening(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":2,"lo')
    sink = JsonlSink(path)
    sink.write({"step": 2})
    sink.close()
    assert rows(path) == [{"step": 1}, {"step": 2}]


@given(steps=st.lists(st.integers(0, 9), max_size=12), cut=st.integers(0, 9))
def test_truncation_keeps_exactly_the_earlier_rows_in_order(tmp_path_factory, steps, cut):
    sink = JsonlSink(tmp_path_factory.mktemp("sink") / "metrics.jsonl")
    for step in steps:
        sink.write({"step": step})
    dropped = sink.truncate_after(lambda row: row["step"] > cut)
    sink.write({"step": "next"})
    sink.close()
    kept = [step for step in steps if step <= cut]
    assert [row["step"] for row in rows(sink.path)] == [*kept, "next"]
    assert dropped == len(steps) - len(kept)
    assert [p.name for p in sink.path.parent.iterdir()] == ["metrics.jsonl"]


def test_truncation_names_a_broken_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\nbroken\n')
    sink = JsonlSink(path)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not JSON"):
        sink.truncate_after(lambda row: True)
    assert path.read_text() == '{"step":1}\nbroken\n'
    sink.close()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_writer_leaves_whole_lines(tmp_path):
    program = (
        "import sys; from agentrl_jax.runtime.sinks import JsonlSink\n"
        "s = JsonlSink(sys.argv[1]); i = 0\n"
        "while True:\n    s.write({'step': i, 'text': 'x' * 5000}); i += 1\n    i == 20 and print('go', flush=True)\n"
    )
    path = tmp_path / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        process.kill()
    JsonlSink(path).close()
    found = rows(path)
    assert [row["step"] for row in found] == list(range(len(found))) and len(found) >= 20


def test_write_json_replaces_the_whole_file_or_nothing(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": np.int64(3)})
    with pytest.raises(TypeError, match="object"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_run_sinks_write_each_kind_of_row_and_truncate_all_but_receipts(tmp_path):
    with RunSinks(tmp_path) as sinks:
        for at in (1, 2, 3):
            sinks.metrics({"stage": "rl", "step": at, "at": at, "loss": 0.1, "note": "text"})
            sinks.evaluation({"stage": "rl", "step": at, "at": at, "split": "heldout", "success": 0.5})
            sinks.transcript({"at": at, "tokens": [["a", 3, 0, -0.1, 1.0]]})
            sinks.receipt({"replay_id": str(at)})
        assert sinks.truncate_after(lambda row: row["at"] > 1) == 6
    for name in ("metrics", "evaluations", "transcripts"):
        assert [row["at"] for row in rows(tmp_path / f"{name}.jsonl")] == [1]
    assert len(rows(tmp_path / "receipts.jsonl")) == 3
    assert board_steps(tmp_path / "tensorboard") == {("rl/loss", 1), ("rl/at", 1), *(
        (f"rl/heldout/{name}", 1) for name in ("at", "success")
    )}  # fmt: skip


def board_steps(directory):
    """(tag, step) of every scalar in TensorBoard's own files: length, checksum, event, checksum."""
    found = []
    for path in directory.iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step) for value in event.summary.value]
            data = data[16 + length :]
    assert len(found) == len(set(found)), "a step stands twice"
    return set(found)


def test_tensorboard_gets_the_numbers_under_their_stage(tmp_path, monkeypatch):
    sink = TensorBoardSink(tmp_path)
    seen = []
    monkeypatch.setattr(sink._writer, "add_scalar", lambda *scalar: seen.append(scalar))
    sink.write({"stage": "rl", "step": 7, "loss": np.float32(0.5), "done": True, "name": "x", "bad": float("inf")})
    sink.close()
    assert seen == [("rl/loss", 0.5, 7)]


def test_to_plain_refuses_what_json_cannot_hold():
    assert to_plain((np.bool_(True), None, np.float64("nan"))) == [True, None, None]
    with pytest.raises(TypeError, match="set"):
        to_plain({1, 2})
