"""One episode as a pure state machine: observations and samples in, moves out. No processes, no sampler.

Whoever drives it performs the move (`Ask` the sampler, `Act` in the environment) and feeds the answer back, until
it is `Done`. Tokens are appended as they were sampled or rendered and never encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
from agentrl_jax.rollout.budgets import EvidenceRule, Meter
from agentrl_jax.rollout.codec import digest, to_json
from agentrl_jax.rollout.parallel import known_only, numbered, with_unknown
from agentrl_jax.rollout.records import GENESIS, Break, Receipt, Step, Trajectory, observation_hash
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
    """Which episode to run. `key` starts the sampling key of each turn: unique per (seed, step, task, member)."""

    group: int
    member: int
    task: Task
    seed: int
    key: tuple[int, ...] = ()


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
        self.prompt_length = 0
        self._reset_hash = NO_HASH
        self._steps: list[Step] = []
        self._pending: Action | None = None
        self._asked = Action(text="")  # the last turn's action, with the calls that were kept from the environment
        self._talk: list[Message | Said] = []
        self._breaks: list[Break] = []
        self._retokenized, self._mismatch = 0, False
        self._tokens: list[int] = []
        self._sources: list[int] = []
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[int] = []
        self._kept: list[bytes] = []

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

    def begin(self, observation: Observation) -> Ask | Done:
        """The answer to `reset`: renders the prompt. Raises `Unrenderable`, as every answer may."""
        self._reset_hash = observation_hash(observation)
        try:
            rendered = self.renderer.start(observation.content)
        except ValueError as error:
            raise Unrenderable(f"the first messages cannot be rendered: {error}") from error
        self._talk.extend(observation.content)
        self._read(rendered)
        self.prompt_length = len(rendered.ids)
        if stop := self._ended(observation, text=False):
            return self._done(stop)
        return self._ask(rendered.ids, fresh=True)

    def on_sample(self, sample: Sample) -> Move:
        """A sampled turn: parse it, and act if the budgets admit it."""
        count = len(sample.ids)
        self._append(sample.ids, [int(self.source)] * count, True, sample.logprobs, sample.versions, sample.kept)
        self.meter.spend_tokens(count)
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
        plan = self.plan
        receipt = self._receipt(verdict, attribution, verifier_version, ref, limits)
        return Trajectory(
            group=plan.group, member=plan.member, task=plan.task, seed=plan.seed,
            tokens=tuple(self._tokens), sources=tuple(self._sources), action_mask=tuple(self._mask),
            behavior_logprobs=tuple(self._logprobs), policy_versions=tuple(self._versions),
            turn_ids=tuple(self._turns), prompt_length=self.prompt_length, stop=self.stop,
            verdict=verdict, attribution=attribution, receipt=receipt,
            breaks=tuple(self._breaks), retokenize_mismatch=self._retokenized, token_mismatch=self._mismatch,
            kept=tuple(self._kept) if any(self._kept) else None,
        )  # fmt: skip

    def _receipt(self, verdict: Verdict | None, attribution: Attribution | None, verifier_version: str,
                 ref: EnvironmentRef | None, limits: Mapping[str, Any] | None) -> Receipt:  # fmt: skip
        plan, spec = self.plan, self.spec
        assert self.stop is not None
        actions = [to_json(step.action) for step in self._steps if step.performed]
        origin = ref if ref is not None else (spec.name, spec.version)
        return Receipt(
            environment=spec.name, environment_version=spec.version, verifier_version=verifier_version,
            tools=tuple(tool.name for tool in spec.tools), ref=ref, task=plan.task, seed=plan.seed,
            reset_hash=self._reset_hash, steps=tuple(self._steps), ledger=self.meter.ledger(), stop=self.stop,
            policy_versions=tuple(sorted({version for version in self._versions if version >= 0})),
            verdict=verdict, attribution=attribution, limits={"budget": to_json(self.budget), **(limits or {})},
            healed=self.healed, replay_id=digest(origin, plan.task.id, plan.seed, actions),
            trainer_version=__version__,
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
            self._breaks.append(
                Break(start=len(self._tokens), prompt_length=len(following.ids), reason=following.reason)
            )
            self._retokenized += following.retokenized
        self._talk.extend(messages)
        self._read(Rendered(following.ids, following.sources))
        self.turn += 1
        return self._ask(following.ids, fresh=bool(following.reason))

    def _ask(self, ids: tuple[int, ...], *, fresh: bool) -> Ask | Done:
        if stop := self.meter.exhausted():
            return self._done(stop)
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
        step = Step(
            turn=self.turn, action=action, observation=observation, wall_ms=round(wall_ms, 3), performed=performed,
            observation_hash=NO_HASH if observation is None else observation_hash(observation), exception=exception,
        )  # fmt: skip
        self._steps.append(step.sealed(self._steps[-1].digest if self._steps else GENESIS))

    def _read(self, rendered: Rendered) -> None:
        count = len(rendered.ids)
        self._append(rendered.ids, rendered.sources, False, (0.0,) * count, (-1,) * count)

    def _append(self, ids: tuple[int, ...], sources: Any, chosen: bool, logprobs: tuple[float, ...],
                versions: tuple[int, ...], kept: tuple[bytes, ...] | None = None) -> None:  # fmt: skip
        count = len(ids)
        kept = (b"",) * count if kept is None else kept
        if not len(sources) == len(logprobs) == len(versions) == len(kept) == count:
            self._mismatch = True
            raise TokenMismatch(
                f"{count} tokens came with {len(logprobs)} log-probabilities, {len(versions)} versions "
                f"and {len(kept)} kept sets"
            )
        self._tokens.extend(ids)
        self._sources.extend(sources)
        self._mask.extend([chosen] * count)
        self._logprobs.extend(logprobs)
        self._versions.extend(versions)
        self._turns.extend([self.turn] * count)
        self._kept.extend(kept)
