"""What the pool and its workers say to each other, and the frames that carry it. Standard library only.

A frame is a 4-byte length and a pickle. The pool reads without ever blocking (`Inbox`): a worker that stops in the
middle of a frame is late, not a hang of the trainer.
"""

from __future__ import annotations

import math
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any, Literal

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Status, Task, Verdict

Phase = Literal["start", "reset", "step", "snapshot", "verify", "close", "idle", "sample"]
FailureKind = Literal["timeout", "crash", "exception", "garbage"]
MAX_FRAME = 64 << 20
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Reset:
    task: Task
    seed: int


@dataclass(frozen=True, slots=True)
class Perform:
    action: Action


@dataclass(frozen=True, slots=True)
class Finish:
    """Verify and close: the snapshot after `reset` was kept by the worker."""

    task: Task
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Rebuild a lost state: reset, then every action. Each answer is reported as it comes (`Note`)."""

    task: Task
    seed: int
    actions: tuple[Action, ...]


Command = Reset | Perform | Finish | Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """First words of a worker."""

    pid: int
    spec: EnvironmentSpec | None = None
    verifier_version: str = ""
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Work goes on and has reached `phase`; the deadline starts anew. A replay's notes carry observations."""

    phase: Phase
    observation: Observation | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A command is done: an `Observation` for reset and step, a `Verdict` for finish, for a replay the observations
    of reset and of every action."""

    value: Observation | Verdict | tuple[Observation, ...]
    wall_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A command that gave nothing: how, in which phase, and what is known of it.

    `replayed` are the observations that a replay had reached. `value` is a verdict measured before `close` failed.
    """

    kind: FailureKind
    phase: Phase
    message: str
    exception: str = ""  # type name
    exit_signal: int | None = None
    output: str = ""  # head and tail of what the environment printed
    wall_ms: float = 0.0
    replayed: tuple[Observation, ...] = ()
    value: Verdict | None = None

    def __str__(self) -> str:
        what = f"{self.exception}: {self.message}" if self.exception else self.message
        return f"{self.kind} in {self.phase}: {what}"


Reply = Answer | Failure


def send(sock: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """The next message of a blocking socket. Raises `EOFError` where the other side is gone."""
    (size,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return pickle.loads(_exactly(sock, size))


class Inbox:
    """Messages out of the bytes of a socket, however they are cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete by now. Raises `ValueError` on what is no frame of ours."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > MAX_FRAME:
                raise ValueError(f"a frame of {size} bytes")
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                break
            try:
                messages.append(pickle.loads(memoryview(self._buffer)[_LENGTH.size : end]))
            except Exception as error:
                raise ValueError(f"{type(error).__name__}: {error}") from None
            del self._buffer[:end]
        return messages


def observation_fault(value: Any) -> str | None:
    """Why `value` is no well-formed `Observation`, or None."""
    if not isinstance(value, Observation):
        return f"expected an Observation, got {type(value).__name__}"
    if not isinstance(value.content, tuple) or not all(isinstance(message, Message) for message in value.content):
        return "Observation.content: expected a tuple of Message"
    if not all(isinstance(message.content, str) for message in value.content):
        return "Message.content: expected text"
    if not isinstance(value.status, Status):
        return f"Observation.status: expected a Status, got {value.status!r:.40}"
    gain = value.evidence_gain
    return None if gain is None or _finite(gain) else f"Observation.evidence_gain: expected 0..1, got {gain!r:.40}"


def verdict_fault(value: Any) -> str | None:
    """Why `value` is no well-formed `Verdict`, or None. A score that is no number in 0..1 is a fault, never a 0."""
    if not isinstance(value, Verdict):
        return f"expected a Verdict, got {type(value).__name__}"
    for name in ("outcome", "quality"):
        score = getattr(value, name)
        if score is not None and not _finite(score):
            return f"Verdict.{name}: expected a number in 0..1 or None, got {score!r:.40}"
    return None


def _finite(score: Any) -> bool:
    return isinstance(score, (bool, int, float)) and math.isfinite(score) and 0.0 <= score <= 1.0


def _exactly(sock: socket.socket, size: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        data = sock.recv(min(size - len(chunks), 1 << 20))
        if not data:
            raise EOFError
        chunks += data
    return bytes(chunks)
