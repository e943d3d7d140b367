"""The default back end: namespaces, an overlay, seccomp; no system package, root or not.

One keeper process per process and view (see boxed/keeper.py); boxes are its forks. Layers (the files a box starts
from, and frozen states) are kept in the keeper and shared by the boxes, so the members of a group share theirs.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import astuple
from hashlib import sha256
from typing import Any

from .client import Box
from .link import Link, first_uid
from .view import View
from .words import Frozen, Limits, Sandbox, SandboxError, WorkspaceError

DEEPEST = 20  # layers; then a frozen state is written out as one
KEPT_BASES = 8  # starting states that stay in the keeper though no box uses them
NOBODY = 65534
OLDEST = (5, 14)


class Keeper(Link):
    """The keeper, and which of its layers are in use."""

    def __init__(self, view: View, label: str, *, overlay: bool = True) -> None:
        uid = os.getuid() or first_uid() or NOBODY
        super().__init__("keeper", label, uid, int(overlay), len(view.visible), *view.visible, *view.hidden)
        self.overlay = self.hello == [b"1"]
        self.names = itertools.count(1)
        self._bases: dict[str, int] = {}  # hash of an archive -> layer
        self._users: dict[int, int] = {}  # layer -> boxes and frozen states that stand on it

    def base(self, archive: bytes) -> tuple[int, ...]:
        """The layer with an archive's entries, made if it is not there; held."""
        key = sha256(archive).hexdigest()
        with self._lock:
            if key not in self._bases:
                spare = [each for each, layer in self._bases.items() if layer not in self._users]
                for each in spare[: max(0, len(spare) - KEPT_BASES + 1)]:
                    self.ask("drop", self._bases.pop(each))
                layer = next(self.names)
                try:
                    self.ask("layer", layer, archive)
                except (WorkspaceError, SandboxError):
                    self.spare.append(("drop", layer))
                    raise
                self._bases[key] = layer
            return self.hold((self._bases[key],))

    def hold(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Counts one more that stands on these layers."""
        with self._lock:
            for layer in layers:
                self._users[layer] = self._users.get(layer, 0) + 1
        return layers

    def let_go(self, layers: tuple[int, ...]) -> None:
        """Counts one less. A frozen layer that nothing stands on is dropped with the next request: finalizers call."""
        with self._lock:
            for layer in layers:
                self._users[layer] -= 1
                if not self._users[layer]:
                    del self._users[layer]
                    if layer not in self._bases.values():
                        self.spare.append(("drop", layer))


class NamespaceBox(Box):
    """A fork of the keeper; it takes over a hold on its layers."""

    def __init__(self, keeper: Keeper, layers: tuple[int, ...], limits: Limits) -> None:
        self._keeper, self._layers, self._name = keeper, layers, next(keeper.names)
        ours, theirs = socket.socketpair()
        super().__init__("namespaces", limits, ours)
        try:
            with theirs:
                keeper.ask("open", self._name, *astuple(limits)[1:], *layers, channel=theirs)
        except BaseException:
            self.close()
            raise

    def _end(self, *, final: bool) -> None:
        if self._keeper.alive():
            if final:
                self._keeper.spare.append(("kill", self._name))
            else:
                self._keeper.ask("kill", self._name)
        self._keeper.let_go(self._layers)

    def freeze(self) -> Frozen:
        """Sandbox.freeze: a copy of what changed, in the keeper's memory."""
        with self._lock:
            self._check_open()
            if not self._keeper.overlay:
                layers = (self._copied(),)
            elif len(self._layers) >= DEEPEST:
                layers = self._keeper.base(self.archive())
                return Frozen(backend=self.backend, layers=layers, free=_letting_go(self._keeper, layers))
            else:
                layers = (*self._layers, self._copied())
            self._keeper.hold(layers)
            return Frozen(backend=self.backend, layers=layers, free=_letting_go(self._keeper, layers))

    def _copied(self) -> int:
        layer = next(self._keeper.names)
        try:
            self._keeper.ask("freeze", self._name, layer, self.limits.disk_bytes)
        except (WorkspaceError, SandboxError):
            self._keeper.spare.append(("drop", layer))
            raise
        return layer

    def _sibling(self, frozen: Frozen) -> Sandbox:
        layers: Any = frozen.layers
        if frozen.free is None:
            raise ValueError("the frozen state was released")
        return NamespaceBox(self._keeper, self._keeper.hold(layers), self.limits)


def _letting_go(keeper: Keeper, layers: tuple[int, ...]) -> Callable[[], None]:
    return lambda: keeper.let_go(layers)


_keepers: dict[tuple[View, str], Keeper] = {}
_guard = threading.Lock()


def keeper_of(view: View, label: str) -> Keeper:
    """This process's keeper for a view and a label, started if it is not there."""
    with _guard:
        found = _keepers.get((view, label))
        if found is None or not found.alive():
            found = _keepers[view, label] = Keeper(view, label)
        return found


def open_box(archive: bytes, limits: Limits, view: View, label: str) -> Sandbox:
    """A box whose workspace holds an archive's entries."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    if release < OLDEST:
        raise SandboxError(f"Linux {release[0]}.{release[1]} counts processes for a user, not for a box: 5.14 does")
    keeper = keeper_of(view, label)
    return NamespaceBox(keeper, keeper.base(archive), limits)


@atexit.register
def end_all() -> None:
    """Ends all keepers of this process, and with them all boxes."""
    with _guard:
        for each in _keepers.values():
            each.end()
        _keepers.clear()


def _free_guard() -> None:
    """In a fork of this process, which copies a lock that another thread may hold."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_free_guard)
