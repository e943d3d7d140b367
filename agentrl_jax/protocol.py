"""The words that environments and the trainer share. Standard library only.

An environment package imports this file and nothing else of the trainer; the
trainer imports nothing of an environment and finds it by name (`EnvironmentRef`).
Every record is frozen, keyword-only, picklable and made of standard types.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Role = Literal["system", "user", "assistant", "tool"]


class Status(StrEnum):
    """How one exchange with the environment went."""

    OK = "ok"
    INVALID_ACTION = "invalid_action"  # unknown tool, malformed call, bad arguments: the policy's doing
    DENIED = "denied"  # the system refused: permission, budget
    TIMEOUT = "timeout"
    ERROR = "error"  # the environment broke
    TRUNCATED = "truncated"  # the content was cut to fit


class Cause(StrEnum):
    """Who is answerable for a failure."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    EVALUATOR = "evaluator"
    UNKNOWN = "unknown"


class StopReason(StrEnum):
    """Why an episode ended. Only `COMPLETED` and `EARLY_STOP` are the policy's own choice."""

    COMPLETED = "completed"  # the environment says the task is over
    EARLY_STOP = "early_stop"  # the policy ended its turn without acting, before the task was over
    BUDGET = "budget"  # steps, tool calls, write actions or wall time are used up
    TOKEN_CAP = "token_cap"  # a turn or the context reached its token limit
    LOW_EVIDENCE = "low_evidence"  # marginal evidence gain stayed under the threshold
    TIMEOUT = "timeout"  # an environment call outlived its deadline
    FAILURE = "failure"  # a crash, an exception or garbage ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`name` and `call_id` say which call a tool message answers: the trainer fills them in, environments need not."""

    role: Role
    content: str
    name: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as the policy sees it. `parameters` is a JSON Schema of type object.

    `version` changes with what the tool does: a receipt records it, and a replay that comes to another answer names it.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    writes: bool = False
    version: str = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the policy did in one turn: the text as decoded, and what it parses to.

    Exactly one of three: `calls` (tool calls, in order), `error` (it looks like a call
    and cannot be read: the reason), or neither (plain text).
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStatus:
    """The environment's own health, as it reports it; `ok` means healthy.

    An observation of status `error` or `timeout` that names another service is no answer to the policy: it is asked
    for again where that is `retryable` (nothing has happened yet), and else the episode fails for infrastructure.
    """

    service: str = "ok"
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment answered: the new messages only, never the history.

    `terminated`: the task is over. `truncated`: a limit of the environment cut it.
    `evidence_gain`: what this exchange brought towards the goal, 0..1, or None where unmeasured.
    """

    content: tuple[Message, ...]
    status: Status = Status.OK
    latency_ms: float = 0.0
    env_status: EnvStatus = EnvStatus()
    terminated: bool = False
    truncated: bool = False
    evidence_gain: float | None = None

    @property
    def unavailable(self) -> bool:
        """Whether it says that a service is down, which the policy could not have caused."""
        return self.status in (Status.ERROR, Status.TIMEOUT) and self.env_status.service != "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to solve. `data` is for the environment, the verifier and the reference
    solution; the policy sees only what `reset` puts into messages."""

    id: str
    split: str
    kind: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One constraint, measured. `evidence` is what the verifier saw."""

    name: str
    passed: bool
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A measurement of one episode, to be composed as constraints > outcome > quality, never summed.

    `outcome` is True/False or a score in [0, 1]; None means *unscored*, which is never 0.
    `quality` ranks successes among themselves, in [0, 1].
    """

    constraints: tuple[Check, ...] = ()
    outcome: bool | float | None = None
    quality: float | None = None
    diagnostics: Mapping[str, Json] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()

    @property
    def violated(self) -> bool:
        return any(not check.passed for check in self.constraints)

    @property
    def success(self) -> bool:
        """Every constraint kept and the outcome reached (a score counts from 1.0)."""
        return not self.violated and self.outcome is not None and float(self.outcome) >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Who caused a failure, and the evidence that says so.

    The rule: only what the policy could not have caused may leave the training batch.
    """

    cause: Cause
    evidence: str

    @property
    def leaves_batch(self) -> bool:
        return self.cause in (Cause.ENVIRONMENT, Cause.EVALUATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one episode; exploration, retries and writes are counted apart.

    `min_steps_for_finalize` and `min_tool_calls_for_commit` are the reserve: what must be left to finish in. Once only
    it is left, calls of tools that are not named in `finishing` are refused, and the policy is told; text, to sum up
    or to ask, is still heard. With `reserve_reached="stop"` the first such call ends the episode instead, for whoever
    takes over. Where a tool of `finishing` commits what was written, a write without a reserve to commit in is refused.
    """

    steps: int = 16
    tool_calls: int = 16
    tokens: int = 4096  # tokens the policy may produce in the episode
    write_actions: int = 4
    retries: int = 4  # turns answered with `invalid_action` before the episode is stopped
    infrastructure_retries: int = 3  # times that a service which was down is asked again; the policy does not see them
    wall_s: float = 600.0
    min_steps_for_finalize: int = 1
    min_tool_calls_for_commit: int = 1
    reserve_reached: Literal["refuse", "stop"] = "refuse"
    finishing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A whole environment state: opaque bytes, and a hash that is equal iff the states are."""

    data: bytes
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    name: str
    version: str
    tools: tuple[Tool, ...]
    budget: Budget = Budget()
    fork: Literal["native", "replay", "none"] = "none"
    side_effects: Literal["none", "dry_run", "isolated"] = "isolated"


@runtime_checkable
class Environment(Protocol):
    """One isolated world. What the policy gets wrong is an `Observation` (`invalid_action`, `denied`);
    an exception means that the environment itself broke."""

    spec: EnvironmentSpec

    def reset(self, task: Task, seed: int) -> Observation: ...
    def step(self, action: Action) -> Observation: ...
    def snapshot(self) -> Snapshot: ...
    def restore(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What an environment package offers.

    `tasks(split, count, seed)` gives distinct tasks of `train`, `validation` or `heldout`.
    `verify(task, initial, actions, final)` measures an episode from the two states and what was done. Where it has a
    parameter `stop`, it is told the `StopReason` too, so that an answer never given can be told from a wrong one; it
    defaults to None, "not known". Whoever wants a verdict asks `judge`, which tells it what it takes.
    `solve(task)` is the reference solution, a turn per item; a `str` item is said verbatim.
    `demonstrate(task, seed)` is a fallible teacher's: errors and recoveries among the turns.
    `reap(label)` ends what a run of this label (the environment variable AGENTRL_RUN_LABEL of its workers) has left
    where its process is gone: containers, mounts. It is called before a run and after it; returns how much it ended.
    `attacks(task)` are scripts that try to be scored without solving the task; none may succeed.
    `chance` is how often well-formed random calls succeed by luck; `hidden` names fields of `task.data` that nothing
    a policy sees may show (where none is named, conformance takes what the reference solution's last call says).
    """

    spec: EnvironmentSpec
    make: Callable[[], Environment]
    tasks: Callable[[str, int, int], Sequence[Task]]
    verify: Callable[..., Verdict]
    verifier_version: str
    solve: Callable[[Task], Sequence[ToolCall | str]] | None = None
    demonstrate: Callable[[Task, int], Sequence[ToolCall | str]] | None = None
    attacks: Callable[[Task], Mapping[str, Sequence[ToolCall | str]]] | None = None  # by the attack's name
    chance: float = 0.0
    hidden: tuple[str, ...] = ()
    reap: Callable[[str], int] | None = None
    vocabulary: Callable[[], Sequence[str]] | None = None  # texts that show every word the environment uses
    handles: Callable[[], Sequence[str]] | None = None  # words that only name records: any may stand for any
    drills: Callable[[int, int], Sequence[tuple[str, str]]] | None = None  # (count, seed) -> (request, right answer)
    takes_stop: bool = field(init=False, repr=False, compare=False, default=False)  # whether `verify` does

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes_stop", _takes(self.verify, "stop"))

    def judge(
        self, task: Task, initial: Snapshot, actions: Sequence[Action], final: Snapshot, stop: StopReason | None
    ) -> Verdict:
        """The verdict on an episode that ended for the reason `stop`."""
        if self.takes_stop:
            return self.verify(task, initial, actions, final, stop=stop)
        return self.verify(task, initial, actions, final)


