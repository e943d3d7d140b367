"""A pool of environment worker processes with deadlines. Non-blocking: `submit` commands, `poll` for replies.

A worker that outlives its deadline is killed with everything it started; one that dies, raises or answers garbage
gives a `Failure`. After any failure the process is thrown away, and the next command gets a fresh one.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Self

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, EnvironmentSpec, Observation
from agentrl_jax.rollout import orphans
from agentrl_jax.rollout.play import MAX_OBSERVATION_CHARS
from agentrl_jax.rollout.wire import (
    RECEIVE,
    Answer,
    Capture,
    Command,
    Failure,
    FailureKind,
    Finish,
    Inbox,
    Note,
    Perform,
    Phase,
    Ready,
    Reply,
    encode_command,
    send_plain,
)
from agentrl_jax.rollout.worker import CONTROL, STATUS

_SEND_TIMEOUT_S = 5.0
FIRST_PHASE: Mapping[type, Phase] = {Perform: "step", Finish: "snapshot", Capture: "snapshot"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that an environment may take, phase by phase. `start` covers importing the environment; `verify` each of
    the final snapshot, the verifier and `close`."""

    start: float = 60.0
    reset: float = 30.0
    step: float = 30.0
    verify: float = 60.0

    def of(self, phase: Phase) -> float:
        if phase in ("start", "reset", "step"):
            return getattr(self, phase)
        return self.verify


@dataclass(slots=True)
class _Process:
    """A worker process as the pool sees it. `pid` 0: it has not spoken yet."""

    sock: socket.socket
    inbox: Inbox = field(default_factory=Inbox)
    pid: int = 0
    deadline: float = 0.0
    phase: Phase = "start"
    sent_at: float | None = None  # when the command in flight was sent; None: none is
    replayed: list[Observation] = field(default_factory=list)

    @property
    def awaited(self) -> bool:
        """Whether something is to come of it, under a deadline."""
        return self.sent_at is not None or self.pid == 0


