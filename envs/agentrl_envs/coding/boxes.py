"""Runs Python in a fresh box: the visible tests for the policy, the hidden cases for the verifier, trials for a source.

One box per run, made from the files and closed after it: nothing of one run is there in the next. What comes back are
answers as data; whether they are right is decided outside, so there is nothing in the box worth forging.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from .. import sandbox

SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
START = "import sys; sys.path[:] = [p for p in sys.path if p]; exec(compile(sys.argv[1], 'inbox.py', 'exec'))"
MEMORY = 512 << 20
OUTPUT = 1 << 20
XCPU, KILLED = -24, -9  # ended for the processor time it took; for taking more all the same, or by itself


class Answers(NamedTuple):
    """The answers by number, the numbers that were answered twice, and what ended the run before its end, or ""."""

    answers: dict[int, Any]
    doubled: list[int]
    stopped: str


class Report(NamedTuple):
    """What the visible tests print, and what ended them, or ""."""

    text: str
    stopped: str


def measure(backend: str, files: Mapping[str, str], cases: Sequence[Mapping[str, Any]], seconds: float) -> Answers:
    """The cases' arguments (never what is expected) against the files, in one process of a box of its own."""
    asked = [{key: value for key, value in case.items() if key != "expected"} for case in cases]
    return _answers(backend, files, {"mode": "measure", "cases": asked, "cpu": ceil(seconds)})


def trial(backend: str, programs: Sequence[str], cases: Sequence[Mapping[str, Any]], lines: int) -> list[list[Any]]:
    """What each program answers to each case, executing at most `lines` lines; [] where it was stopped."""
    asked = [{key: value for key, value in case.items() if key != "expected"} for case in cases]
    job = {"mode": "trial", "programs": list(programs), "cases": asked, "lines": lines, "cpu": 30}
    found = _answers(backend, {}, job).answers
    return [found.get(index, []) for index in range(len(programs))]


def visible(backend: str, files: Mapping[str, str], seconds: float) -> Report:
    """The report of the tests under `tests/`."""
    _, text, stopped = _run(backend, files, {"mode": "visible", "cpu": ceil(seconds)})
    return Report(text, stopped or ("" if text else "the tests ended the process that ran them"))


def _answers(backend: str, files: Mapping[str, str], job: dict[str, Any]) -> Answers:
    nonce, text, stopped = _run(backend, files, job)
    answers: dict[int, Any] = {}
    doubled: list[int] = []
    for line in text.splitlines():
        mark, _, rest = line.partition(" ")
        number, _, body = rest.partition(" ")
        if mark != nonce or not (number.isascii() and number.isdecimal() and len(number) < 6):
            continue
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if int(number) in answers:
            doubled.append(int(number))
        answers[int(number)] = answer
    return Answers(answers, doubled, stopped)


def _run(backend: str, files: Mapping[str, str], job: dict[str, Any]) -> tuple[str, str, str]:
    """(the mark of honest lines, what was written, what ended it). SandboxError if the job did not even start."""
    python, visible_paths = interpreter()
    nonce = secrets.token_hex(16)
    limits = sandbox.Limits(
        time_s=10.0 + 5.0 * job["cpu"], memory_bytes=MEMORY, processes=16, disk_bytes=16 << 20, output_bytes=OUTPUT
    )
    held = {path: text.encode() for path, text in files.items()}
    sent = json.dumps({**job, "nonce": nonce}).encode()
    with sandbox.open_sandbox(held, limits=limits, backend=backend, visible=visible_paths) as box:
        result = box.run([python, "-s", "-S", "-B", "-c", START, _inbox()], stdin=sent)
    first, _, text = result.stdout.decode(errors="replace").partition("\n")
    if first != f"{nonce} started":
        said = result.stderr.decode(errors="replace").strip()[-200:]
        raise sandbox.SandboxError(f"{python} did not start in the box (exit code {result.exit_code}): {said}")
    return nonce, text, _stopped(result)


def _stopped(result: sandbox.Result) -> str:
    if result.exit_code == XCPU or result.timed_out:
        return "time"
    if result.limit is not None or result.ended or result.exit_code == KILLED:
        return result.limit or "killed"
    return "output" if result.truncated else ""


@cache
def _inbox() -> str:
    return (Path(__file__).parent / "inbox.py").read_text(encoding="utf-8")


@cache
def interpreter() -> tuple[str, tuple[str, ...]]:
    """The Python that boxes use: the system's from 3.10 on, else the one that runs this."""
    for path in SYSTEM_PYTHONS:
        found = re.fullmatch(r"python3\.(\d+)", os.path.basename(os.path.realpath(path)))
        if os.access(path, os.X_OK) and found and int(found[1]) >= 10:
            return path, ()
    return sandbox.interpreter()


def missing() -> str | None:
    """None where boxes work here, else what this machine lacks, in one sentence."""
    try:
        sandbox.chosen()
    except sandbox.SandboxError as error:
        return str(error)
    return None
