"""What the pool and its workers say to each other, and the frames that carry it. Standard library only.

A frame is a 4-byte length and a pickle. The pool reads without ever blocking (`Inbox`): a worker that stops in the
middle of a frame is late, not a hang of the trainer. What a worker says is plain data, and the pool unpickles nothing
else: an environment that a policy has taken over cannot run code in the trainer.
"""

from __future__ import annotations

import io
import math
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from agentrl_jax.protocol import (
    Action,
    EnvironmentSpec,
    EnvStatus,
    Message,
    Observation,
    Snapshot,
    Status,
    StopReason,
    Task,
    ToolCall,
    Verdict,
)
from agentrl_jax.rollout.codec import from_json, to_json

Phase = Literal["start", "reset", "step", "snapshot", "verify", "close", "idle", "sample"]
FailureKind = Literal["timeout", "crash", "exception", "garbage", "unavailable"]
MAX_FRAME = 64 << 20
RECEIVE = 1 << 16  # bytes read at once: a larger buffer comes from the kernel anew each time, page by page
_LENGTH = struct.Struct("!I")
_HEALTHY = EnvStatus()


@dataclass(frozen=True, slots=True)
class Reset:
    task: Task
    seed: int


@dataclass(frozen=True, slots=True)
class Perform:
    action: Action


@dataclass(frozen=True, slots=True)
class Finish:
    """Verify and close: the worker has kept the task, the snapshot after `reset` and what was performed since.
    `stop` is told to the verifier."""

    stop: StopReason | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """Rebuild a lost state: reset, then every action. Each answer is reported as it comes (`Note`)."""

    task: Task
    seed: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """Hand out the state of the episode: `Captured`. The episode goes on."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on from a captured state in this worker, as if what was performed had been performed here: `Resumed`."""

    task: Task
    performed: tuple[Action, ...]
    initial: Snapshot
    state: Snapshot


Command = Reset | Perform | Finish | Replay | Capture | Resume


@dataclass(frozen=True, slots=True)
class Captured:
    """The two states that a fork goes on from: after `reset`, for the verifier, and now."""

    initial: Snapshot
    state: Snapshot


@dataclass(frozen=True, slots=True)
class Resumed:
    """The worker holds the state; `hash` is what its own snapshot says."""

    hash: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The state could not be captured, or is not what was captured. The worker goes on; nobody is to blame."""

    reason: str


Forking = Captured | Resumed | Refused


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
    of reset and of every action, one of `Forking` for capture and resume."""

    value: Observation | Verdict | tuple[Observation, ...] | Forking
    wall_ms: float = 0.0
    retried: int = 0  # times that a service which was down was asked again meanwhile


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
    retried: int = 0
    replayed: tuple[Observation, ...] = ()
    value: Verdict | None = None

    def __str__(self) -> str:
        what = f"{self.exception}: {self.message}" if self.exception else self.message
        return f"{self.kind} in {self.phase}: {what}"


Reply = Answer | Failure


def encode_command(command: Command) -> bytes:
    """A command as a frame."""
    if isinstance(command, Perform):  # the one that is sent at every step, without what pickling records costs
        action = command.action
        calls = [(call.name, call.arguments) for call in action.calls]
        return _frame((action.text, calls, action.error))
    return _frame(command)


def decode_command(data: Any) -> Command:
    """Inverse of `encode_command`, in the worker, which has every reason to trust the pool."""
    found = pickle.loads(data)
    if type(found) is not tuple:
        return found
    text, calls, error = found
    return Perform(Action(text=text, calls=tuple([ToolCall(name=n, arguments=a) for n, a in calls]), error=error))


