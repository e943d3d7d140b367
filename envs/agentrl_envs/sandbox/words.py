"""The words of a sandbox: limits, a command's result, the files of a workspace, a frozen state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

HOME = "/workspace"  # where the workspace is, seen from inside
Command = str | Sequence[str]


class SandboxError(RuntimeError):
    """The sandbox broke, or this machine has none: never the doing of what ran inside."""


class WorkspaceError(ValueError):
    """What was asked of the workspace cannot be had: no such file, a link that leads out, a tree that is too deep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a box may use. Disk is the workspace, /tmp and /dev/shm together; on back ends that keep these in memory,
    a box may take `memory_bytes + disk_bytes`."""

    time_s: float = 30.0  # a command, unless run() says otherwise
    memory_bytes: int = 1 << 30  # all processes of the box together
    processes: int = 64  # processes and threads, all commands together
    disk_bytes: int = 256 << 20
    files: int = 20_000
    open_files: int = 512  # of one process
    output_bytes: int = 1 << 20  # standard output and standard error, each; the middle of what is longer is cut

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) <= 0:
                raise ValueError(f"Limits({each.name}={getattr(self, each.name)}): expected a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended. Whatever the command did to the box is in here, not an exception."""

    exit_code: int  # minus the signal's number where one ended it
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False  # output was cut
    limit: str | None = None  # what ended it: time, memory, processes, disk
    ended: bool = False  # the whole box ended with it: nothing runs in it any more
    wall_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Ran to its end with exit code 0."""
        return self.exit_code == 0 and self.limit is None


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """An entry of a workspace; `path` is relative to it."""

    path: str
    kind: str  # file, directory, link, fifo
    size: int = 0
    mode: int = 0o644
    target: str = ""  # of a link


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of a box, seen from outside it."""

    pid: int  # the number it has inside
    argv: tuple[str, ...]


@dataclass(slots=True)
class Frozen:
    """A state of a workspace that boxes of this process can be forked from. For bytes that last, see `archive`."""

    backend: str
    layers: tuple[object, ...]
    free: Callable[[], None] | None = None

    def release(self) -> None:
        """Gives its memory back; boxes that were forked from it live on."""
        free, self.free = self.free, None
        if free is not None:
            free()

    def __del__(self) -> None:
        self.release()


class Sandbox(Protocol):
    """A box: a workspace, commands that run in it, and nothing else of the machine.

    A command that misbehaves yields a `Result`; `SandboxError` means that the sandbox itself broke. Paths are
    relative to the workspace (or begin with /workspace). One caller at a time: a second thread waits.
    """

    @property
    def backend(self) -> str:
        """namespaces, landlock, docker or unsafe."""
        ...

    @property
    def limits(self) -> Limits: ...

    def run(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Runs an argument vector, or a line for the shell.

        Processes that it leaves behind live until the box closes; when a limit on time, memory or disk is met, every
        process of the box is killed. `env` adds to the box's small constant environment.
        """
        ...

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """A regular file's bytes (at most `limit`), without following a link out of the workspace: WorkspaceError."""
        ...

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file, making its directories; never through a link that leads out of the workspace."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file, a link, or a directory with all in it."""
        ...

    def files(self) -> tuple[File, ...]:
        """All entries of the workspace, sorted by path."""
        ...

    def archive(self) -> bytes:
        """The workspace as a tar: equal bytes iff equal names, kinds, modes and contents; without times and owners."""
        ...

    def digest(self) -> str:
        """SHA-256 of `archive()`, the hash of the state."""
        ...

    def extract(self, archive: bytes) -> None:
        """Makes the workspace what the archive holds; processes are killed first."""
        ...

    def freeze(self) -> Frozen:
        """The workspace as it is now, to fork from. Processes are no part of it."""
        ...

    def fork(self, frozen: Frozen) -> Sandbox:
        """A new box, with this one's limits and label, whose workspace is the frozen one."""
        ...

    def processes(self) -> tuple[Process, ...]:
        """What commands left running."""
        ...

    def kill(self) -> None:
        """Ends every process of the box; the workspace stays."""
        ...

    def close(self) -> None:
        """Ends the box and all that is in it. Idempotent; safe after a crash."""
        ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *exc: object) -> None: ...
