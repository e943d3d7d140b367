"""A box seen from outside: one request at a time over its channel. Answers are checked, since a box is not trusted."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from .boxed import frames
from .words import Command, File, Frozen, Limits, Process, Result, Sandbox, SandboxError, WorkspaceError

GRACE_S = 10.0  # what an answer may take beyond the command's own time
LARGEST_OVERHEAD = 64 << 20  # of an answer, beyond the disk's size


class Ended(SandboxError):
    """The box is no more: it was closed, killed, or ended with a command."""


class Box:
    """What every back end's box does in the same way; each says how a box ends, and how another one like it begins."""

    def __init__(self, backend: str, limits: Limits, channel: socket.socket) -> None:
        self.backend, self.limits = backend, limits
        self._channel, self._owner = channel, os.getpid()
        self._lock, self._once = threading.RLock(), threading.Lock()
        self._closed = False
        channel.setblocking(False)

    def run(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Sandbox.run."""
        argv = [SHELL, "-c", command] if isinstance(command, str) else list(command)
        if not argv or any("\0" in part for part in argv):
            raise ValueError(f"run({command!r}): expected an argument vector or a line, without zero bytes")
        timeout = self.limits.time_s if timeout_s is None else timeout_s
        if not 0 < timeout < 1e6:
            raise ValueError(f"timeout_s={timeout_s}: expected seconds above 0")
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        started = time.monotonic()
        with self._lock:
            self._check_open()
            try:
                fields = self._ask(timeout + GRACE_S, "run", timeout, cwd, len(argv), *argv, stdin, *variables)
                return _result(fields)
            except Ended as end:  # not before: a closed box is no result
                return self._ended_with(started, end)

    def _ended_with(self, started: float, end: Ended) -> Result:
        """A command may bring its box down; that is its result."""
        self.close()
        late = "did not answer" in str(end)
        return Result(
            exit_code=-9, stdout=b"", stderr=b"", timed_out=late, limit="time" if late else self._cause(), ended=True,
            wall_s=time.monotonic() - started,
        )  # fmt: skip

    def _cause(self) -> str | None:
        return None

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """Sandbox.read."""
        return self._one(path, "read", path, -1 if limit is None else limit)

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Sandbox.write."""
        self._command(path, "write", path, mode & 0o777, data)

    def remove(self, path: str) -> None:
        """Sandbox.remove."""
        self._command(path, "remove", path)

    def files(self) -> tuple[File, ...]:
        """Sandbox.files."""
        fields = self._workspace("files", "files")
        if len(fields) % 5:
            raise self._nonsense()
        rows = [fields[n : n + 5] for n in range(0, len(fields), 5)]
        return tuple(
            File(path=_text(path), kind=_text(kind), size=_int(size), mode=_int(mode), target=_text(target))
            for path, kind, size, mode, target in rows
        )

    def archive(self) -> bytes:
        """Sandbox.archive."""
        return self._one("archive", "archive")

    def digest(self) -> str:
        """Sandbox.digest."""
        return sha256(self.archive()).hexdigest()

    def extract(self, archive: bytes) -> None:
        """Sandbox.extract."""
        self._command("extract", "extract", archive)

    def freeze(self) -> Frozen:
        """Sandbox.freeze: here the archive itself."""
        return Frozen(backend=self.backend, layers=(self.archive(),))

    def fork(self, frozen: Frozen) -> Sandbox:
        """Sandbox.fork."""
        if frozen.backend != self.backend:
            raise ValueError(f"frozen in {frozen.backend}, forked in {self.backend}: use archive() and extract()")
        return self._sibling(frozen)

    def _sibling(self, frozen: Frozen) -> Sandbox:
        raise SandboxError(f"{self.backend} boxes do not fork")

    def processes(self) -> tuple[Process, ...]:
        """Sandbox.processes."""
        fields, found = self._workspace("processes", "processes"), []
        while fields:
            if len(fields) < 2 or len(fields) < 2 + _int(fields[1]):
                raise self._nonsense()
            end = 2 + _int(fields[1])
            found.append(Process(pid=_int(fields[0]), argv=tuple(_text(part) for part in fields[2:end])))
            fields = fields[end:]
        return tuple(sorted(found, key=lambda each: each.pid))

    def kill(self) -> None:
        """Sandbox.kill."""
        self._command("kill", "kill")

    def close(self) -> None:
        """Sandbox.close."""
        with self._once:
            if self._closed:
                return
            self._closed = True
        try:
            if self._owner == os.getpid():  # else it is the channel of the process that this one was forked from
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)  # another thread's command ends with it
            self._end(final=False)
        finally:
            with self._lock:
                self._channel.close()

    def _end(self, *, final: bool) -> None:
        """Ends the box; a `final` call comes from the collector, at any time, and may only leave word."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._closed = True
            self._channel.close()
            self._end(final=True)

    def _check_open(self) -> None:
        if self._closed:
            raise Ended("the box is closed: open another one")
        if self._owner != os.getpid():
            raise SandboxError("the box belongs to the process that this one was forked from: open one here")

    def _one(self, name: str, *request: object) -> bytes:
        fields = self._workspace(name, *request)
        if len(fields) != 1:
            raise self._nonsense()
        return fields[0]

    def _command(self, name: str, *request: object) -> None:
        if self._workspace(name, *request):
            raise self._nonsense()

    def _workspace(self, name: str, *request: object) -> list[bytes]:
        """Asks for something of the workspace."""
        with self._lock:
            self._check_open()
            fields = self._ask(GRACE_S + 20, *request)
        if fields[0] == b"refused" and len(fields) == 2:
            raise WorkspaceError(f"{name}: {_text(fields[1])}")
        if fields[0] != b"ok":
            raise self._nonsense()
        return fields[1:]

    def _nonsense(self) -> SandboxError:
        self.close()
        return SandboxError("the box's agent answers nonsense: the box was closed")

    def _ask(self, patience: float, *request: object) -> list[bytes]:
        """A request's answer, not empty; Ended where the box is gone or does not answer in time."""
        deadline = time.monotonic() + patience
        try:
            self._send(frames.frame(*request), deadline)
            most = self.limits.disk_bytes + 2 * self.limits.output_bytes + LARGEST_OVERHEAD
            size = frames.size_of(self._take(4, deadline), most)
            fields = frames.unpack(self._take(size, deadline))
        except (OSError, frames.Broken) as error:
            self.close()
            raise Ended(f"the box ended: {error}") from None
        except BaseException:
            self.close()  # interrupted between a request and its answer: the next would get this one's
            raise
        if not fields:
            raise self._nonsense()
        if fields[0] == b"broken":
            self.close()
            raise SandboxError(f"the box could not be set up: {_text(b' '.join(fields[1:]))}")
        return fields

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._channel.send(view) :]
            except BlockingIOError:
                self._ready(select.POLLOUT, deadline)

    def _take(self, size: int, deadline: float) -> bytes:
        parts, missing = [], size
        while missing:
            try:
                part = self._channel.recv(min(missing, 1 << 20))
            except BlockingIOError:
                self._ready(select.POLLIN, deadline)
                continue
            if not part:
                raise frames.Broken("its channel was closed")
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _ready(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._channel, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise frames.Broken("it did not answer in time")


SHELL = "/bin/sh"


def _result(fields: list[bytes]) -> Result:
    if fields[0] == b"refused" and len(fields) == 2:
        raise WorkspaceError(f"cwd: {_text(fields[1])}")
    if fields[0] != b"ran" or len(fields) != 8:
        raise SandboxError("the box's agent answers nonsense")
    _, code, late, cut, limit, wall, out, err = fields
    try:
        seconds = float(wall)
    except ValueError:
        raise SandboxError("the box's agent answers nonsense") from None
    return Result(
        exit_code=_int(code), stdout=out, stderr=err, timed_out=late == b"1", truncated=cut == b"1",
        limit=_text(limit) or None, wall_s=seconds,
    )  # fmt: skip


def _int(data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        raise SandboxError("the box's agent answers nonsense") from None


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
