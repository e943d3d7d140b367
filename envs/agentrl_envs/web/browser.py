"""One Chromium per process, spoken to by a thread of its own; a context of it per episode.

The thread keeps Playwright's synchronous interface away from any event loop of the caller and lets a call have a
deadline. The driver and Chromium hang on pipes to this process and end with it, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import queue
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
BOOT_S, CALL_S, CLOSE_S = 60.0, 30.0, 10.0
IDLE_S = 0.05  # without a call for so long, there is time to make ready what the next episode will ask for
LABEL = "--agentrl-run="


class BrowserError(RuntimeError):
    """The browser died, hung or could not be started: the environment's failure, never the policy's."""


def missing(miniwob: bool = False) -> str | None:
    """What this machine lacks, with the command that installs it, or None."""
    if executable() is None:
        return "chromium is not installed: apt-get install -y --no-install-recommends chromium"
    for package in ("playwright", *(("miniwob",) if miniwob else ())):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed: pip install -e '.[web]'"
    return None


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running Chromium. `do(function)` runs `function(playwright's browser)` on the thread that owns it."""

    def __init__(self) -> None:
        if lack := missing():
            raise BrowserError(lack)
        self.owner = os.getpid()
        self.label = f"{LABEL}{os.environ.get('AGENTRL_RUN_LABEL', 'local')}-{self.owner}"
        self.broken = False
        self._ahead: Callable[[Any], Any] | None = None
        self._ready: Any = None
        reap()
        self._work: queue.SimpleQueue[tuple[Callable[[Any], Any], Future] | None] = queue.SimpleQueue()
        ready: Future = Future()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="chromium", daemon=True)
        self._thread.start()
        self._await(ready, BOOT_S)

    def do(self, function: Callable[[Any], T]) -> T:
        """Raises BrowserError whatever goes wrong; afterwards this browser is `broken` and not used again."""
        if self.broken:
            raise BrowserError("the browser is gone; the next reset starts another")
        answer: Future = Future()
        self._work.put((function, answer))
        return self._await(answer, CALL_S)

    def take(self, make: Callable[[Any], T], chromium: Any) -> T:
        """What `make` gives, on the browser's thread: made ahead where there was time for it, never given twice. From
        now on one is made ahead whenever nothing is asked for."""
        ready, self._ready = self._ready, None
        self._ahead = make
        return make(chromium) if ready is None else ready

    def pids(self) -> list[int]:
        """Chromium's main process, by this browser's label; the others end with it."""
        return [pid for pid, label in labelled() if label == self.label]

    def close(self) -> None:
        """Ends Chromium and the thread; what does not end in time is killed."""
        self.broken = True
        if os.getpid() != self.owner:
            return
        self._work.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.kill()

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _await(self, answer: Future, limit_s: float) -> Any:
        try:
            return answer.result(limit_s)
        except TimeoutError:
            self.broken = True
            self.kill()
            raise BrowserError(f"the browser did not answer within {limit_s:g} s and was killed") from None
        except Exception as error:
            self.broken = True
            self.kill()
            said = str(error).partition("\n")[0] or type(error).__name__
            raise BrowserError(f"the browser failed: {said[:200]}") from error

    def _serve(self, ready: Future) -> None:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports] (an extra)

        try:
            # Chromium leaves its socket's folder behind where it is told to end: this one goes with it.
            with (
                tempfile.TemporaryDirectory(prefix="web-", ignore_cleanup_errors=True) as own,
                sync_playwright() as playwright,
            ):
                chromium = playwright.chromium.launch(
                    executable_path=executable(),
                    args=[*FLAGS, self.label],
                    env={**os.environ, "TMPDIR": own},
                    timeout=BOOT_S * 1e3,
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                )
                ready.set_result(None)
                while (item := self._next(chromium)) is not None:
                    function, answer = item
                    try:
                        answer.set_result(function(chromium))
                    except BaseException as error:
                        answer.set_exception(error)
                with contextlib.suppress(Exception):  # it may be dead already
                    chromium.close()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def _next(self, chromium: Any) -> tuple[Callable[[Any], Any], Future] | None:
        """The next call; where none comes soon, something is made ahead of it."""
        if self._ahead is not None and self._ready is None:
            try:
                return self._work.get(timeout=IDLE_S)
            except queue.Empty:
                try:
                    self._ready = self._ahead(chromium)
                except Exception:  # the browser died: the next call finds that out, and says so
                    self._ahead = None
        return self._work.get()


def labelled() -> list[tuple[int, str]]:
    """Every Chromium of ours on this machine: its process id and its label."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            for part in entry.read_bytes().split(b"\0"):
                if part.startswith(LABEL.encode()):
                    found.append((int(entry.parent.name), part.decode(errors="replace")))
    return found


def reap() -> list[int]:
    """Kills browsers whose driver is gone: none should be left, whatever happened to their owner."""
    left = [pid for pid, _ in labelled() if not _driven(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return left


def _driven(pid: int) -> bool:
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return b"playwright" in Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:  # it ended while we looked
        return True


_current: Browser | None = None
_lock = threading.Lock()


def browser() -> Browser:
    """This process's browser; a new one when there is none or it broke. A fork starts with none."""
    global _current
    with _lock:
        if _current is not None and not _current.broken:
            return _current
        if _current is not None:
            _current.close()
        _current = Browser()
        return _current


def _forget() -> None:
    """In a fork, the parent's browser is none of ours, and its lock may be held by nobody."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def shutdown() -> None:
    """Ends this process's browser, if there is one."""
    global _current
    with _lock:
        chosen, _current = _current, None
    if chosen is not None:
        chosen.close()
