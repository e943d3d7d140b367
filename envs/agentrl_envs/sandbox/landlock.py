"""Where namespaces are refused: Landlock, seccomp, resource limits, and a warden that watches and reaps.

`unsafe` is the same without Landlock and seccomp: commands run with all the rights of the user.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from functools import cache
from typing import Any

from .boxed import tar
from .client import Box
from .link import Link, first_uid
from .owners import remove_place, sealed_mark
from .view import View
from .words import Command, File, Frozen, Limits, Process, Result, Sandbox


class Warden(Link):
    """The warden, and the directory that its boxes live in."""

    def __init__(self, view: View, label: str, *, safe: bool) -> None:
        self.names = itertools.count(1)
        self.place = tempfile.mkdtemp(prefix=f"agentrl-{os.getpid()}-")
        os.chmod(self.place, 0o711)
        paths = (len(view.visible), *view.visible, *view.hidden)
        try:
            super().__init__("warden", label, first_uid(), self.place, sealed_mark(label), int(safe), *paths)
        except BaseException:
            remove_place(self.place)
            raise

    def end(self) -> None:
        """Ends it and every box, and removes their directories."""
        super().end()
        if self.owner == os.getpid():
            remove_place(self.place)


class WardenBox(Box):
    """Two directories of its own, called /workspace and /tmp/local wherever they can be seen from outside.

    No mount can give a directory a second name here. So what is another one in every box - the two paths, the uid, the
    mark - has one length, and a name of that length is written in its place: in commands and files on their way in, in
    outputs, files and archives on their way out. No byte moves, and no count of bytes differs from run to run; only a
    hash taken inside of a text that holds such a name would.
    """

    def __init__(self, warden: Warden, backend: str, archive: bytes, limits: Limits) -> None:
        self._warden, self._name = warden, next(warden.names)
        self._names: list[tuple[bytes, bytes]] = []
        ours, theirs = socket.socketpair()
        super().__init__(backend, limits, ours)
        try:
            with theirs:
                told = warden.ask("open", self._name, *astuple(limits)[1:], channel=theirs)
            self._names = list(zip(told[::2], told[1::2], strict=True))
            self.extract(archive)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
    ) -> Result:
        """Sandbox.run. What it prints is renamed where it is read, before it is cut to its limit."""
        argv: Any = self._said(command) if isinstance(command, str) else [self._said(each) for each in command]
        variables = {name: self._said(value) for name, value in (env or {}).items()}
        return super().run(argv, stdin=self._inward(stdin), timeout_s=timeout_s, cwd=cwd, env=variables)

    def read(self, path: str, *, limit: int | None = None) -> bytes:
        """Sandbox.read."""
        if limit is None:
            return self._outward(super().read(path))
        longest = max(len(real) for real, _ in self._names)
        return self._outward(super().read(path, limit=limit + longest - 1))[:limit]

    def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Sandbox.write."""
        super().write(path, self._inward(data), mode=mode)

    def files(self) -> tuple[File, ...]:
        """Sandbox.files."""
        return tuple(replace(each, target=self._seen(each.target)) for each in super().files())

    def processes(self) -> tuple[Process, ...]:
        """Sandbox.processes."""
        found = super().processes()
        return tuple(replace(each, argv=tuple(self._seen(part) for part in each.argv)) for each in found)

    def archive(self) -> bytes:
        """Sandbox.archive."""
        return _changed(super().archive(), self._outward)

    def extract(self, archive: bytes) -> None:
        """Sandbox.extract."""
        super().extract(_changed(archive, self._inward))

    def _inward(self, data: bytes) -> bytes:
        for real, shown in self._names:
            if shown in data:  # a search for the pattern alone is slow in a large archive
                data = _whole(shown).sub(real, data)
        return data

    def _outward(self, data: bytes) -> bytes:
        for real, shown in self._names:
            data = data.replace(real, shown)
        return data

    def _said(self, text: str) -> str:
        return self._inward(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def _seen(self, text: str) -> str:
        return self._outward(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def _end(self, *, final: bool) -> None:
        if self._warden.alive():
            if final:
                self._warden.spare.append(("kill", self._name))
            else:
                self._warden.ask("kill", self._name)

    def _sibling(self, frozen: Frozen) -> Sandbox:
        archive: Any = frozen.layers[0]
        return WardenBox(self._warden, self.backend, archive, self.limits)


@cache
def _whole(shown: bytes) -> re.Pattern[bytes]:
    """The name where it stands by itself, not within a longer one."""
    return re.compile(rb"(?<![\w.-])" + re.escape(shown) + rb"(?![\w.-])")


def _changed(archive: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The archive, what its files hold and its links lead to being changed; its own bytes where nothing is."""
    if change(archive) == archive:
        return archive
    try:
        return tar.pack((name, kind, mode, change(data)) for name, kind, mode, data in tar.unpack(archive))
    except tar.Malformed:  # the agent says so
        return archive


_wardens: dict[tuple[View, str, bool], Warden] = {}
_guard = threading.Lock()


def open_box(archive: bytes, limits: Limits, view: View, label: str, *, safe: bool = True) -> Sandbox:
    """A box whose workspace holds an archive's entries."""
    with _guard:
        warden = _wardens.get((view, label, safe))
        if warden is None or not warden.alive():
            warden = _wardens[view, label, safe] = Warden(view, label, safe=safe)
    return WardenBox(warden, "landlock" if safe else "unsafe", archive, limits)


@atexit.register
def end_all() -> None:
    """Ends all wardens of this process, and with them all boxes."""
    with _guard:
        for each in _wardens.values():
            each.end()
        _wardens.clear()


def _free_guard() -> None:
    """In a fork of this process, which copies a lock that another thread may hold."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_free_guard)