class Pool:
    """`workers` numbered places, each with at most one process, started when it is first needed.

    Use as a context manager; `close` leaves no process behind, and neither does the death of the trainer.
    `spec` and `verifier_version` come from the environment itself (the first use starts one worker).

    With a `label` everything that workers start is known by it: what an earlier pool of this label has left is ended at
    once, and what this one leaves, when it closes.
    """

    def __init__(
        self,
        ref: EnvironmentRef,
        workers: int,
        deadlines: Deadlines | None = None,
        *,
        max_observation_chars: int = MAX_OBSERVATION_CHARS,
        label: str | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: expected at least 1")
        self.ref, self.workers, self.deadlines = ref, workers, deadlines or Deadlines()
        self._max_chars, self._label = max_observation_chars, label
        self._reap_orphans()
        self._selector = selectors.EpollSelector()
        self._free = deque(range(workers))
        self._processes: dict[int, _Process] = {}
        self._waiting: dict[int, Command] = {}  # commands of workers that are still starting
        self._replies: list[tuple[int, Reply]] = []
        self._seedbed: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._nearest = inf  # no deadline comes before this
        self._spec: EnvironmentSpec | None = None
        self._verifier_version = ""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def spec(self) -> EnvironmentSpec:
        return self._introduction()[0]

    @property
    def verifier_version(self) -> str:
        return self._introduction()[1]

    def pids(self) -> dict[int, int]:
        """Process id by worker, of those that run and have spoken."""
        return {worker: process.pid for worker, process in self._processes.items() if process.pid}

    def phase(self, worker: int) -> Phase:
        """What a worker is at."""
        return self._processes[worker].phase if worker in self._processes else "idle"

    def busy(self, worker: int) -> bool:
        """Whether a command of this worker is in flight."""
        process = self._processes.get(worker)
        return worker in self._waiting or (process is not None and process.sent_at is not None)

    @property
    def expects(self) -> bool:
        """Whether a reply is still to come: a command is in flight or a process is starting."""
        return bool(self._replies) or any(p.awaited for p in self._processes.values())

    def acquire(self) -> int | None:
        """A free worker to be held for an episode, or None. Workers that already have a process come first."""
        if not self._free:
            return None
        worker = self._free.popleft()
        if worker not in self._processes:
            self._start(worker)
        return worker

    def give_up(self, worker: int) -> None:
        """Kill a worker that has a command in flight; no reply comes of it."""
        process = self._processes.get(worker)
        self._waiting.pop(worker, None)
        if process is not None and process.sent_at is not None:
            self._discard(worker)

    def fileno(self) -> int:
        """Readable when a worker has said something."""
        return self._selector.fileno()

    def release(self, worker: int) -> None:
        """Give a worker back. One with a command still in flight is killed."""
        self.give_up(worker)
        if worker in self._processes:
            self._free.appendleft(worker)
        else:
            self._free.append(worker)

    def submit(self, worker: int, command: Command) -> None:
        """Send a command; its reply comes from `poll`. Starts the worker's process where there is none."""
        if self.busy(worker):
            raise RuntimeError(f"worker {worker} already has a command")
        process = self._processes.get(worker)
        if process is None:
            process = self._start(worker)
        if process.pid == 0:
            self._waiting[worker] = command
        else:
            self._send(worker, process, command)

    def poll(self, timeout: float | None) -> list[tuple[int, Reply]]:
        """Replies that are there by now; waits at most `timeout` seconds for the first (None: until one comes).

        Sleeps in the kernel: never a busy wait. A worker that dies while it has no command gives a `Failure` of phase
        `idle`.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = self._patience(limit)
            if wait is None and not self._replies:  # no command is in flight: nothing would ever come
                return []
            for key, _ in self._selector.select(0.0 if self._replies else wait):
                self._read(key.data)
            self._enforce()
            if self._replies or (limit is not None and time.monotonic() >= limit):
                replies, self._replies = self._replies, []
                return replies

    def close(self) -> None:
        """Kill every worker and the process they come from. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        for worker in list(self._processes):
            self._discard(worker)
        self._fell_seedbed()
        self._selector.close()
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        if self._label is not None:
            orphans.reap(orphans.RUN, self._label)

    def _introduction(self) -> tuple[EnvironmentSpec, str]:
        while self._spec is None:
            if not self._processes:
                self._start(self._free[0] if self._free else 0)
            self._replies = self.poll(None) + self._replies
            for _, reply in self._replies:
                if isinstance(reply, Failure) and reply.phase == "start":
                    raise UserError(f"no environment worker starts: {reply}")
        return self._spec, self._verifier_version

    def _start(self, worker: int) -> _Process:
        control = self._tended_seedbed()
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # it died this moment: the worker's socket closes, and that tells
            socket.send_fds(control, [CONTROL.pack(b"F", 0)], [theirs.fileno()])
        ours.setblocking(False)
        process = self._processes[worker] = _Process(sock=ours)
        self._reach(process, "start")
        self._selector.register(ours, selectors.EVENT_READ, worker)
        return process

    def _tended_seedbed(self) -> socket.socket:
        if self._closed:
            raise RuntimeError("the pool is closed")
        if self._control is not None and self._seedbed is not None and self._seedbed.poll() is None:
            return self._control
        self._fell_seedbed()
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths}
        if self._label is not None:
            environment[orphans.RUN] = self._label
        with theirs:
            self._seedbed = subprocess.Popen(
                [sys.executable, "-m", "agentrl_jax.rollout.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        send_plain(ours, (self.ref, self._max_chars))
        ours.settimeout(10.0)  # for the answers to reaping, which a busy machine keeps waiting: an exit is told by them
        self._control = ours
        return ours

    def _fell_seedbed(self) -> None:
        if self._control is not None:
            self._control.close()  # it kills and reaps what is left, and goes
            self._control = None
        if self._seedbed is not None:
            try:
                self._seedbed.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                _kill_group(self._seedbed.pid)
                self._seedbed.wait()
            self._seedbed = None

    def _send(self, worker: int, process: _Process, command: Command) -> None:
        process.sent_at = time.monotonic()
        process.replayed = []
        self._reach(process, FIRST_PHASE.get(type(command), "reset"))
        try:
            _send_all(process.sock, encode_command(command))
        except OSError as error:
            self._fail(worker, "crash", f"the worker takes no command: {error}")

    def _reach(self, process: _Process, phase: Phase) -> None:
        process.phase = phase
        process.deadline = time.monotonic() + self.deadlines.of(phase)
        self._nearest = min(self._nearest, process.deadline)

    def _patience(self, limit: float | None) -> float | None:
        if not any(p.awaited for p in self._processes.values()):
            return None if limit is None else max(0.0, limit - time.monotonic())
        return max(0.0, (self._nearest if limit is None else min(self._nearest, limit)) - time.monotonic())

    def _read(self, worker: int) -> None:
        process = self._processes.get(worker)
        if process is None:
            return
        try:
            data = process.sock.recv(RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            messages = process.inbox.feed(data)
        except ValueError as error:
            return self._fail(worker, "garbage", f"the worker sent no message of ours: {error}")
        for message in messages:
            if self._processes.get(worker) is process:
                self._take(worker, process, message)
        if not data and self._processes.get(worker) is process:
            self._fail(worker, "crash", "the worker process died")

    def _take(self, worker: int, process: _Process, message: Any) -> None:
        if isinstance(message, Ready):
            process.pid = message.pid
            if message.failure is not None:
                self._waiting.pop(worker, None)
                return self._finish(worker, message.failure, discard=True)
            self._spec, self._verifier_version = message.spec, message.verifier_version
            process.phase = "idle"
            if worker in self._waiting:
                self._send(worker, process, self._waiting.pop(worker))
        elif isinstance(message, Note):
            self._reach(process, message.phase)
            if message.observation is not None:
                process.replayed.append(message.observation)
        elif isinstance(message, Answer) and process.sent_at is not None:
            self._finish(worker, message, discard=False)
        elif isinstance(message, Failure) and process.sent_at is not None:
            self._finish(worker, replace(message, replayed=tuple(process.replayed)), discard=True)
        else:
            self._fail(worker, "garbage", f"the worker said {type(message).__name__} out of turn")

    def _finish(self, worker: int, reply: Reply, *, discard: bool) -> None:
        process = self._processes[worker]
        process.phase, process.sent_at = "idle", None
        self._replies.append((worker, reply))
        if discard:
            self._discard(worker)

    def _enforce(self) -> None:
        now = time.monotonic()
        if now < self._nearest:
            return
        self._nearest = min(
            (p.deadline for p in self._processes.values() if p.awaited and p.deadline > now), default=inf
        )
        for worker, process in list(self._processes.items()):
            if now >= process.deadline and process.awaited:
                seconds = self.deadlines.of(process.phase)
                self._fail(worker, "timeout", f"no answer within {seconds:g} s (deadlines.{_setting(process.phase)})")

    def _fail(self, worker: int, kind: FailureKind, message: str) -> None:
        process = self._processes[worker]
        phase, started, silent = process.phase, process.sent_at, process.pid == 0
        status = self._discard(worker)
        exit_signal = os.WTERMSIG(status) if kind == "crash" and status >= 0 and os.WIFSIGNALED(status) else None
        if exit_signal is not None:
            message += f" of signal {signal.Signals(exit_signal).name}"
        elif kind == "crash" and status >= 0 and os.WIFEXITED(status):
            message += f" with exit code {os.WEXITSTATUS(status)}"
        self._waiting.pop(worker, None)
        if silent:  # whatever keeps it from starting keeps its siblings from it too
            self._fell_stuck_seedbed(kind)
        wall_ms = 0.0 if started is None else (time.monotonic() - started) * 1e3
        failure = Failure(
            kind=kind, phase=phase, message=message, exit_signal=exit_signal, wall_ms=wall_ms,
            replayed=tuple(process.replayed),
        )  # fmt: skip
        self._replies.append((worker, failure))

    def _fell_stuck_seedbed(self, kind: FailureKind) -> None:
        if kind == "timeout" and self._seedbed is not None:
            _kill_group(self._seedbed.pid)

    def _discard(self, worker: int) -> int:
        """Kill the worker's process group and forget it. Returns its wait status, -1 where that is unknown."""
        process = self._processes.pop(worker)
        self._selector.unregister(process.sock)
        process.sock.close()
        if not process.pid:
            return -1
        _kill_group(process.pid)
        control = self._control
        if control is None:
            return -1
        try:
            control.sendall(CONTROL.pack(b"R", process.pid))
            while True:
                data = control.recv(STATUS.size, socket.MSG_WAITALL)
                if len(data) < STATUS.size:
                    return -1
                pid, status = STATUS.unpack(data)
                if pid == process.pid:  # else the late answer to an earlier request
                    return status
        except OSError:
            return -1


def _send_all(sock: socket.socket, data: bytes) -> None:
    """As `sendall`, on a socket that does not block: nearly always one call of the kernel."""
    try:
        sent = sock.send(data)
    except BlockingIOError:
        sent = 0
    if sent < len(data):
        sock.settimeout(_SEND_TIMEOUT_S)
        sock.sendall(data[sent:])
        sock.setblocking(False)


def _setting(phase: Phase) -> str:
    return phase if phase in ("start", "reset", "step") else "verify"


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
