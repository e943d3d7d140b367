"""Environment worker processes: `python -m agentrl_jax.rollout.worker FD`. Never imports JAX.

The process that the pool starts is a seedbed: it imports the suite once and forks a worker for each socket it is
handed (a few milliseconds each, memory shared). It outlives no trainer: when its control socket closes, it kills and
reaps every worker. A worker hosts one environment at a time, in a session of its own, and serves many episodes in turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from agentrl_jax.protocol import (
    Action,
    Environment,
    EnvironmentRef,
    ForkRefused,
    Observation,
    Snapshot,
    StopReason,
    Suite,
    Task,
    Verdict,
    restored,
)
from agentrl_jax.rollout import orphans
from agentrl_jax.rollout.records import bounded
from agentrl_jax.rollout.wire import (
    MAX_FRAME,
    RECEIVE,
    Answer,
    Capture,
    Captured,
    Command,
    Failure,
    Inbox,
    Note,
    Perform,
    Phase,
    Ready,
    Refused,
    Replay,
    Reply,
    Reset,
    Resume,
    Resumed,
    decode_command,
    encode_reply,
    observation_fault,
    receive_plain,
    verdict_fault,
)

CONTROL = struct.Struct("!cI")  # b"F", 0: fork a worker for the attached socket; b"R", pid: reap
STATUS = struct.Struct("!Ii")  # pid, wait status (-1: still alive)
_OUTPUT_CHARS = 2_000
_BACKOFF_S = (0.05, 0.2, 0.8)  # before a service that was down is asked again, the last of them from then on


class BoundedOutput(io.TextIOBase):
    """Takes what an environment prints and keeps its head, its tail and a count."""

    def __init__(self) -> None:
        self.head, self.tail, self.count = "", "", 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.count += len(text)
        room = _OUTPUT_CHARS - len(self.head)
        self.head += text[: max(room, 0)]
        self.tail = (self.tail + text[max(room, 0) :][-_OUTPUT_CHARS:])[-_OUTPUT_CHARS:]
        return len(text)

    def read_back(self) -> str:
        cut = self.count - len(self.head) - len(self.tail)
        return f"{self.head}\n[{cut} characters cut]\n{self.tail}" if cut > 0 else self.head + self.tail


class _Broken(Exception):
    """Carries a failure out of a command."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Worker:
    """Performs commands on one environment; every way to fail becomes a `Failure`."""

    def __init__(self, suite: Suite, note: Callable[[Note], None], max_observation_chars: int) -> None:
        self.suite, self._note, self._max_chars = suite, note, max_observation_chars
        self._environment: Environment | None = None
        self._task: Task | None = None
        self._initial: Snapshot | None = None
        self._performed: list[Action] = []
        self._retried = self._retried_before = 0  # in this episode, and in those of its commands that are done

    def handle(self, command: Command) -> Reply:
        started, self._retried_before = time.perf_counter(), self._retried
        try:
            if isinstance(command, Perform):
                value: Any = self._step(command.action)
            elif isinstance(command, Reset):
                value = self._reset(command.task, command.seed)
            elif isinstance(command, Replay):
                value = self._replay(command)
            elif isinstance(command, Capture):
                value = self._capture()
            elif isinstance(command, Resume):
                value = self._resume(command)
            else:
                value = self._finish(command.stop)
        except _Broken as broken:
            return dataclasses.replace(broken.failure, retried=self._retried - self._retried_before)
        return Answer(value, (time.perf_counter() - started) * 1e3, self._retried - self._retried_before)

    def _world(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("no environment is open: reset first")
        return self._environment

    def _guard(self, phase: Phase, call: Callable[[], Any], value: Verdict | None = None) -> Any:
        try:
            return call()
        except BaseException as error:  # SystemExit too: an environment must not end its worker in silence
            name = type(error).__name__
            message = str(error)[:_OUTPUT_CHARS]
            failure = Failure(kind="exception", phase=phase, message=message, exception=name, value=value)
            raise _Broken(failure) from None

    def _observe(self, phase: Phase, call: Callable[[], Any]) -> Observation:
        while True:
            observation = self._guard(phase, call)
            if fault := observation_fault(observation):
                raise _Broken(Failure(kind="garbage", phase=phase, message=fault))
            if not observation.unavailable:
                return bounded(observation, self._max_chars)
            self._wait_for_service(phase, observation)

    def _wait_for_service(self, phase: Phase, observation: Observation) -> None:
        """Sleep until it may be asked again, or end the episode where that is no use or has been tried enough."""
        service, limit = observation.env_status, self.suite.spec.budget.infrastructure_retries
        if not service.retryable or self._retried >= limit:
            said = " ".join(message.content for message in observation.content)[:_OUTPUT_CHARS]
            tried = f"asked again {self._retried} times" if service.retryable else "not retryable"
            message = f"service {service.service!r}, {tried}: {said}"
            raise _Broken(Failure(kind="unavailable", phase=phase, message=message))
        time.sleep(_BACKOFF_S[min(self._retried, len(_BACKOFF_S) - 1)])
        self._retried += 1
        self._note(Note(phase))  # the deadline is of one attempt

    def _step(self, action: Action) -> Observation:
        observation = self._observe("step", lambda: self._world().step(action))
        self._performed.append(action)
        return observation

    def _reset(self, task: Task, seed: int) -> Observation:
        self._abandon()
        self._task, self._performed = task, []
        self._retried = self._retried_before = 0
        environment = self._environment = self._guard("reset", self.suite.make)
        observation = self._observe("reset", lambda: environment.reset(task, seed))
        self._initial = self._guard("reset", environment.snapshot)
        return observation

    def _abandon(self) -> None:
        """Close what an episode that was given up left open; how that goes is nobody's concern any more."""
        environment, self._environment = self._environment, None
        if environment is not None:
            with contextlib.suppress(Exception):
                environment.close()

    def _replay(self, command: Replay) -> tuple[Observation, ...]:
        observations = [self._reset(command.task, command.seed)]
        self._note(Note("step", observations[0]))
        for action in command.actions:
            observations.append(self._step(action))
            self._note(Note("step", observations[-1]))
        return tuple(observations)

    def _capture(self) -> Captured | Refused:
        environment, initial = self._world(), self._initial
        assert initial is not None
        if self.suite.spec.fork == "none":
            return Refused(f"environment {self.suite.spec.name!r} says fork='none'")
        state = self._guard("snapshot", environment.snapshot)
        size = len(initial.data) + len(state.data)
        if size > MAX_FRAME // 2:
            return Refused(f"the state is {size} bytes, at most {MAX_FRAME // 2} travel between workers")
        return Captured(initial, state)

    def _resume(self, command: Resume) -> Resumed | Refused:
        self._abandon()
        self._retried = self._retried_before = 0
        try:
            self._environment = self._guard("reset", lambda: restored(self.suite, command.state))
        except _Broken as broken:
            if broken.failure.exception != ForkRefused.__name__:
                raise
            return Refused(broken.failure.message)
        self._task, self._initial, self._performed = command.task, command.initial, list(command.performed)
        return Resumed(command.state.hash)

    def _finish(self, stop: StopReason | None) -> Verdict:
        environment, task, initial, actions = self._world(), self._task, self._initial, tuple(self._performed)
        assert task is not None and initial is not None
        self._note(Note("snapshot"))
        final = self._guard("snapshot", environment.snapshot)
        self._note(Note("verify"))
        verdict = self._guard("verify", lambda: self.suite.judge(task, initial, actions, final, stop))
        if fault := verdict_fault(verdict):
            raise _Broken(Failure(kind="garbage", phase="verify", message=fault))
        self._note(Note("close"))
        self._guard("close", environment.close, verdict)
        self._environment = None
        return verdict


def serve(sock: socket.socket, suite: Suite | Failure, max_observation_chars: int) -> None:
    """Perform the commands of `sock` until the other side closes it."""
    if isinstance(suite, Failure):
        sock.sendall(encode_reply(Ready(pid=os.getpid(), failure=suite)))
        return
    sock.sendall(encode_reply(Ready(pid=os.getpid(), spec=suite.spec, verifier_version=suite.verifier_version)))
    worker = Worker(suite, lambda note: sock.sendall(encode_reply(note)), max_observation_chars)
    inbox = Inbox(decode_command)
    try:
        while data := sock.recv(RECEIVE):
            for command in inbox.feed(data):
                sock.sendall(answer(worker, command))
    except OSError:
        return


def answer(worker: Worker, command: Command) -> bytes:
    """The frame that answers a command; what the environment prints meanwhile is kept for the failures."""
    output = sys.stdout
    if not isinstance(output, BoundedOutput) or output.count:
        output = sys.stdout = sys.stderr = BoundedOutput()
    reply = worker.handle(command)
    if isinstance(reply, Failure) and output.count:
        reply = dataclasses.replace(reply, output=output.read_back())
    try:
        return encode_reply(reply)
    except Exception as error:  # a record that holds what has no place in one
        return encode_reply(Failure(kind="garbage", phase="step", message=f"no value that can be sent: {error}"[:500]))


def _load(ref: EnvironmentRef) -> Suite | Failure:
    try:
        return ref.load()
    except BaseException as error:
        message = f"environment {ref.target!r}: {error}"
        return Failure(kind="exception", phase="start", message=message[:2000], exception=type(error).__name__)


def _fork(control: socket.socket, handed: int, suite: Suite | Failure, max_chars: int) -> int:
    pid = os.fork()
    if pid:
        os.close(handed)
        return pid
    code = 1
    try:
        os.setsid()
        control.close()
        with contextlib.suppress(OSError):  # waking up must not push the trainer off its core
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.set_inheritable(handed, False)  # a daemon that the environment leaves behind must not keep it open
        os.environ[orphans.WORKER] = str(os.getpid())
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with socket.socket(fileno=handed) as sock:
            serve(sock, suite, max_chars)
        code = 0
    finally:
        os._exit(code)


def _reap(pid: int, patience_s: float = 1.0) -> int:
    limit = time.monotonic() + patience_s
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return -1
        if done:
            return status
        if time.monotonic() >= limit:
            return -1
        time.sleep(0.001)  # the pool has killed it: this lasts a scheduling slice


def seedbed(control: socket.socket) -> None:
    """Fork workers on request and reap them, until the control socket closes; then leave no process behind."""
    ref, max_chars = receive_plain(control)
    suite = _load(ref)
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the pages that the workers share
    children: set[int] = set()
    try:
        while True:
            data, handed, _, _ = socket.recv_fds(control, CONTROL.size, 1)
            if len(data) < CONTROL.size:
                return
            what, pid = CONTROL.unpack(data)
            if what == b"F":
                children.add(_fork(control, handed[0], suite, max_chars))
            else:
                status = _reap(pid) if pid in children else -1
                if status != -1:
                    children.discard(pid)
                control.sendall(STATUS.pack(pid, status))
                orphans.reap(orphans.WORKER, str(pid))  # what has left its process group
    except OSError:
        return
    finally:
        for pid in children:
            _kill_group(pid)
        for pid in children:
            _reap(pid)
            orphans.reap(orphans.WORKER, str(pid))


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group exists only once the child has called setsid
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def main(argv: list[str]) -> NoReturn:
    control = socket.socket(fileno=int(argv[0]))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    seedbed(control)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
