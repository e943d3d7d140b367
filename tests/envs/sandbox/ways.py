"""What the ways out of a box have in common: how one is declared, and what they look at."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl_envs.sandbox import Limits, Sandbox

Make = Callable[..., Sandbox]
LABEL = "escapes"
SMALL = Limits(time_s=10, memory_bytes=192 << 20, processes=24, disk_bytes=24 << 20, files=600, output_bytes=20_000)
ESCAPES: dict[str, Callable[[Make], None]] = {}
SECRET = "the-secret-of-the-launcher"


def escape(function: Callable[[Make], None]) -> Callable[[Make], None]:
    ESCAPES[function.__name__] = function
    return function


def python(box: Sandbox, program: str, **more: Any) -> str:
    """What a program prints, errors included; runs inside."""
    result = box.run(["python3", "-c", program], **more)
    return (result.stdout + result.stderr).decode(errors="replace")


@contextlib.contextmanager
def outside():
    """A directory of the host that everybody may read and write, as far as the host is concerned."""
    place = Path(tempfile.mkdtemp(prefix="outside-"))
    place.chmod(0o777)
    (place / "secret.txt").write_text(SECRET)
    (place / "secret.txt").chmod(0o666)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def running(mark: str) -> list[int]:
    """Processes of the host with this text in their command line."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def until(true: Callable[[], object], seconds: float = 60) -> bool:
    """Whether it becomes true: a process takes its time to start and to end."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def gone(mark: str) -> bool:
    """Whether such processes end."""
    return until(lambda: not running(mark))
