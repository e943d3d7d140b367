"""The default back end: namespaces, an overlay, seccomp; no system package, root or not.

One keeper process per process and view (see boxed/keeper.py); boxes are its forks. Layers (the files a box starts
from, and frozen states) are kept in the keeper and shared by the boxes, so the members of a group share theirs.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

from .client import Box
from .boxed import frames
from .words import Frozen, Limits, Sandbox, SandboxError, WorkspaceError
from .view import View

DEEPEST = 20  # layers; then a frozen state is written out as one
KEPT_BASES = 8  # starting states that stay in the keeper though no box uses them
_START = "import sys,os;sys.path.append(os.read(0,4096).rstrip(b' ').decode());import boxed.keeper as k;k.main()"
_SOURCE = Path(__file__).resolve().parent
_SIZES = ("memory_bytes", "processes", "disk_bytes", "files", "open_files", "output_bytes")


def host_uid() -> int:
    """The unprivileged uid of the host that boxes of this process get: one of its own where there is a choice."""
    if os.getuid():
        return os.getuid()
    first, _, count = (int(part) for part in Path("/proc/self/uid_map").read_text().split()[-3:])
    wanted = (1 << 30) + os.getpid()
    return wanted if first <= wanted < first + count else min(65534, first + count - 1)


class Keeper:
    """The connection to one keeper process."""

    def __init__(self, view: View, overlay: bool, label: str) -> None:
        self.overlay, self.label, self.owner = overlay, label, os.getpid()
        self.names = itertools.count(1)
        self.bases: dict[str, int] = {}  # hash of an archive -> layer
        self.users: dict[int, int] = {}  # layer -> boxes and frozen states that stand on it
        self._lock = threading.RLock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self.process = _spawn(theirs, label)
        self._control.settimeout(30)
        try:
            self._control.sendall(str(_SOURCE).encode().ljust(4096))
            visible, hidden = view.visible, view.hidden
            setup = (os.getpid(), host_uid(), int(overlay), len(visible), *visible, *hidden)
            self.ask(*setup)
        except SandboxError:
            self.end()
            raise

    def ask(self, *request: object, channel: socket.socket | None = None) -> list[bytes]:
        """A request's answer."""
        with self._lock:
            try:
                data = frames.frame(*request)
                if channel is None:
                    self._control.sendall(data)
                else:
                    socket.send_fds(self._control, [data[:4]], [channel.fileno()])
                    self._control.sendall(data[4:])
                fields = frames.unpack(self._take(frames.size_of(self._take(4))))
            except (OSError, frames.Broken) as error:
                raise SandboxError(f"the keeper of the boxes is gone: {error}") from None
        if fields[0] == b"refused":
            raise WorkspaceError(fields[1].decode(errors="replace"))
        if fields[0] != b"ok":
            raise SandboxError(fields[-1].decode(errors="replace"))
        return fields[1:]

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            parts.append(self._control.recv(min(size, 1 << 20)))
            size -= len(parts[-1])
            if not parts[-1]:
                raise frames.Broken("its channel was closed")
        return b"".join(parts)

    def base(self, archive: bytes) -> int:
        """The layer with an archive's entries, made if it is not there."""
        with self._lock:
            key = sha256(archive).hexdigest()
            if key not in self.bases:
                spare = [each for each, layer in self.bases.items() if not self.users.get(layer)]
                for each in spare[: max(0, len(self.bases) - KEPT_BASES + 1)]:
                    self.ask("drop", self.bases.pop(each))
                layer = next(self.names)
                try:
                    self.ask("layer", layer, archive)
                except WorkspaceError:
                    self.ask("drop", layer)
                    raise
                self.bases[key] = layer
            return self.bases[key]

    def hold(self, layers: tuple[int, ...]) -> None:
        """Counts one more that stands on these layers."""
        with self._lock:
            for layer in layers:
                self.users[layer] = self.users.get(layer, 0) + 1

    def let_go(self, layers: tuple[int, ...]) -> None:
        """Counts one less; a frozen layer that nothing stands on is dropped."""
        with self._lock:
            for layer in layers:
                self.users[layer] -= 1
                if not self.users[layer]:
                    del self.users[layer]
                    if layer not in self.bases.values() and self.alive():
                        self.ask("drop", layer)

    def alive(self) -> bool:
        """Of this process, and running."""
        return self.owner == os.getpid() and self.process.poll() is None

    def end(self) -> None:
        """Ends the keeper and every box."""
        if self.owner != os.getpid():
            return
        self._control.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def _spawn(control: socket.socket, label: str) -> subprocess.Popen[bytes]:
    """A bare interpreter in an empty environment: what it holds, boxes might come to see."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    executable = getattr(sys, "_base_executable", None) or sys.executable
    return subprocess.Popen(
        [executable, "-I", "-S", "-B", "-c", _START, label], stdin=control, stdout=subprocess.DEVNULL,
        stderr=None if "AGENTRL_DEBUG" in os.environ else subprocess.DEVNULL, env=kept, cwd="/", start_new_session=True,
    )  # fmt: skip


class NamespaceBox(Box):
    """A fork of the keeper."""

    def __init__(self, keeper: Keeper, layers: tuple[int, ...], limits: Limits) -> None:
        self._keeper, self._layers, self._name = keeper, layers, next(keeper.names)
        ours, theirs = socket.socketpair()
        keeper.hold(layers)
        try:
            with theirs:
                sizes = [getattr(limits, name) for name in _SIZES]
                keeper.ask("open", self._name, *sizes, *layers, channel=theirs)
        except BaseException:
            ours.close()
            keeper.let_go(layers)
            raise
        super().__init__("namespaces", limits, ours, self._kill)

    def _kill(self) -> None:
        if self._keeper.alive():
            self._keeper.ask("kill", self._name)
        self._keeper.let_go(self._layers)

    def freeze(self) -> Frozen:
        """Sandbox.freeze: a copy of what changed, in the keeper's memory."""
        with self._lock:
            self._check_open()
            if self._keeper.overlay and len(self._layers) < DEEPEST:
                layer = next(self._keeper.names)
                changed = int(self._keeper.ask("freeze", self._name, layer)[0])
                if changed:
                    layers = (*self._layers, layer)
                else:
                    self._keeper.ask("drop", layer)
                    layers = self._layers
            elif self._keeper.overlay:
                layers = (self._keeper.base(self.archive()),)
            else:
                layers = (next(self._keeper.names),)
                self._keeper.ask("freeze", self._name, layers[0])
            self._keeper.hold(layers)
            free = _release(self._keeper, layers)
            return Frozen(backend=self.backend, layers=layers, limits=self.limits, free=free)

    def _sibling(self, frozen: Frozen) -> Sandbox:
        layers: Any = frozen.layers
        if frozen.free is None:
            raise ValueError("the frozen state was released")
        return NamespaceBox(self._keeper, layers, self.limits)


def _release(keeper: Keeper, layers: tuple[int, ...]):
    return lambda: keeper.let_go(layers)


_keepers: dict[tuple[object, ...], Keeper] = {}
_guard = threading.Lock()


def keeper(view: View, label: str) -> Keeper:
    """This process's keeper for a view and a label, started if it is not there."""
    with _guard:
        found = _keepers.get((view, label))
        if found is None or not found.alive():
            found = _keepers[view, label] = Keeper(view, True, label)
        return found


def open_box(archive: bytes, limits: Limits, view: View, label: str) -> Sandbox:
    """A box whose workspace holds an archive's entries."""
    kept = keeper(view, label)
    return NamespaceBox(kept, (kept.base(archive),), limits)


@atexit.register
def end_all() -> None:
    """Ends all keepers of this process, and with them all boxes."""
    with _guard:
        for each in _keepers.values():
            each.end()
        _keepers.clear()
