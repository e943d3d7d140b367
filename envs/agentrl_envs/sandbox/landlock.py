"""Where namespaces are refused: Landlock, seccomp, resource limits, and a warden that watches and reaps.

`unsafe` is the same without Landlock and seccomp: commands run with all the rights of the user.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from .client import Box
from .link import Link, first_uid
from .owners import mark
from .view import View
from .words import HOME, Command, Frozen, Limits, Result, Sandbox

_AT_HOME = re.compile(rf"(?<![\w.-]){HOME}(?![\w.-])")


class Warden(Link):
    """The warden, and the directory that its boxes live in."""

    def __init__(self, view: View, label: str, *, safe: bool) -> None:
        self.names = itertools.count(1)
        self.place = tempfile.mkdtemp(prefix=f"agentrl-{os.getpid()}-")
        os.chmod(self.place, 0o711)
        paths = (len(view.visible), *view.visible, *view.hidden)
        super().__init__("warden", label, first_uid(), self.place, mark(label), int(safe), *paths)

    def end(self) -> None:
        """Ends it and every box, and removes their directories."""
        super().end()
        if self.owner == os.getpid():
            shutil.rmtree(self.place, ignore_errors=True)


class WardenBox(Box):
    """A directory of its own, called /workspace in commands and in what they print."""

    def __init__(self, warden: Warden, backend: str, archive: bytes, limits: Limits) -> None:
        self._warden, self._name = warden, next(warden.names)
        self._home = f"{warden.place}/{self._name}/workspace"
        ours, theirs = socket.socketpair()
        super().__init__(backend, limits, ours)
        try:
            with theirs:
                warden.ask("open", self._name, *astuple(limits)[1:], channel=theirs)
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
        """Sandbox.run, with the workspace's name put in and taken out again."""
        argv: Any = self._inward(command) if isinstance(command, str) else [self._inward(each) for each in command]
        variables = {name: self._inward(value) for name, value in (env or {}).items()}
        result = super().run(argv, stdin=stdin, timeout_s=timeout_s, cwd=cwd, env=variables)
        return Result(
            exit_code=result.exit_code, stdout=self._outward(result.stdout), stderr=self._outward(result.stderr),
            timed_out=result.timed_out, truncated=result.truncated, limit=result.limit, ended=result.ended,
            wall_s=result.wall_s,
        )  # fmt: skip

    def _inward(self, text: str) -> str:
        return _AT_HOME.sub(self._home, text)

    def _outward(self, data: bytes) -> bytes:
        return data.replace(self._home.encode(), HOME.encode())

    def _end(self, *, final: bool) -> None:
        if self._warden.alive():
            if final:
                self._warden.spare.append(("kill", self._name))
            else:
                self._warden.ask("kill", self._name)

    def _sibling(self, frozen: Frozen) -> Sandbox:
        archive: Any = frozen.layers[0]
        return WardenBox(self._warden, self.backend, archive, self.limits)


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