def encode_reply(message: Ready | Note | Reply) -> bytes:
    """What a worker says as a frame of plain data. Raises `TypeError` or `AttributeError` where it is no such thing."""
    if isinstance(message, Answer):
        value = message.value
        if isinstance(value, Observation):
            return _frame(("observation", _flat(value), message.wall_ms, message.retried))
        if isinstance(value, tuple):
            return _frame(("observations", [_flat(item) for item in value], message.wall_ms, message.retried))
        if isinstance(value, Captured):
            states = [(snapshot.data, snapshot.hash) for snapshot in (value.initial, value.state)]
            return _frame(("captured", states, message.wall_ms))
        if isinstance(value, Resumed | Refused):
            return _frame((type(value).__name__.lower(), to_json(value), message.wall_ms))
        return _frame(("verdict", to_json(value), message.wall_ms, message.retried))
    if isinstance(message, Note):
        return _frame(("note", message.phase, None if message.observation is None else _flat(message.observation)))
    return _frame(("ready" if isinstance(message, Ready) else "failure", to_json(message)))


def decode_reply(data: Any) -> Ready | Note | Reply:
    """Inverse of `encode_reply`, in the pool, which trusts nothing of it. Raises `ValueError` on anything else."""
    try:
        what, value, *rest = _Plain(io.BytesIO(data)).load()
        if what == "observation":
            return Answer(_observation(value), *rest)
        if what == "observations":
            return Answer(tuple([_observation(flat) for flat in value]), *rest)
        if what == "verdict":
            return Answer(_faultless(from_json(Verdict, value), verdict_fault), *rest)
        if what == "captured":
            return Answer(Captured(*[Snapshot(data=bytes(data), hash=str(name)) for data, name in value]), *rest)
        if what in ("resumed", "refused"):
            return Answer(from_json(Resumed if what == "resumed" else Refused, value), *rest)
        if what == "note":
            return Note(value, *[None if flat is None else _observation(flat) for flat in rest])
        return from_json({"ready": Ready, "failure": Failure}[what], value)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


class _Plain(pickle.Unpickler):
    """Reads tuples, lists, dicts, text, bytes and numbers, and not a single name of a class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"expected plain data, got {module}.{name}")


def _frame(data: Any) -> bytes:
    pickled = pickle.dumps(data, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(pickled)) + pickled


def _flat(observation: Observation) -> tuple[Any, ...]:
    messages = [(message.role, message.content, message.name, message.call_id) for message in observation.content]
    health, gain = observation.env_status, observation.evidence_gain
    return (
        messages, str(observation.status), float(observation.latency_ms), health.service, health.retryable,
        observation.terminated, observation.truncated, None if gain is None else float(gain),
    )  # fmt: skip


def _observation(flat: Any) -> Observation:
    messages, status, latency_ms, service, retryable, terminated, truncated, gain = flat
    return _faultless(
        Observation(
            content=tuple([Message(role=r, content=c, name=n, call_id=i) for r, c, n, i in messages]),
            status=Status(status), latency_ms=latency_ms, terminated=terminated, truncated=truncated,
            env_status=EnvStatus(service=service, retryable=retryable) if service != "ok" or retryable else _HEALTHY,
            evidence_gain=gain,
        ),
        observation_fault,
    )  # fmt: skip


def _faultless(value: Any, fault: Callable[[Any], str | None]) -> Any:
    if found := fault(value):
        raise ValueError(found)
    return value


class Inbox:
    """Messages out of the bytes of a socket, however they are cut."""

    def __init__(self, decode: Callable[[Any], Any] = decode_reply) -> None:
        self._buffer, self._decode = bytearray(), decode

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
            messages.append(self._decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


def send_plain(sock: socket.socket, data: Any) -> None:
    """Any picklable value as a frame, from the trainer to what it has started."""
    sock.sendall(_frame(data))


def receive_plain(sock: socket.socket) -> Any:
    """Inverse of `send_plain`; reads not a byte more. Raises `EOFError` where the other side is gone."""
    (size,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return pickle.loads(_exactly(sock, size))


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
    if type(value.terminated) is not bool or type(value.truncated) is not bool:
        return (
            f"Observation.terminated, truncated: expected bools, got {value.terminated!r:.20}, {value.truncated!r:.20}"
        )
    if not isinstance(value.latency_ms, (int, float)):
        return f"Observation.latency_ms: expected a number, got {value.latency_ms!r:.40}"
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
