"""Processes that a run leaves behind are known by a variable of their environment, and ended. Standard library only.

A killed worker takes its process group with it. What has left the group (a daemon, a browser) still bears the mark, and
so does everything that a trainer which was killed had started. `RUN` is also there for environments to label what is no
process, such as containers, and to end it in `Suite.reap`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from agentrl_jax.rollout.codec import fingerprint

RUN, WORKER = "AGENTRL_RUN_LABEL", "AGENTRL_WORKER"
_LOOKS = 50  # one that cannot die, in a system call, is not waited for


def run_label(directory: Path) -> str:
    """A label for the run in `directory`: letters, digits, `.`, `_` and `-`, the same when it is resumed."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", directory.name).strip("-._")[:60] or "run"
    return f"{name}-{fingerprint(str(directory.absolute()))[:12]}"


def reap(variable: str, value: str) -> int:
    """Kill every other process that was started with `variable=value` in its environment; returns how many.

    It looks until none is left: one that was forked while it looked is not in that look's list.
    """
    mark, ended = f"{variable}={value}".encode(), set[int]()
    for _ in range(_LOOKS):
        found = [pid for pid in _others() if _bears(mark, pid)]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                ended.add(pid)
        if not found:
            break
    return len(ended)


def _others() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def _bears(mark: bytes, pid: int) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it is gone, or another user's
        return False
