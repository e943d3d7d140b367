"""Several processes train one run: they meet, tell each other small things, and end together.

All that passes here is small JSON through the key-value store of JAX's coordination service, which process 0 holds.
A meeting (`Hosts.exchange`) is also a barrier: it returns when every process has come to it. Nobody waits for ever: a
thread of each process writes a sign of life with the phase that its process is in, and reads those of the others; who
hangs, is gone or has ended is named in one line, and all end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
from jax._src import distributed  # the client has no public name; multihost_utils and Orbax take it from here, too

from agentrl_jax.errors import UserError
from agentrl_jax.runtime.interrupts import Interrupted, Interrupts

FAILED = 2  # exit code
_WAITING = "waiting for the others"
_TOGETHER = ("publish", "update", "sft", "checkpoint")  # phases whose device programs need every process
_SLICE_MS = 250  # how long one look for a value lasts
_PIECE = 1 << 18  # bytes put under one key: a look has to last for one of them, however much a process has to say
_LAST_S = 30.0  # how long process 0 waits for the others to go
_STILL_S = 5.0  # how long for one that gives no sign of life
_COME_OUT_S = 5.0  # for a process that is long at something to learn that the run ends
_GRACE_S = 20.0  # for closing what is open, once it is known that the run ends
_NEVER_S = 10**7  # JAX ends a process without a word where another one is silent for so long; we do it with one


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, *, wait_s: float = 300
) -> Hosts:
    """Make the processes that call this one program; without arguments a TPU slice, GKE or Slurm says which they are.

    To be called before anything wakes a backend. On CPU they meet over gloo. Raises `UserError` where they do not find
    each other within `wait_s` seconds.
    """
    config: Any = jax.config
    if (config.jax_platforms or "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which is ours to answer
    who = "this process" if process is None else f"process {process} of {processes}"
    try:
        with _named_if_late(f"{who}: the processes did not find each other within {wait_s:g} s", wait_s):
            jax.distributed.initialize(
                coordinator, processes, process, heartbeat_timeout_seconds=_NEVER_S,
                initialization_timeout=int(wait_s) + 60,
            )  # fmt: skip
            jax.devices()  # the processes tell each other what they have: all at once, or none gets on
    except (RuntimeError, ValueError) as error:
        said = f"{who}: the processes did not find each other: {' '.join(str(error).split()).rstrip('.')}"
        hint = "give --coordinator HOST:PORT --processes N --process I in place of --multihost"
        raise UserError(said if coordinator is not None else f"{said}; {hint}, or neither on one host") from error
    return Hosts()


class Hosts:
    """The processes of a run, seen from this one: `index` of `count`. Alone, it does nothing and costs nothing.

        with Hosts() as hosts:
            everyones = hosts.exchange({"rows": 3})  # in the order of the processes

    `timeout_s`: how long one waits for another at a meeting, or a phase that needs all of them may last. `lost_s`: how
    long a process may give no sign of life.
    """

    def __init__(self, *, timeout_s: float = 1800.0, lost_s: float = 60.0) -> None:
        self.timeout_s, self.lost_s = timeout_s, lost_s
        self.index, self.count = (jax.process_index(), jax.process_count()) if joined() else (0, 1)
        self.stopped = False  # the processes have agreed to stop for a signal
        self._client: Any = distributed.global_state.client if self.count > 1 else None
        self._meeting = 0
        self._waiting: float | None = None  # since when, at a meeting
        self._interrupts: Interrupts | None = None
        began = time.monotonic()
        self._phase: Callable[[], tuple[str, float]] = lambda: ("start", time.monotonic() - began)
        self._ended: str | None = None
        self._trouble: str | None = None
        self._raised = False  # its own thread ends this process, and says why
        self._ending = False  # the thread here does
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}  # sign of life of each process, and when it changed
        self._left, self._lock, self._beats = threading.Event(), threading.Lock(), 0
        self._words: subprocess.Popen[bytes] | None = None
        if self._client is not None:
            self._begin()

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes what there is once a run."""
        return self.index == 0

    def share(self, count: int) -> range:
        """Which of `count` things are this process's: a stretch of them, as long as anyone's give or take one."""
        return range(self.index * count // self.count, (self.index + 1) * count // self.count)

    def watch(self, phase: Callable[[], tuple[str, float]], interrupts: Interrupts | None = None) -> None:
        """Where to look for what this process is doing, and since how many seconds; and for signals it was sent.

        From then on `interrupts.check` raises as `check` does.
        """
        self._phase, self._interrupts = phase, interrupts
        if interrupts is not None and self._client is not None:
            interrupts.also = self.check

    # -- meetings ----------------------------------------------------------------------------------------------

    def exchange(self, value: Any) -> list[Any]:
        """What every process gave to this meeting (JSON), in their order. All have to come, in the same sequence.

        Raises `Interrupted` in all of them where one was told to stop, and `UserError` that names the process that did
        not come, and the phase that it is in.
        """
        return self._meet(value, everyone=True)

    def gather(self, value: Any) -> list[Any] | None:
        """`exchange` whose values travel to process 0 alone, where they are many; None in the others."""
        found = self._meet(value, everyone=False)
        return found if self.leads else None

    def _meet(self, value: Any, *, everyone: bool) -> list[Any]:
        if self._client is None:
            return [value]
        number, self._meeting = self._meeting, self._meeting + 1
        stop = None if self._interrupts is None else self._interrupts.noted
        self._put(f"{number}/{self.index}", [stop, value])
        self._waiting = time.monotonic()
        try:
            if self.leads:
                found = [self._get(f"{number}/{k}", k) for k in range(self.count)]
                self._put(f"{number}/all", found if everyone else [(stop, None) for stop, _ in found])
            else:
                found = self._get(f"{number}/all", None)
        finally:
            self._waiting = None
        if number > 1:  # everybody has read the last but one, or would not have come to the last
            self._client.key_value_delete(f"agentrl/{number - 2}/{self.index}")
            if self.leads:
                self._client.key_value_delete(f"agentrl/{number - 2}/all")
        stops = [stop for stop, _ in found if stop is not None]
        if stops and not self.stopped:
            self.stopped = True
            raise Interrupted(stops[0])
        return [value for _, value in found]

    def check(self) -> None:
        """Raises `UserError` where another process is gone: to be asked by whoever is long at something."""
        if self._trouble is not None and not self._raised:
            raise self._told()

    def first(self, value: Any) -> Any:
        """What process 0 gave: its word holds for all."""
        return self.exchange(value if self.leads else None)[0]

    @contextlib.contextmanager
    def leader_first(self) -> Iterator[None]:
        """Process 0 does what stands within, then the others: they find in the caches what it has put there."""
        if not self.leads:
            self.exchange(None)
        yield
        if self.leads:
            self.exchange(None)

    def agree_to_stop(self) -> None:
        """After an `Interrupted` of this process alone: come to the meeting at which the others learn of it."""
        if self._client is not None and not self.stopped:
            with contextlib.suppress(Interrupted):
                self.exchange(None)

    def _put(self, key: str, value: Any) -> None:
        data = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        for number, piece in enumerate(pieces[1:], 1):
            self._client.key_value_set_bytes(f"agentrl/{key}/{number}", piece)
        self._client.key_value_set_bytes(f"agentrl/{key}", len(pieces).to_bytes(4, "little") + pieces[0])

    def _get(self, key: str, of: int | None) -> Any:
        """The value once it is there; `of` is the process that it comes from, None where it takes all of them."""
        first = self._get_piece(key, of)
        pieces = [self._get_piece(f"{key}/{number}", of) for number in range(1, int.from_bytes(first[:4], "little"))]
        return json.loads(zlib.decompress(b"".join((first[4:], *pieces))))

    def _get_piece(self, key: str, of: int | None) -> bytes:
        began = time.monotonic()
        while True:
            if self._trouble is not None:
                raise self._told()
            try:
                return self._client.blocking_key_value_get_bytes(f"agentrl/{key}", _SLICE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error) and "NOT_FOUND" not in str(error):
                    self._trouble = self._trouble or f"process 0 of {self.count} cannot be reached: {error}"
            waited = time.monotonic() - began
            if waited > self.timeout_s and self._trouble is None:
                late = self._latest() if of is None else of
                self._trouble = f"{self._doing(late)}; the others waited for it for {waited:.0f} s (hosts.timeout_s)"

    def _told(self) -> UserError:
        self._give_way()
        self._raised = True
        return UserError(self._trouble or "")

    def _give_way(self) -> None:
        """Where the process is being ended already, nothing is said twice."""
        if self._ending:
            threading.Event().wait()

    # -- signs of life -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self.leads:
            address = distributed.global_state.coordinator_address or ""
            self._words = subprocess.Popen([sys.executable, "-S", "-c", _LAST_WORDS, address], stdin=subprocess.PIPE)
        self._beat()
        threading.Thread(target=self._keep_watch, name="hosts", daemon=True).start()

    def _keep_watch(self) -> None:
        pause, told_at = min(1.0, self.lost_s / 5), None
        while not self._left.wait(pause):
            pause = min(1.0, self.lost_s / 5)
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._beat()
                self._look()
            if self._trouble is None:
                self._trouble = self._found()
            if self._trouble is not None:
                told_at = told_at or time.monotonic()
                if time.monotonic() - told_at > self._time_to_leave():
                    self._end()

    def _time_to_leave(self) -> float:
        """What the process's own thread gets before it is ended: nothing where it sits in a device program."""
        if self._raised or self._ended is not None:
            return _GRACE_S
        return 0.0 if self._phase()[0] in _TOGETHER and self._waiting is None else _COME_OUT_S

    def _end(self) -> None:
        """End a process whose own thread cannot: it waits for another inside a device program, or will not close."""
        if not (self._raised or self._ended):
            time.sleep(2 * _SLICE_MS / 1000)  # it may have come out by itself
        self._ending = not self._raised
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._ended = self._ended or self._trouble
            self._beat()
        # One that raised would have said why once all was closed: it never came to that.
        os.write(2, f"agentrl: error: {self._trouble}\n".encode())
        self._hush()
        end(FAILED)

    def _beat(self) -> None:
        with self._lock:
            self._beats += 1
            phase, since = self._phase()
            if self._waiting is not None:
                phase, since = _WAITING, time.monotonic() - self._waiting
            stop = None if self._interrupts is None else self._interrupts.noted
            sign = {"beat": self._beats, "phase": phase, "for_s": since, "meeting": self._meeting, "stop": stop}
            self._client.key_value_set(
                f"agentrl/alive/{self.index}", json.dumps({**sign, "ended": self._ended}), allow_overwrite=True
            )

    def _look(self) -> None:
        now = time.monotonic()
        for key, text in self._client.key_value_dir_get("agentrl/alive/"):
            k, sign = int(key.rpartition("/")[2]), json.loads(text)
            if k not in self._seen or self._seen[k][0]["beat"] != sign["beat"]:
                self._seen[k] = sign, now
            if sign["stop"] is not None and self._interrupts is not None:
                self._interrupts.pass_on(sign["stop"])
        if self._words is not None and self._words.stdin is not None and 0 in self._seen:
            with contextlib.suppress(OSError):
                self._words.stdin.write(f"{self._lost(0)}\n".encode())
                self._words.stdin.flush()

    def _found(self) -> str | None:
        """What is wrong with the others, or with this process."""
        now = time.monotonic()
        for k, (sign, at) in self._seen.items():
            if k != self.index and sign["ended"] is not None:
                return f"process {k} of {self.count} ended: {sign['ended']}"
            if k != self.index and now - at > self.lost_s:
                return f"{self._lost(k)}, no sign of it for {now - at:.0f} s (hosts.lost_s)"
        phase, since = self._phase()
        if self._waiting is None and phase in _TOGETHER and since > self.timeout_s:
            return f"{self._doing(self._latest())} (hosts.timeout_s={self.timeout_s:g})"
        return None

    def _lost(self, k: int) -> str:
        return f"process {k} of {self.count} is gone: last seen in phase {self._seen[k][0]['phase']!r}"

    def _doing(self, k: int) -> str:
        if k not in self._seen:
            return f"process {k} of {self.count} has not begun"
        sign, at = self._seen[k]
        return f"process {k} of {self.count} has been in phase {sign['phase']!r} for {self._age(sign, at):.0f} s"

    @staticmethod
    def _age(sign: dict[str, Any], at: float) -> float:
        return sign["for_s"] + time.monotonic() - at

    def _latest(self) -> int:
        """Who is furthest behind: at the earliest meeting, not waiting there, and longest at what it does."""

        def behind(k: int) -> tuple[int, bool, float]:
            if k not in self._seen:
                return -1, False, 0.0
            sign, at = self._seen[k]
            return sign["meeting"] - (sign["phase"] == _WAITING), sign["phase"] == _WAITING, -self._age(sign, at)

        return min(range(self.count), key=behind)

    # -- the end -----------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Tell the others why this process ends; they end with the same reason. It has some seconds to close."""
        if self._client is None:
            return
        self._give_way()
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self._ended = " ".join(reason.split()) or type(error).__name__
        self._trouble, self._raised = self._trouble or self._ended, True
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._beat()

    def leave(self) -> None:
        """The end of a run that went well, or that was stopped: all leave together."""
        if self._client is None:
            return
        if self._ended is None:
            self.exchange(None)
        self._left.set()
        self._hush()
        if self._ended is None:  # else see `end`
            jax.distributed.shutdown()

    def _hush(self) -> None:
        if self._words is not None and self._words.stdin is not None:
            with contextlib.suppress(OSError):
                self._words.stdin.write(b"\n")
                self._words.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._words.wait(2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and not (isinstance(error, Interrupted) and self.stopped):
            self.failed(error)
        self.leave()


def joined() -> bool:
    """Whether this process is one of several, which have not left each other yet."""
    return jax.distributed.is_initialized()


def end(code: int) -> int:
    """The exit code of a process; one of several that failed ends here, since JAX would wait for the others.

    Process 0 holds the service that the others are connected to, so it is the last to go.
    """
    if not code or not joined():
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    state: Any = distributed.global_state
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        state.client.key_value_set(f"agentrl/gone/{state.process_id}", "", allow_overwrite=True)
        if state.process_id == 0:
            _wait_for_the_others(state.client)
    os._exit(code)


def _wait_for_the_others(client: Any) -> None:
    """Until each of them has said that it goes, or gives no sign of life any more."""
    began = time.monotonic()
    changed: dict[str, tuple[str, float]] = {}
    while (now := time.monotonic()) - began < _LAST_S:
        time.sleep(0.3)  # the last one needs a moment between saying it and going
        gone = {key.rpartition("/")[2] for key, _ in client.key_value_dir_get("agentrl/gone/")}
        for key, sign in client.key_value_dir_get("agentrl/alive/"):
            if key not in changed or changed[key][0] != sign:
                changed[key] = sign, now
        left = [at for key, (_, at) in changed.items() if key.rpartition("/")[2] not in gone]
        if all(now - at > _STILL_S for at in left):
            break


@contextlib.contextmanager
def _named_if_late(line: str, seconds: float) -> Iterator[None]:
    def late() -> None:
        os.write(2, f"agentrl: error: {line}\n".encode())
        os._exit(FAILED)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# JAX aborts a process whose connection to the coordination service breaks, at once and without saying whose death that
# was. This little process is told every second what to say then; it sees that its parent is gone by the end of its
# input, and that process 0 is gone by nobody answering there.
_LAST_WORDS = """
import signal, socket, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
line = ""
for line in sys.stdin:
    pass
host, _, port = sys.argv[1].rpartition(":")
if line.strip():
    try:
        socket.create_connection((host.strip("[]"), int(port)), 2).close()
    except OSError:
        print("agentrl: error: " + line.strip() + ", and JAX ends the others with it", file=sys.stderr)
"""
