"""One episode as a pure state machine: observations and samples in, moves out. No processes, no sampler.

Whoever drives it performs the move (`Ask` the sampler, `Act` in the environment) and feeds the answer back, until
it is `Done`. Tokens are appended as they were sampled or rendered and never encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

from agentrl_jax import __version__
from agentrl_jax.batch import Source
from agentrl_jax.protocol import (
    Action,
    Attribution,
    Budget,
    EnvironmentRef,
    EnvironmentSpec,
    Message,
    Observation,
    StopReason,
    Task,
    ToolCall,
    Verdict,
)
from agentrl_jax.rollout.budgets import EvidenceRule, Meter, Spent
from agentrl_jax.rollout.codec import digest, to_json
from agentrl_jax.rollout.parallel import known_only, numbered, with_unknown
from agentrl_jax.rollout.records import (
    FORMAT,
    GENESIS,
    Branch,
    Break,
    Fork,
    Receipt,
    Step,
    Trajectory,
    observation_hash,
    step_digest,
)
from agentrl_jax.rollout.renderers import Following, Rendered, Said
from agentrl_jax.rollout.sampling import Sample

MAX_SEGMENTS = 64  # an episode that would open more is stopped: each one reads its whole history anew
NO_HASH = ""  # in place of the hash of an observation that never came


class Renderer(Protocol):
    """What an episode needs of a renderer: `renderers.ChatRenderer`, `template_renderer.TemplateRenderer`."""

    @property
    def end_id(self) -> int: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    def start(self, messages: tuple[Message, ...]) -> Rendered: ...
    def follow(self, talk: Sequence[Message | Said], messages: tuple[Message, ...]) -> Following: ...
    def turn(self, item: ToolCall | str) -> tuple[int, ...]: ...
    def parse(self, ids: tuple[int, ...]) -> Action: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlan:
    """Which episode to run. `key` starts the sampling key of each turn: unique per (seed, step, task, member).

    With a `branch` it goes on from where that member, of the same group, task and seed, stood before that turn; from
    the last turn that it came to where it ended earlier; from the reset where that was its first.
    """

    group: int
    member: int
    task: Task
    seed: int
    key: tuple[int, ...] = ()
    branch: Branch | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """Sample a turn: `ids` are new to the sampler; `fresh` starts its context, with a new segment too."""

    ids: tuple[int, ...]
    fresh: bool
    turn: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Act:
    """Perform this in the environment."""

    action: Action


@dataclass(frozen=True, slots=True)
class Done:
    """The episode is over; it is to be verified and closed."""

    stop: StopReason


Move = Ask | Act | Done


class _Stretch(NamedTuple):
    """Tokens that came together: sampled in one turn, or rendered for one."""

    ids: tuple[int, ...]
    sources: tuple[int, ...]
    chosen: bool
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    kept: tuple[bytes, ...] | None
    turn: int


class _Mark(NamedTuple):
    """How much of the record there was when a turn was asked for."""

    talk: int
    steps: int
    breaks: int
    stretches: int
    length: int
    retokenized: int
    spent: Spent


class TokenMismatch(ValueError):
    """A sample whose tokens, log-probabilities and versions do not belong together: nothing can be learned from it."""


class Unrenderable(ValueError):
    """Messages that the renderer refuses: a role that the frame lacks, an order that the chat template forbids."""


class Episode:
    """The state of one episode and the rules by which it goes on.

    Where the renderer says that the history, rendered anew, is no extension of what was sampled, a new segment opens:
    the sampler starts a fresh context and the trajectory bears a `Break`. After `max_segments` the episode stops.

    Calls of a turn that name no tool of the environment are answered here, each in its place among the results; the
    environment is asked to perform the others.

    `source` is `POLICY`, or `TEACHER` for turns that were written rather than sampled. Every token the policy (or
    teacher) chose has `action_mask` True and its own log-probability; every other token has False and 0.
    """

    def __init__(
        self,
        plan: EpisodePlan,
        spec: EnvironmentSpec,
        renderer: Renderer,
        *,
        max_turn_tokens: int,
        budget: Budget | None = None,
        source: Source = Source.POLICY,
        evidence: EvidenceRule | None = None,
        max_segments: int = MAX_SEGMENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.spec, self.renderer = plan, spec, renderer
        self.max_turn_tokens, self.source, self.max_segments = max_turn_tokens, source, max_segments
        self.budget = budget or spec.budget
        self._known = {tool.name: tool for tool in spec.tools}
        self.meter = Meter(self.budget, spec.tools, evidence=evidence, clock=clock)
        self.turn = 0
        self.stop: StopReason | None = None
        self.healed = 0  # lost states that a replay rebuilt
        self.branch: Branch | None = None  # where it left its source
        self.fork: Fork | None = None  # how its environment came there; set by whoever drives it
        self.prompt_length = 0
        self._reset_hash = NO_HASH
        self._steps: list[Step] = []
        self._pending: Action | None = None
        self._asked = Action(text="")  # the last turn's action, with the calls that were kept from the environment
        self._talk: list[Message | Said] = []
        self._breaks: list[Break] = []
        self._retokenized, self._mismatch = 0, False
        self._stretches: list[_Stretch] = []
        self._length = 0  # tokens in all of them
        self._marks: dict[int, _Mark] = {}  # by turn, from 1 on

    @property
    def length(self) -> int:
        """Tokens so far, of all segments."""
        return self._length

    @property
    def performed(self) -> tuple[Action, ...]:
        """The actions that the environment was asked to perform and answered."""
        return tuple(step.action for step in self._steps if step.performed and step.observation is not None)

    @property
    def hashes(self) -> tuple[str, ...]:
        """The hash of the reset's observation, then of the answer to each performed action."""
        answered = [step for step in self._steps if step.performed and step.observation is not None]
        return (self._reset_hash, *(step.observation_hash for step in answered))

    @property
    def pending(self) -> Action | None:
        """The action the environment has been asked to perform and has not answered."""
        return self._pending

    def branched(self, plan: EpisodePlan, turn: int) -> tuple[Episode, Ask]:
        """An episode of `plan` that stands where this one did before `turn`, with the record up to there as its own.

        The `Ask` is of the whole context at that point, for a sampler that holds nothing of it. Lost states that were
        rebuilt are not taken over: they are counted once. Raises `ValueError` for turn 0, and one never asked for.
        """
        if turn not in self._marks:
            raise ValueError(f"member {self.plan.member} was asked for no turn {turn} to branch before")
        mark = self._marks[turn]
        other = Episode(
            plan, self.spec, self.renderer, max_turn_tokens=self.max_turn_tokens, budget=self.budget,
            source=self.source, evidence=self.meter.evidence, max_segments=self.max_segments, clock=self.meter.clock,
        )  # fmt: skip
        other.meter.take_over(mark.spent)
        other.turn, other.prompt_length, other._reset_hash = turn, self.prompt_length, self._reset_hash
        other._talk, other._steps = self._talk[: mark.talk], self._steps[: mark.steps]
        other._breaks, other._retokenized = self._breaks[: mark.breaks], mark.retokenized
        other._stretches, other._length = self._stretches[: mark.stretches], mark.length
        other.branch = Branch(member=self.plan.member, turn=turn)
        start = other._breaks[-1].start if other._breaks else 0
        ids = tuple(chain.from_iterable([part.ids for part in other._stretches]))[start:]
        return other, other._ask(ids, fresh=True)

    def begin(self, observation: Observation) -> Ask | Done:
        """The answer to `reset`: renders the prompt. Raises `Unrenderable`, as every answer may."""
        self._reset_hash = observation_hash(observation)
        try:
            rendered = self.renderer.start(observation.content)
        except ValueError as error:
            raise Unrenderable(f"the first messages cannot be rendered: {error}") from error
        self._talk.extend(observation.content)
        self._read(*rendered)
        self.prompt_length = len(rendered.ids)
        if stop := self._ended(observation, text=False) or self.meter.exhausted():
            return self._done(stop)
        return self._ask(rendered.ids, fresh=True)

    def on_sample(self, sample: Sample) -> Move:
        """A sampled turn: parse it, and act if the budgets admit it."""
        self._say(sample)
        self.meter.spend_tokens(len(sample.ids))
        self._talk.append(Said(sample.ids))
        if sample.stop != "stop":
            return self._done(StopReason.TOKEN_CAP)
        self._asked = self.renderer.parse(sample.ids)
        action = known_only(self._asked, self._known)
        refusal = self.meter.admit(action)
        if refusal is None:
            self.meter.perform(action)
            self._pending = action
            return Act(action)
        observation = self.meter.deny(refusal)
        self._record(action, observation, wall_ms=0.0, performed=False)
        return self._next(observation)

    def on_observation(self, observation: Observation, wall_ms: float) -> Ask | Done:
        """The environment's answer to the pending action."""
        action = self._take()
        self._record(action, observation, wall_ms=wall_ms)
        observation = with_unknown(self._asked, observation, self._known)
        self.meter.settle(observation)
        text = not action.calls and action.error is None
        if stop := self._ended(observation, text=text):
            return self._done(stop)
        return self._next(observation)

    def on_failure(self, stop: StopReason, exception: str, wall_ms: float, *, asked: bool = True) -> Done:
        """No answer came: the call timed out, the environment broke or its process died. Nothing is rendered.

        `asked` is False where the pending action was never put to the environment; the receipt must not say it was.
        """
        if self._pending is not None:
            self._record(self._take(), None, wall_ms=wall_ms, performed=asked, exception=exception)
        return self._done(stop)

    def give_up(self, stop: StopReason) -> Done:
        """Whoever drives the episode ends it between two turns."""
        return self._done(stop)

    def trajectory(
        self,
        verdict: Verdict | None,
        attribution: Attribution | None,
        *,
        verifier_version: str,
        ref: EnvironmentRef | None = None,
        limits: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The finished record. Raises `RuntimeError` while the episode still goes on."""
        if self.stop is None:
            raise RuntimeError(f"episode {self.plan.task.id!r} member {self.plan.member} is not over")
        plan, parts = self.plan, self._stretches
        versions = tuple(chain.from_iterable([part.versions for part in parts]))
        receipt = self._receipt(verdict, attribution, verifier_version, ref, limits, versions)
        return Trajectory(
            group=plan.group, member=plan.member, task=plan.task, seed=plan.seed,
            tokens=tuple(chain.from_iterable([part.ids for part in parts])),
            sources=tuple(chain.from_iterable([part.sources for part in parts])),
            action_mask=tuple(chain.from_iterable([(part.chosen,) * len(part.ids) for part in parts])),
            behavior_logprobs=tuple(chain.from_iterable([part.logprobs for part in parts])), policy_versions=versions,
            turn_ids=tuple(chain.from_iterable([(part.turn,) * len(part.ids) for part in parts])),
            prompt_length=self.prompt_length, stop=self.stop,
            verdict=verdict, attribution=attribution, receipt=receipt,
            breaks=tuple(self._breaks), retokenize_mismatch=self._retokenized, token_mismatch=self._mismatch,
            kept=self._kept(), branch=self.branch, fork=self.fork,
        )  # fmt: skip

    def _kept(self) -> tuple[bytes, ...] | None:
        parts = [(b"",) * len(part.ids) if part.kept is None else part.kept for part in self._stretches]
        return tuple(chain.from_iterable(parts)) if any(any(part) for part in parts) else None

    def _receipt(self, verdict: Verdict | None, attribution: Attribution | None, verifier_version: str,
                 ref: EnvironmentRef | None, limits: Mapping[str, Any] | None, versions: tuple[int, ...],
                 ) -> Receipt:  # fmt: skip
        plan, spec = self.plan, self.spec
        assert self.stop is not None
        actions = [to_json(step.action) for step in self._steps if step.performed]
        origin = ref if ref is not None else (spec.name, spec.version)
        return Receipt(
            environment=spec.name, environment_version=spec.version, verifier_version=verifier_version,
            tools=tuple(tool.name for tool in spec.tools),
            tool_versions=tuple(tool.version for tool in spec.tools), ref=ref, task=plan.task, seed=plan.seed,
            reset_hash=self._reset_hash, steps=tuple(self._steps), ledger=self.meter.ledger(), stop=self.stop,
            policy_versions=tuple(sorted(version for version in set(versions) if version >= 0)),
            verdict=verdict, attribution=attribution, limits={"budget": to_json(self.budget), **(limits or {})},
            healed=self.healed, replay_id=digest(origin, plan.task.id, plan.seed, actions),
            trainer_version=__version__, format=FORMAT,
        )  # fmt: skip

    def _next(self, observation: Observation) -> Ask | Done:
        if stop := self.meter.exhausted():
            return self._done(stop)
        messages = numbered(self._asked, observation.content, self.turn)
        try:
            following = self.renderer.follow(self._talk, messages)
        except ValueError as error:
            raise Unrenderable(f"the answer to turn {self.turn} cannot be rendered: {error}") from error
        if following.reason:
            if len(self._breaks) + 1 >= self.max_segments:
                return self._done(StopReason.BUDGET)
            self._breaks.append(Break(start=self._length, prompt_length=len(following.ids), reason=following.reason))
            self._retokenized += following.retokenized
        self._talk.extend(messages)
        self._read(following.ids, following.sources)
        self.turn += 1
        self._marks[self.turn] = _Mark(
            len(self._talk), len(self._steps), len(self._breaks), len(self._stretches), self._length,
            self._retokenized, self.meter.mark(),
        )  # fmt: skip
        return self._ask(following.ids, fresh=bool(following.reason))

    def _ask(self, ids: tuple[int, ...], *, fresh: bool) -> Ask:
        room = min(self.max_turn_tokens, self.meter.tokens_left())
        return Ask(ids, fresh, self.turn, room)

    def _ended(self, observation: Observation, *, text: bool) -> StopReason | None:
        """`text`: the turn held no call. Then an answer that does not carry on the talk means it ended too early."""
        if observation.terminated:
            return StopReason.COMPLETED
        if text and (observation.truncated or not observation.content):
            return StopReason.EARLY_STOP
        return StopReason.BUDGET if observation.truncated else None

    def _done(self, stop: StopReason) -> Done:
        self.stop = stop
        return Done(stop)

    def _take(self) -> Action:
        if self._pending is None:
            raise RuntimeError(f"episode {self.plan.task.id!r}: an answer came that nobody asked for")
        action, self._pending = self._pending, None
        return action

    def _record(self, action: Action, observation: Observation | None, *, wall_ms: float,
                performed: bool = True, exception: str | None = None) -> None:  # fmt: skip
        hashed, ms = NO_HASH if observation is None else observation_hash(observation), round(wall_ms, 3)
        previous = self._steps[-1].digest if self._steps else GENESIS
        link = step_digest(previous, self.turn, action, observation, hashed, ms, performed, exception)
        self._steps.append(
            Step(turn=self.turn, action=action, observation=observation, observation_hash=hashed, wall_ms=ms,
                 performed=performed, exception=exception, digest=link)
        )  # fmt: skip

    def _read(self, ids: tuple[int, ...], sources: tuple[int, ...]) -> None:
        """Tokens that nobody chose."""
        self._append(_Stretch(ids, sources, False, (0.0,) * len(ids), (-1,) * len(ids), None, self.turn))

    def _say(self, sample: Sample) -> None:
        """Tokens that the policy chose."""
        count, kept = len(sample.ids), sample.kept
        if not len(sample.logprobs) == len(sample.versions) == (count if kept is None else len(kept)) == count:
            self._mismatch = True
            raise TokenMismatch(
                f"{count} tokens came with {len(sample.logprobs)} log-probabilities, {len(sample.versions)} versions "
                f"and {count if kept is None else len(kept)} kept sets"
            )
        sources = (int(self.source),) * count
        self._append(_Stretch(sample.ids, sources, True, sample.logprobs, sample.versions, kept, self.turn))

    def _append(self, stretch: _Stretch) -> None:
        self._stretches.append(stretch)
        self._length += len(stretch.ids)
