"""What an episode leaves behind: the steps of a receipt, what was spent, and the trajectory that is trained on.

Every record is frozen, picklable and has one JSON form (`to_json` / `from_json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from agentrl_jax.protocol import (
    Action,
    Attribution,
    EnvironmentRef,
    Observation,
    Status,
    StopReason,
    Task,
    Verdict,
)
from agentrl_jax.rollout.codec import Record, canonical, fingerprint

GENESIS = "0" * 32
FORMAT = 2  # of receipts: what a step's digest is made of


def observation_hash(observation: Observation) -> str:
    """A hash of what the policy can see of an observation: messages, status and end flags; never its latency."""
    texts = [text for message in observation.content for text in (message.role, message.content)]
    return fingerprint(observation.status, f"{observation.terminated:d}{observation.truncated:d}", *texts)


def step_digest(previous: str, turn: int, action: Action, observation: Observation | None, observation_hash: str,
                wall_ms: float, performed: bool, exception: str | None) -> str:  # fmt: skip
    """The link of a step in its receipt's chain: a hash of the link before it and of every field of the step."""
    calls = canonical([(call.name, call.arguments) for call in action.calls]) if action.calls else ""
    facts = f"{turn} {float(wall_ms)} {performed:d} {exception!r}"
    if observation is not None:
        gain = observation.evidence_gain
        facts += f" {float(observation.latency_ms)} {None if gain is None else float(gain)}"
    return fingerprint(previous, facts, action.text, calls, repr(action.error), observation_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Record):
    """What an episode has spent. Exploration, writes and retries are counted apart."""

    steps: int = 0  # actions the environment was asked to perform
    tool_calls: int = 0  # = exploration + writes + finishing calls
    exploration: int = 0  # calls of tools that neither write nor finish
    writes: int = 0
    retries: int = 0  # turns answered with `invalid_action`
    denied: int = 0  # turns refused by a budget; the environment never saw them
    infrastructure_retries: int = 0  # times that a service, or a reset, was asked again: not the policy's
    tokens: int = 0  # tokens the policy produced
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    """One exchange of a receipt. `digest` chains it to the step before it.

    `observation` is None where none came back: then `exception` says what happened instead.
    A step with `performed=False` was answered by a budget and never reached the environment.
    """

    turn: int
    action: Action
    observation: Observation | None
    observation_hash: str
    wall_ms: float  # from the request to the answer, as the trainer saw it
    performed: bool = True
    exception: str | None = None  # the type of the exception, or how the call failed
    digest: str = ""

    @property
    def status(self) -> Status:
        return self.observation.status if self.observation is not None else Status.ERROR

    def follows(self, previous: str) -> bool:
        """Whether `digest` is what this step's fields give after the link `previous`."""
        return self.digest == step_digest(
            previous, self.turn, self.action, self.observation, self.observation_hash,
            self.wall_ms, self.performed, self.exception,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt(Record):
    """Everything needed to repeat an episode and to hold its result to account.

    `replay_id` names what is repeated (environment, task, seed, performed actions); the chain of step
    digests makes a changed, dropped or reordered step visible (`breach`).
    """

    environment: str
    environment_version: str
    verifier_version: str
    tools: tuple[str, ...]
    tool_versions: tuple[str, ...] = ()  # of each of `tools`; empty in receipts that were written before tools had any
    ref: EnvironmentRef | None  # None: played in process from a suite that has no name
    task: Task
    seed: int
    reset_hash: str
    steps: tuple[Step, ...]
    ledger: Ledger
    stop: StopReason
    policy_versions: tuple[int, ...] = ()  # the distinct params that sampled the tokens
    verdict: Verdict | None = None
    attribution: Attribution | None = None
    limits: Mapping[str, Any] | None = None  # deadlines and budget in force
    healed: int = 0  # steps whose lost state was rebuilt by replay
    replay_id: str = ""
    trainer_version: str = ""
    format: int = 1  # what the digests are made of: `FORMAT` where this version wrote it

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions the environment performed, in order."""
        return tuple(step.action for step in self.steps if step.performed)

    def breach(self) -> int | None:
        """Index of the first step whose digest does not follow from the one before it; None if the chain holds."""
        previous = GENESIS
        for index, step in enumerate(self.steps):
            if step.observation is not None and observation_hash(step.observation) != step.observation_hash:
                return index
            if not step.follows(previous):
                return index
            previous = step.digest
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Break(Record):
    """Where a trajectory's history stopped being an extension of what was sampled: a new segment starts.

    `start` is the segment's first token; `prompt_length` of its tokens render the history anew. `reason`:
    `reasoning_stripped`, `rewritten`, `retokenized`.
    """

    start: int
    prompt_length: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch(Record):
    """Continues `member` of the same group from the state before its turn `turn`, 1 or more."""

    member: int
    turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Record):
    """What it cost to bring a branch to its state, and how: `copied` there as a snapshot or `replayed`, action by
    action. `refused` is why it was brought nowhere, or "": the member then ran from the reset."""

    way: Literal["copied", "replayed"]
    tokens: int = 0  # of the source's record, prompt included, that were taken over
    bytes: int = 0  # of the state and of the first one, which the verifier needs; nothing is sent where it is replayed
    seconds: float = 0.0  # in the workers
    waited_s: float = 0.0  # from the moment its state was there to the answer; it sampled meanwhile
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Record):
    """The full record of one episode, token by token as it was sampled; what was sampled is never re-encoded.

    The per-token fields have one entry per token. `tokens[:prompt_length]` is the prompt, which the members of a
    group share. A turn id counts assistant turns: an observation bears the id of the turn it answers, and the
    prompt bears 0. Empty tokens mean that the environment never answered `reset`.

    Each of `breaks` starts a segment: a context of its own, whose prompt renders the history anew. The segments stand
    one after another in the per-token fields, and every sampled token is an action in exactly one of them: where it was
    sampled. `retokenize_mismatch` counts the sampled turns that a new segment's prompt holds under other ids.

    Where `branch` is set, everything before that turn (tokens, log-probabilities, steps, what was spent) is the record
    of its source, so that this one stands by itself; what was sampled here begins at `branch_start`.
    """

    group: int
    member: int
    task: Task
    seed: int
    tokens: tuple[int, ...]
    sources: tuple[int, ...]
    action_mask: tuple[bool, ...]
    behavior_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    turn_ids: tuple[int, ...]
    prompt_length: int
    stop: StopReason
    verdict: Verdict | None
    attribution: Attribution | None
    receipt: Receipt
    breaks: tuple[Break, ...] = ()
    retokenize_mismatch: int = 0
    kept: tuple[bytes, ...] | None = None  # a set a token (`sampling.kept_bits`), b"" where nothing was cut
    token_mismatch: bool = False  # a sample came whose tokens and log-probabilities do not belong together
    branch: Branch | None = None  # where it left its source; None: it ran from the reset
    fork: Fork | None = None  # set where it was planned as a branch and there was a state to branch from

    @property
    def segments(self) -> int:
        """How many contexts it was sampled in: 1, unless the history was rendered anew."""
        return 1 + len(self.breaks)

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """(first token, first token after the prompt, first token after the segment) of each segment."""
        starts = [(0, self.prompt_length), *((cut.start, cut.start + cut.prompt_length) for cut in self.breaks)]
        ends = [*(cut.start for cut in self.breaks), len(self.tokens)]
        return tuple((start, prompt, end) for (start, prompt), end in zip(starts, ends, strict=True))

    @property
    def branch_start(self) -> int:
        """The first token that is not its source's: 0 for one that ran from the reset."""
        if self.branch is None:
            return 0
        return next((n for n, turn in enumerate(self.turn_ids) if turn >= self.branch.turn), len(self.tokens))

    @property
    def unscored(self) -> bool:
        """No verdict, or a verdict that measured nothing. Never the same as a score of 0."""
        return self.verdict is None or self.verdict.outcome is None

    @property
    def valid(self) -> bool:
        """Whether this member counts in its group's baseline and carries a loss."""
        return not (self.unscored or (self.attribution is not None and self.attribution.leaves_batch))

    @property
    def success(self) -> bool:
        return self.valid and self.verdict is not None and self.verdict.success

    @property
    def violated(self) -> bool:
        return self.verdict is not None and self.verdict.violated

    @property
    def tool_calls(self) -> int:
        return self.receipt.ledger.tool_calls

    @property
    def turns(self) -> int:
        return len({turn for turn, chosen in zip(self.turn_ids, self.action_mask, strict=True) if chosen})

    @property
    def truncated(self) -> bool:
        """A limit ended it, not the policy and not the task."""
        return self.stop in (StopReason.TOKEN_CAP, StopReason.BUDGET, StopReason.TIMEOUT, StopReason.LOW_EVIDENCE)

    @property
    def oldest_version(self) -> int | None:
        """The oldest params that sampled any of its tokens; None where a teacher wrote it."""
        return min((version for version in set(self.policy_versions) if version >= 0), default=None)


def bounded(observation: Observation, max_chars: int) -> Observation:
    """The observation with no message longer than `max_chars`: head and tail stay, the middle becomes a count.

    A cut observation that was `ok` becomes `truncated`; one that fits comes back as it is.
    """
    if all(len(message.content) <= max_chars for message in observation.content):
        return observation
    messages = tuple(replace(message, content=_cut(message.content, max_chars)) for message in observation.content)
    status = Status.TRUNCATED if observation.status is Status.OK else observation.status
    return replace(observation, content=messages, status=status)


def _cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    head, tail = max_chars - max_chars // 3, max_chars // 3
    return f"{text[:head]}\n[{len(text) - head - tail} characters cut]\n{text[len(text) - tail :]}"
