"""Drive many episodes at once: a sampler on one side, environment workers on the other, neither waiting for the other.

What is sampled depends on the plan and the params only, never on timing: a turn draws from a key of its own, whatever
slot it has, and which episodes share a prompt's computation follows from their places in the plan.
How one episode goes on from the state of another: `rollout.branching`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import inf

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Action, Attribution, Cause, Observation, StopReason, Verdict
from agentrl_jax.rollout.attribution import (
    ReplayEvidence,
    attribute,
    failed_verdict,
    judge_replay,
    stop_of,
    wants_replay,
)
from agentrl_jax.rollout.branching import Branches
from agentrl_jax.rollout.budgets import EvidenceRule
from agentrl_jax.rollout.codec import to_json
from agentrl_jax.rollout.episode import (
    MAX_SEGMENTS,
    Act,
    Ask,
    Episode,
    EpisodePlan,
    Move,
    Renderer,
    TokenMismatch,
    Unrenderable,
)
from agentrl_jax.rollout.live import LiveEpisode, Unit, units_of
from agentrl_jax.rollout.places import nearby
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.pool import Pool
from agentrl_jax.rollout.ray_pool import RayPool
from agentrl_jax.rollout.records import Fork, Trajectory
from agentrl_jax.rollout.sampling import WHOLE, Cut, Sample, Sampler, SampleRequest
from agentrl_jax.rollout.wire import Capture, Failure, Finish, Perform, Replay, Reply, Reset

__all__ = ["Driver", "EpisodePlan", "collect", "play"]
_GLANCE_S = 0.25  # how long a wait for the environments goes on before anything else is looked at
_NAMED = 4  # episodes that a message names
MAX_HEALS = 3  # per episode: an environment that loses its state more often than this is broken


def collect(
    plan: Sequence[EpisodePlan],
    sampler: Sampler,
    pool: Pool | RayPool,
    renderer: Renderer,
    *,
    max_turn_tokens: int,
    temperature: float,
    cut: Cut = WHOLE,
    grammar: str | None = None,
    healing: bool = True,
    evidence: EvidenceRule | None = None,
    max_segments: int = MAX_SEGMENTS,
    stall_s: float = inf,
    alive: Callable[[], None] = lambda: None,
) -> Iterator[Trajectory]:
    """LiveEpisode every episode of `plan` and yield each trajectory as it finishes, failed ones too, with their cause.

    Members of a group that stand together in the plan start together, as many as slots and workers allow, and prefill
    their common prompt once. A worker that dies or hangs is replaced and, with `healing`, its state is rebuilt
    by replay where the environment allows it; no other episode waits. Closing the iterator early kills what runs.
    Every turn is sampled with `temperature`, `cut` and `grammar`; see `SampleRequest`.
    `alive` is called between moves; what it raises ends the collection there. Raises `UserError` that names who waits
    for what once no environment has answered and no turn has been sampled for `stall_s` seconds.
    """
    driver = Driver(
        sampler, pool, renderer, max_turn_tokens=max_turn_tokens, grammar=grammar, healing=healing, evidence=evidence,
        max_segments=max_segments, stall_s=stall_s,
    )  # fmt: skip
    found: deque[Trajectory] = deque()
    driver.add(plan, temperature=temperature, cut=cut, deliver=found.append)
    try:
        while not driver.over:
            alive()
            driver.advance()
            while found:
                yield found.popleft()
    finally:
        driver.abandon()


class Driver:
    """Episodes under way. More can be added at any time; they take up slots and workers in the order they came in.

    Members of a group that stand together in a plan start together and prefill their common prompt once. The settings
    hold for every episode; see `collect`.
    """

    def __init__(self, sampler: Sampler, pool: Pool | RayPool, renderer: Renderer, *, max_turn_tokens: int,
                 grammar: str | None = None, healing: bool = True, evidence: EvidenceRule | None = None,
                 max_segments: int = MAX_SEGMENTS, stall_s: float = inf) -> None:  # fmt: skip
        self.sampler, self.pool, self.renderer = sampler, pool, renderer
        self.max_turn_tokens, self.grammar = max_turn_tokens, grammar
        self.healing, self.evidence, self.max_segments = healing, evidence, max_segments
        self.waiting: deque[Unit] = deque()
        self.idle_slots = set(range(sampler.slots))
        self.near: int = getattr(sampler, "near", sampler.slots)  # without a word on it, all share with all
        self.branching = Branches(self)
        self.by_slot: dict[int, LiveEpisode] = {}
        self.by_worker: dict[int, LiveEpisode] = {}
        self.stall_s, self.moved_at = stall_s, time.monotonic()
        self.freed = False  # slots and workers may be there for units that wait
        self.limits = {"deadlines": to_json(pool.deadlines), "max_turn_tokens": max_turn_tokens}

    @property
    def over(self) -> bool:
        """Whether every episode has been delivered."""
        return not (self.waiting or self.by_slot)

    def add(self, plan: Sequence[EpisodePlan], *, temperature: float, cut: Cut = WHOLE,
            deliver: Callable[[Trajectory], None], first: bool = False) -> None:  # fmt: skip
        """Have these run too, where `first` before those that wait; `deliver` is called with each trajectory."""
        block = min(self.sampler.slots, self.pool.workers)
        units = units_of(plan, block, temperature, cut, deliver)
        if self.over:
            self.moved_at = time.monotonic()
        self.waiting = deque([*units, *self.waiting] if first else [*self.waiting, *units])
        self.freed = True

    def advance(self, glance_s: float = _GLANCE_S) -> None:
        """Hand on every answer that is there by now, and sample a little; waits at most `glance_s` for an answer.

        Raises `UserError` that names who waits for what once nothing has moved for `stall_s` seconds.
        """
        if self.freed:
            self.freed = False
            self._start_units()
        replies = self.pool.poll(0.0 if self.sampler.busy else glance_s)
        for worker, reply in replies:
            if worker in self.by_worker:
                self._on_reply(self.by_worker[worker], reply)
        samples = self.sampler.advance() if self.sampler.busy else []
        for sample in samples:
            self._on_sample(self.by_slot[sample.slot], sample)
        if replies or samples:
            self.moved_at = time.monotonic()
        elif not (self.over or self.sampler.busy or self.pool.expects):
            raise RuntimeError(f"nothing is left to wait for; episodes not over: {self._stuck()}")
        elif time.monotonic() - self.moved_at > self.stall_s:
            raise UserError(
                f"nothing has moved for {self.stall_s:g} s (rollout.stall_s); waiting: {self._stuck()}. Look at what "
                "they wait for (an inference server, a worker), then --resume; raise the setting where turns take long"
            )

    def _stuck(self) -> str:
        """Who waits for what, the first few."""
        waits = {run: "its source" if run.waiting else self.pool.phase(run.worker) for run in self.by_slot.values()}
        phases = ((run, "sample" if run.sampling else phase) for run, phase in waits.items())
        names = [f"task {run.plan.task.id!r} member {run.plan.member} in {phase}" for run, phase in phases]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more or f"none, {len(self.waiting)} units not begun"

    def abandon(self) -> None:
        for worker in list(self.by_worker):
            del self.by_worker[worker]
            self.pool.release(worker)

    def _start_units(self) -> None:
        """Start units in their order. The first that lacks slots or workers holds back the rest, or it would starve."""
        while self.waiting and len(self.waiting[0].plans) <= len(self.idle_slots):
            unit = self.waiting[0]
            slots = nearby(self.idle_slots, len(unit.plans), self.near)
            if unit.branches and len(slots) <= self.near and slots[0] // self.near != slots[-1] // self.near:
                return  # a branch takes up what its source's slot holds: the unit waits for a device with room for it
            workers = self._acquire(len(unit.plans))
            if workers is None:
                return
            self.waiting.popleft()
            for slot, worker, plan in zip(slots, workers, unit.plans, strict=True):
                self._start(unit, worker, slot, plan)

    def _acquire(self, count: int) -> list[int] | None:
        workers: list[int] = []
        while len(workers) < count:
            worker = self.pool.acquire()
            if worker is None:
                for taken in reversed(workers):
                    self.pool.release(taken)
                return None
            workers.append(worker)
        return workers

    def _start(self, unit: Unit, worker: int, slot: int, plan: EpisodePlan) -> None:
        run = LiveEpisode(plan=plan, slot=slot, worker=worker, episode=self._episode(plan), unit=unit)
        self.by_slot[slot] = self.by_worker[worker] = run
        self.idle_slots.discard(slot)
        if plan.member in unit.sources:
            unit.kin[plan.member] = run
        if plan.branch is None:
            self._reset(run)
        else:
            self.branching.wait(run, plan.branch)

    def _episode(self, plan: EpisodePlan) -> Episode:
        return Episode(
            plan, self.pool.spec, self.renderer, max_turn_tokens=self.max_turn_tokens, evidence=self.evidence,
            max_segments=self.max_segments,
        )  # fmt: skip

    def _reset(self, run: LiveEpisode) -> None:
        run.resetting = True
        run.unit.resetting += 1
        self.pool.submit(run.worker, Reset(run.plan.task, run.plan.seed))

    def start_anew(self, run: LiveEpisode, fork: Fork | None = None) -> None:
        """A branch that has nowhere to branch from, or was refused its state, runs from the reset."""
        run.episode, run.queued = self._episode(run.plan), None
        run.episode.fork = fork
        self._reset(run)

    def _on_reply(self, run: LiveEpisode, reply: Reply) -> None:
        if isinstance(reply, Failure) and reply.phase in ("idle", "start") and self.pool.busy(run.worker):
            return  # of the process before: the command that has been sent since started another
        if self.branching.takes(run, reply):
            return
        if reply.retried:
            run.episode.meter.retry_infrastructure(reply.retried)
        if run.lost is not None:
            self._on_replay(run, run.lost, reply)
        elif isinstance(reply, Failure):
            self._on_failure(run, reply)
        elif isinstance(reply.value, Verdict):
            self._close(run, reply.value)
        elif isinstance(reply.value, Observation) and run.resetting:
            self._on_reset(run, reply.value)
        elif isinstance(reply.value, Observation):
            self._on_observation(run, reply.value, reply.wall_ms)

    def _on_reset(self, run: LiveEpisode, observation: Observation) -> None:
        try:
            move = run.episode.begin(observation)
        except Unrenderable as error:
            return self._lose(run, Failure(kind="garbage", phase="reset", message=str(error)), None)
        if isinstance(move, Ask):
            run.unit.asks[run.slot] = move
        else:
            self._move(run, move)
        self._settle_unit(run)

    def _settle_unit(self, run: LiveEpisode) -> None:
        """Once the last of a unit's resets is answered, submit its prompts as one wave; equal ones are shared."""
        unit, run.resetting = run.unit, False
        unit.resetting -= 1
        if unit.resetting:
            return
        leaders: dict[tuple[int, ...], int] = {}
        asks, unit.asks = sorted(unit.asks.items()), {}
        for slot, ask in asks:
            leader = leaders.setdefault(ask.ids, slot)
            self.ask(self.by_slot[slot], ask, share_with=None if leader == slot else leader)

    def _on_observation(self, run: LiveEpisode, observation: Observation, wall_ms: float) -> None:
        try:
            move = run.episode.on_observation(observation, wall_ms)
        except Unrenderable as error:
            return self._lose(run, Failure(kind="garbage", phase="step", message=str(error)), None)
        self._move(run, move)

    def _on_sample(self, run: LiveEpisode, sample: Sample) -> None:
        run.sampling = False
        if run.doom is not None:
            self._fail(run, run.doom)
            return
        if run.refused is not None:
            fork, run.refused = run.refused, None
            return self.start_anew(run, fork)
        if sample.stop == "error":
            return self._unsampled(run, f"the sampler failed: {sample.message or 'no reason was given'}")
        if sample.stop == "context" and not sample.ids and run.episode.turn == 0:
            return self._unsampled(run, f"the prompt is too long: {sample.message or 'context is full'}")
        try:
            move = run.episode.on_sample(sample)
        except (
            TokenMismatch,
            Unrenderable,
        ) as error:  # this episode is lost, and counted; it is never trained on in part
            return self._lose(run, Failure(kind="garbage", phase="sample", message=str(error)), None)
        self._move(run, move)

    def _unsampled(self, run: LiveEpisode, reason: str) -> None:
        """No turn was sampled: nothing the policy did, so the episode leaves the batch."""
        run.attribution = Attribution(cause=Cause.ENVIRONMENT, evidence=reason)
        run.episode.give_up(StopReason.FAILURE)
        self._close(run, failed_verdict(run.attribution))

    def _move(self, run: LiveEpisode, move: Move) -> None:
        if isinstance(move, Ask):
            return self.branching.ask(run, move)
        run.queued = Perform(move.action) if isinstance(move, Act) else Finish(move.stop)
        self.proceed(run)

    def proceed(self, run: LiveEpisode) -> None:
        """Ask of the worker what is next for it, once its state is there; first what branches need of that state."""
        if run.lost is not None or run.capturing or run.forking is not None:
            return
        if run.captures:
            run.capturing = True
            self.pool.submit(run.worker, Capture())
        elif run.queued is not None:
            command, run.queued = run.queued, None
            self.pool.submit(run.worker, command)

    def ask(self, run: LiveEpisode, ask: Ask, *, share_with: int | None = None, fork_from: int | None = None) -> None:
        """Submit a turn; see `SampleRequest` for whose computation it takes up."""
        run.sampling, cut = True, run.unit.cut
        self.sampler.submit(
            SampleRequest(
                slot=run.slot, key=(*run.plan.key, ask.turn), ids=ask.ids, fresh=ask.fresh or fork_from is not None,
                share_with=share_with, fork_from=fork_from,
                max_tokens=ask.max_tokens, temperature=run.unit.temperature,
                top_k=cut.top_k, top_p=cut.top_p, min_p=cut.min_p, grammar=self.grammar,
            )
        )  # fmt: skip

    def _on_failure(self, run: LiveEpisode, failure: Failure) -> None:
        if (
            run.resetting
            and failure.kind in ("timeout", "crash")
            and run.episode.meter.infrastructure_retries_left() > 0
        ):
            run.episode.meter.retry_infrastructure()
            return self.pool.submit(run.worker, Reset(run.plan.task, run.plan.seed))
        self.heal(run, failure, possible=not run.resetting and wants_replay(failure, self.pool.spec))

    def heal(self, run: LiveEpisode, failure: Failure, *, possible: bool) -> None:
        """Rebuild the state that a worker has lost by replay, where that is `possible`."""
        if self.healing and possible and run.episode.healed < MAX_HEALS:
            run.lost = failure
            self.pool.submit(run.worker, Replay(run.plan.task, run.plan.seed, self._asked(run)))
        else:
            self._lose(run, failure, None)

    def _asked(self, run: LiveEpisode) -> tuple[Action, ...]:
        """Every action the lost environment was asked to perform, the unanswered one last."""
        pending = run.episode.pending
        if pending is None or run.queued is not None:  # a queued action was never asked of it
            return run.episode.performed
        return (*run.episode.performed, pending)

    def _on_replay(self, run: LiveEpisode, lost: Failure, reply: Reply) -> None:
        actions = self._asked(run)
        failure = reply if isinstance(reply, Failure) else None
        observations = reply.replayed if isinstance(reply, Failure) else reply.value
        assert isinstance(observations, tuple)
        evidence = judge_replay(run.episode.hashes, observations, failure, len(actions) + 1)
        run.lost = None
        if evidence.finding != "not_reproduced":
            return self._lose(run, lost, evidence)
        run.episode.healed += 1
        if run.queued is None and run.episode.pending is not None:
            return self._on_observation(run, observations[-1], lost.wall_ms)
        self.proceed(run)

    def _lose(self, run: LiveEpisode, failure: Failure, evidence: ReplayEvidence | None) -> None:
        """The environment is gone for good: settle the cause, and end the episode as soon as its slot is idle."""
        run.attribution = attribute(failure, evidence)
        if run.sampling:
            run.doom = failure
        else:
            self._fail(run, failure)

    def _fail(self, run: LiveEpisode, failure: Failure) -> None:
        assert run.attribution is not None
        if run.episode.stop is None:  # else it had ended, and only its measurement is lost
            exception, asked = failure.exception or failure.kind, run.queued is None
            run.episode.on_failure(stop_of(failure), exception, failure.wall_ms, asked=asked)
        run.unit.asks.pop(run.slot, None)
        self._close(run, failure.value or failed_verdict(run.attribution))
        if run.resetting:
            self._settle_unit(run)

    def _close(self, run: LiveEpisode, verdict: Verdict | None) -> None:
        pool = self.pool
        found = run.episode.trajectory(
            verdict, run.attribution, verifier_version=pool.verifier_version, ref=pool.ref, limits=self.limits
        )
        del self.by_slot[run.slot], self.by_worker[run.worker]
        pool.release(run.worker)
        self.idle_slots.add(run.slot)
        self.freed = True
        run.over = True
        run.unit.deliver(found)
        self.branching.ended(run)
