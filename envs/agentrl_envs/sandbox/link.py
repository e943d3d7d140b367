"""The connection to the bare interpreter that opens boxes for this process, and its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from .boxed import frames
from .words import SandboxError, WorkspaceError

_SOURCE = Path(__file__).resolve().parent
FIRST_UID, UIDS_EACH = 1 << 30, 128  # root: uids of the host for the boxes of one process


def first_uid() -> int:
    """The unprivileged uids of the host that boxes of this process may have begin here: 0 where none can be chosen."""
    if os.getuid():
        return 0
    first, _, count = (int(part) for part in Path("/proc/self/uid_map").read_text().split()[-3:])
    wanted = FIRST_UID + (os.getpid() % (1 << 22)) * UIDS_EACH
    return wanted if first <= wanted and wanted + UIDS_EACH <= first + count else 0


class Link:
    """A child process (`module` of `boxed/`) that answers requests one at a time, until this process ends."""

    def __init__(self, module: str, label: str, *setup: object) -> None:
        self.owner = os.getpid()
        self.spare: deque[tuple[object, ...]] = deque()  # requests of finalizers, which may not speak themselves
        self._lock = threading.RLock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(module, theirs, label)
        self._control.settimeout(60)
        try:
            self._control.sendall(str(_SOURCE).encode().ljust(4096))
            self.hello = self.ask(os.getpid(), *setup)
        except BaseException:
            self.end()
            raise

    def ask(self, *request: object, channel: socket.socket | None = None) -> list[bytes]:
        """A request's answer. WorkspaceError where it was refused, SandboxError where it failed."""
        with self._lock:
            while self.spare:
                self._exchange(self.spare.popleft(), None)
            fields = self._exchange(request, channel)
        if fields[0] == b"refused":
            raise WorkspaceError(fields[1].decode(errors="replace"))
        if fields[0] != b"ok":
            raise SandboxError(fields[-1].decode(errors="replace"))
        return fields[1:]

    def _exchange(self, request: tuple[object, ...], channel: socket.socket | None) -> list[bytes]:
        data = frames.frame(*request)
        try:
            if channel is None:
                self._control.sendall(data)
            else:
                socket.send_fds(self._control, [data[:4]], [channel.fileno()])
                self._control.sendall(data[4:])
            return frames.unpack(self._take(frames.size_of(self._take(4))))
        except (OSError, frames.Broken) as error:
            self._process.kill()
            raise SandboxError(f"the process that keeps the boxes is gone: {error}") from None
        except BaseException:
            self._process.kill()  # interrupted between a request and its answer: the next would get this one's
            raise

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            parts.append(self._control.recv(min(size, 1 << 20)))
            size -= len(parts[-1])
            if not parts[-1]:
                raise frames.Broken("its channel was closed")
        return b"".join(parts)

    def alive(self) -> bool:
        """Started by this process (not by the one it was forked from), and running."""
        return self.owner == os.getpid() and self._process.poll() is None

    def end(self) -> None:
        """Ends it, and with it every box."""
        if self.owner != os.getpid():
            return
        self._control.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def _spawn(module: str, control: socket.socket, label: str) -> subprocess.Popen[bytes]:
    """A bare interpreter in an empty environment: what it holds, boxes might come to see."""
    start = f"import sys,os;sys.path.append(os.read(0,4096).rstrip(b' ').decode());import boxed.{module} as m;m.main()"
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    base = getattr(sys, "_base_executable", None)  # a venv's own finds its modules through files of the venv
    executable = base if base and os.access(base, os.X_OK) else sys.executable
    return subprocess.Popen(
        [executable, "-I", "-S", "-c", start, label], stdin=control.fileno(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=kept, cwd="/", process_group=0,
    )  # fmt: skip
