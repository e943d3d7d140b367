"""Ctrl-C and SIGTERM stop a run between two of its moves, never inside a library that cannot bear it.

Python raises KeyboardInterrupt at whatever line it is at. Inside a checkpoint that leaves a half-started save, whose
threads then wait for each other for ever; inside a socket's birth it leaves the socket to the garbage collector.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_MORE = b"\nagentrl: stopping at the next safe point; Ctrl-C again stops at once\n"


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interrupts:
    """While open, a first SIGINT or SIGTERM is kept for the next `check`, which raises it; a second raises at once.

        with Interrupts() as interrupts:
            while work():
                interrupts.check()

    A signal that the process was started to ignore stays ignored, and so does one that something else handles. Outside
    the main thread, where Python allows no handler, `check` never raises.
    """

    def __init__(self) -> None:
        self._noted: int | None = None
        self._passed_on: int | None = None
        self.also: Callable[[], None] | None = None  # asked at every check, for what else may end the run
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def noted(self) -> int | None:
        """The signal that came since the run began, to this process or to another one of the run."""
        return self._passed_on if self._noted is None else self._noted

    def pass_on(self, number: int) -> None:
        """Take note of a signal that another process of the run was sent."""
        self._passed_on = number

    def check(self) -> None:
        """Raises `Interrupted` where a signal came since the run began."""
        if self.noted is not None:
            raise Interrupted(self.noted)
        if self.also is not None:
            self.also()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._noted is not None:
            raise Interrupted(number)
        self._noted = number
        if number == signal.SIGINT and sys.stderr.isatty():  # a write of its own: the console may hold its lock here
            os.write(sys.stderr.fileno(), _ONE_MORE)
