"""What a box costs on each back end of this machine: opening one, a command, a snapshot and its forks.

`agentrl bench env` prints it, and `python benchmarks/sandbox.py [--json] [--rounds N] [BACKEND ...]`. Wall
milliseconds, medians, on a machine that has nothing else to do. The first box of a process also starts the process that
boxes are forked from, so it is opened in a new interpreter each time; a command's overhead is its time beyond that of
`subprocess.run` with the same program, measured in turn. The workspace of the forks is 10 MB in 500 files, of which a
tenth is changed before the snapshot; they count as made when a command has run in both. The tenant is a SQLite
database of 20 MB, by `serialize`.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from agentrl_envs.sandbox import Sandbox, available, open_sandbox

BARS = {  # of the issue, in ms; an overhead is what a command costs beyond the command itself
    "first_command": {"namespaces": 40.0, "docker": 600.0},
    "command_overhead": {"namespaces": 1.0},
    "snapshot_and_two_forks": {"namespaces": 60.0},
    "tenant_snapshot_and_fork": {"sqlite": 50.0},
}
FILES, BYTES, CHANGED = 500, 10 << 20, 50
_FIRST = """
import sys, time
from agentrl_envs.sandbox import open_sandbox
began = time.perf_counter()
with open_sandbox({"a.txt": b"a"}, backend=sys.argv[1]) as box:
    assert box.run(["true"]).ok
    print((time.perf_counter() - began) * 1e3)
"""

Row = dict[str, Any]


def measure(rounds: int = 9, backends: list[str] | None = None) -> list[Row]:
    """A row for each figure of each back end that works here, with the issue's bar where it has one."""
    works = available()
    rows = [_row(name, "unavailable", None, why=why) for name, why in works.items() if why and name in (backends or [])]
    for name in backends or works:
        if works[name] is None:
            rows += _backend(name, rounds)
    return [*rows, _row("sqlite", "tenant_snapshot_and_fork", _tenant(rounds))]


def _row(backend: str, what: str, ms: float | None, **more: Any) -> Row:
    bar = BARS.get(what, {}).get(backend)
    figure = None if ms is None else round(ms, 3)
    return {"backend": backend, "what": what, "ms": figure, "bar_ms": bar, **more}


def _backend(name: str, rounds: int) -> list[Row]:
    first = [_first(name) for _ in range(rounds)]
    data = random.Random(0)
    files = {f"d{n % 20}/f{n}.py": data.randbytes(BYTES // FILES) for n in range(FILES)}
    with open_sandbox(files, backend=name, run_label="bench") as box:
        inside, outside = _commands(box, rounds * 20)
        few = max(3, rounds // 3) if name == "docker" else rounds
        snapshots = [_snapshot(box, n) for n in range(few)]
        second = [_timed(lambda: _open_and_close(name)) for _ in range(few)]
    snapshot, both = (median(column) for column in zip(*snapshots, strict=True))
    return [
        _row(name, "first_command", median(first), note="the process's first box"),
        _row(name, "next_box", median(second), note="open, one command, close"),
        _row(name, "command", median(inside), itself_ms=round(median(outside), 3)),
        _row(name, "command_overhead", median(a - b for a, b in zip(inside, outside, strict=True))),
        _row(name, "snapshot", snapshot),
        _row(name, "snapshot_and_two_forks", both),
    ]


def _first(name: str) -> float:
    done = subprocess.run([sys.executable, "-c", _FIRST, name], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def _commands(box: Sandbox, count: int) -> tuple[list[float], list[float]]:
    """Inside and outside in turn, so that both meet the same machine."""
    inside, outside = [], []
    for _ in range(count):
        inside.append(_timed(lambda: box.run(["true"])))
        outside.append(_timed(lambda: subprocess.run(["true"], capture_output=True, check=True)))
    return inside, outside


def _snapshot(box: Sandbox, number: int) -> tuple[float, float]:
    for n in range(CHANGED):
        box.write(f"d{n % 20}/f{n}.py", f"{number}\n".encode() * 5000)
    began = time.perf_counter()
    frozen = box.freeze()
    snapshot = (time.perf_counter() - began) * 1e3
    one, two = box.fork(frozen), box.fork(frozen)
    assert one.run(["true"]).ok and two.run(["true"]).ok
    both = (time.perf_counter() - began) * 1e3
    for each in (one, two):
        each.close()
    frozen.release()
    return snapshot, both


def _open_and_close(name: str) -> None:
    with open_sandbox({"a.txt": b"a"}, backend=name, run_label="bench") as box:
        assert box.run(["true"]).ok


def _tenant(rounds: int) -> float:
    """Milliseconds for a snapshot and a fork of a database of 20 MB in memory, as `workflow` keeps its tenants."""
    source = sqlite3.connect(":memory:")
    source.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, text TEXT)")
    data = random.Random(0)
    source.executemany("INSERT INTO orders (text) VALUES (?)", ((data.randbytes(250).hex(),) for _ in range(40_000)))
    source.commit()

    def work() -> None:
        fork = sqlite3.connect(":memory:")
        fork.deserialize(source.serialize())
        fork.execute("SELECT count(*) FROM orders").fetchone()
        fork.close()

    times = [_timed(work) for _ in range(rounds)]
    source.close()
    return median(times)


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [f"{'back end':<12}{'what':<28}{'ms':>10}{'bar':>8}"]
    for row in rows:
        bar = "" if row["bar_ms"] is None else f"{row['bar_ms']:.0f}"
        figure = row.get("why", "") if row["ms"] is None else f"{row['ms']:.2f}"
        lines.append(f"{row['backend']:<12}{row['what']:<28}{figure:>10}{bar:>8}  {row.get('note', '')}".rstrip())
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a sandbox costs on this machine.")
    parser.add_argument(
        "backends", nargs="*", help="namespaces, landlock, docker; all that work here where none is named"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.backends or None)
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