def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a parameter of this name is written out in the signature; what passes arguments on does not count."""
    try:
        found = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):  # a builtin, which has no signature
        return False
    return found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRef:
    """Names a suite so that a worker process can build it: `package.module:function` and its options."""

    target: str
    options: Mapping[str, Json] = field(default_factory=dict)

    def load(self) -> Suite:
        module, separator, attribute = self.target.partition(":")
        if not separator:
            raise ValueError(f"environment {self.target!r}: expected 'package.module:function'")
        suite = getattr(importlib.import_module(module), attribute)(**self.options)
        if not isinstance(suite, Suite):
            raise ValueError(f"environment {self.target!r} returned {type(suite).__name__}, expected a Suite")
        return suite


class ForkRefused(RuntimeError):
    """A state was not copied, or the copy is not the state. The message says why; callers count these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A second environment in the state of the first, and what making it cost. Whoever forks closes it."""

    environment: Environment
    snapshot: Snapshot
    seconds: float
    bytes: int


def fork(suite: Suite, environment: Environment) -> Fork:
    """A new instance in the same state, verified: its state hash is the snapshot's, and where it got there by replay
    every observation on the way was the recorded one. Else `ForkRefused`, and nothing stays open.
    """
    if suite.spec.fork == "none":
        raise ForkRefused(f"environment {suite.spec.name!r} says fork='none'")
    started = time.perf_counter()
    snapshot = environment.snapshot()
    copy = restored(suite, snapshot)
    return Fork(
        environment=copy, snapshot=snapshot, seconds=time.perf_counter() - started, bytes=len(snapshot.data)
    )  # fmt: skip


def restored(suite: Suite, snapshot: Snapshot) -> Environment:
    """A new instance in the snapshot's state, its hash compared. Raises `ForkRefused`."""
    copy = suite.make()
    try:
        copy.restore(snapshot)
        found = copy.snapshot().hash
        if found != snapshot.hash:
            raise ForkRefused(f"the restored state has the hash {found[:12]}, the snapshot {snapshot.hash[:12]}")
    except BaseException as error:
        with contextlib.suppress(Exception):
            copy.close()
        if isinstance(error, ForkRefused) or not isinstance(error, Exception):
            raise
        raise ForkRefused(f"restore raised {type(error).__name__}: {error}") from error
    return copy


def data_dir() -> str | None:
    """Where data sets lie when the user says so (`AGENTRL_DATA`), else None."""
    return os.environ.get("AGENTRL_DATA") or None
