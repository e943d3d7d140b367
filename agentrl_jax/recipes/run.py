"""What the stages of one run share, and where it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.learner.placement import placed
from agentrl_jax.learner.score import Scorer
from agentrl_jax.learner.state import LearnerState, init_state
from agentrl_jax.models.lora import trained, with_trained
from agentrl_jax.protocol import Suite
from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.directory import require_space
from agentrl_jax.recipes.guards import Drops
from agentrl_jax.recipes.optimizing import memory_kind
from agentrl_jax.recipes.policy import Policy, scorer
from agentrl_jax.recipes.shares import home, position
from agentrl_jax.recipes.transcripts import transcript
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collector import Collector, Finished
from agentrl_jax.rollout.episode import EpisodePlan
from agentrl_jax.rollout.pool import Pool
from agentrl_jax.rollout.ray_pool import RayPool
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.sampling import Cut
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.clock import Clock
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.external import ExternalSampler
from agentrl_jax.runtime.hosts import Hosts
from agentrl_jax.runtime.interrupts import Interrupts
from agentrl_jax.runtime.progress import Progress
from agentrl_jax.runtime.publish import publish
from agentrl_jax.runtime.sinks import RunSinks, write_json
from agentrl_jax.runtime.store import Writer

_TRANSCRIPTS_A_STEP = 2
_GLANCE_S = 0.25  # how long a wait for episodes goes on before the signals are looked at


@dataclass
class Run:
    """What the stages of one run share, and where it stands: `step` in the stage, `at` over all stages."""

    config: RunConfig
    directory: Path
    suite: Suite
    policy: Policy
    engine: Engine | ExternalSampler
    pool: Pool | RayPool
    collector: Collector  # it alone advances the engine and asks the pool
    sinks: RunSinks
    progress: Progress
    checkpoints: Checkpoints
    mesh: jax.sharding.Mesh
    params: Any
    buffer: Buffer
    interrupts: Interrupts
    finished: Finished = field(default_factory=Finished)  # where the episodes that are to be trained on arrive
    taken: list[Trajectory] = field(default_factory=list)  # out of the buffer, for the step that is not recorded yet
    clock: Clock = field(default_factory=Clock)
    stage: str = "before"
    stage_done: bool = False
    step: int = 0
    at: int = 0
    version: int = 0  # publications so far
    published: Any = None  # the params that the sampler holds
    trained_tokens: int = 0
    restored: dict[str, Any] | None = None
    state: Any = None  # LearnerState, once a stage has begun
    recorded: dict[str, Any] | None = None  # where the last recorded step stood
    measured: tuple[int, float] | None = None  # `at` and success of the newest evaluation
    kept: int = 0  # `at` of the newest checkpoint that this process wrote
    store: Writer | None = None  # where the trajectories go that are trained on
    stored_left: list[int] = field(default_factory=list)  # trajectories in the stores of processes that are no more
    shown: list[int] = field(default_factory=list)  # trajectories in each store that sft learned from, when it read it
    reference: Any = None  # the frozen anchor of a KL term, where there is one
    hosts: Hosts = field(default_factory=Hosts)  # the processes that train it together

    @cached_property
    def home(self) -> Path:
        """Where this process writes what it sampled."""
        return home(self.directory, self.hosts)

    @cached_property
    def drops(self) -> Drops:
        return Drops(self.config.rollout.max_consecutive_drops, self.home)

    # -- placement ---------------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> jax.sharding.NamedSharding:
        return sharding.rows(self.mesh)

    @cached_property
    def everywhere(self) -> jax.sharding.NamedSharding:
        return sharding.replicated(self.mesh)

    @cached_property
    def scorer(self) -> Scorer:
        """The policy as the learner sees it."""
        return scorer(self.config, self.policy)

    # -- sampling ----------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Push the current params to the sampler, once a change."""
        if self.published is not self.params:
            with self.clock.phase("publish"):
                self.version += 1
                if isinstance(self.engine, ExternalSampler):  # what it takes is exported, not laid out for decoding
                    self.engine.publish(self.params, self.version)
                else:
                    self.collector.publish(self._laid_out(self.engine.sharding), self.version)
                self.published = self.params

    def _laid_out(self, sampling: Any) -> Any:
        """The params as the sampler reads them: on its devices at once where they learn too, in the same order."""
        if list(sampling.mesh.devices.flat) == list(self.mesh.devices.flat):
            return publish(self.policy.model, self.params, sampling)
        return publish(self.policy.model, self.params, self.everywhere, onto=sampling)

    def collect(self, plans: Sequence[EpisodePlan], *, temperature: float, cut: Cut) -> Iterator[Trajectory]:
        """Run these before any that wait, and yield each trajectory as it finishes."""
        finished = Finished()
        self.start(plans, finished, temperature=temperature, cut=cut, first=True)
        while finished.owed:
            yield from self.arrived(finished, wait=True)

    def start(
        self, plans: Sequence[EpisodePlan], finished: Finished, *, temperature: float, cut: Cut, first: bool = False
    ) -> None:
        """Have these episodes run beside whatever else does; they arrive at `finished`."""
        require_space(self.directory, self.config.rollout.free_space_gb)
        self.collector.start(plans, finished, temperature=temperature, cut=cut, first=first)

    def arrived(self, finished: Finished, *, wait: bool = False) -> list[Trajectory]:
        """What is over by now, where `wait` at least one; their receipts are written and the dropped are counted."""
        found = self.collector.take(finished)
        while wait and not found:
            self.interrupts.check()
            found = self.collector.take(finished, wait_s=_GLANCE_S)
        for trajectory in found:
            receipt = trajectory.receipt.to_json()
            self.sinks.receipt(receipt)
            if trajectory.attribution is not None and trajectory.attribution.leaves_batch:
                self.sinks.broken(receipt)
            self.drops.add(trajectory)
        return found

    # -- a stage's steps ---------------------------------------------------------------------------------------

    def begin(self, optimizer: optax.GradientTransformation, *, reference: bool = False) -> tuple[LearnerState, int]:
        """The learner's state at the start of the stage, or as a checkpoint left it, and the step to go on from.

        With `reference` the params at the start of the stage are kept, frozen, as `self.reference`.
        """
        settings = self.config.sft if self.stage == "sft" else self.config.loop
        assert settings is not None
        before = None if self.state is None else self.state.opt_state
        state = init_state(optimizer, self.params, before=before, memory_kind=memory_kind(settings))
        learned = trained(self.params)
        copied = jax.jit(lambda part: jax.tree.map(jnp.copy, part), out_shardings=placed(learned))
        self.reference = with_trained(self.params, copied(learned)) if reference else None
        start = 0
        if self.restored is not None:
            record, self.restored = self.restored, None
            if record["stage"] == self.stage:
                state, self.reference = self._restore(state)
                start, self.stage_done = int(record["step"]), bool(record["done"])
        self.params, self.state = state.params, state
        self.progress.stage(self.stage, settings.steps, start)
        return state, start

    def _restore(self, template: LearnerState) -> tuple[LearnerState, Any]:
        found = self.checkpoints.restore(self.at, self._tree(template)).state
        self.published = None
        reference = found.get("reference")
        params = with_trained(template.params, found["params"])
        state = LearnerState(params, found["opt_state"], found["step"])
        return state, None if reference is None else with_trained(template.params, reference)

    def _tree(self, state: LearnerState) -> dict[str, Any]:
        """What a checkpoint holds. What is frozen comes back from where it came from."""
        tree = {**state._asdict(), "params": trained(state.params)}
        return tree if self.reference is None else {**tree, "reference": trained(self.reference)}

    def learned(self, state: LearnerState, info: Any, *, trained_tokens: int) -> dict[str, Any]:
        """Take in one update: wait for it, refuse what is not finite, count, and return the figures of the step."""
        self.state, self.params, self.published = state, state.params, None
        self.step, self.at = self.step + 1, self.at + 1
        self.trained_tokens += trained_tokens
        figures = info.to_host()
        if not figures["finite"]:
            raise UserError(
                f"stage {self.stage}, step {self.step}: the gradient is not finite (norm {figures['grad_norm']}); the "
                "update was not applied. Lower the learning rate and start again under another name"
            )
        return {"trained_tokens": trained_tokens, **figures}

    def record(self, row: dict[str, Any], *, done: bool) -> None:
        """Write the figures of a step. From here on a run that is stopped keeps this step."""
        self.stage_done = done
        row = {"stage": self.stage, "step": self.step, "at": self.at, "wall_s": round(self.clock.total(), 3), **row}
        lap = self.clock.lap()
        row["tokens_per_s"] = round(row["trained_tokens"] / lap, 1)
        if "waited_s" in row:
            row["learner_idle"] = round(row["waited_s"] / lap, 4)
        self.sinks.metrics(row)
        if self.hosts.leads:
            write_json(self.directory / "timing.json", self.clock.seconds)
        shown = ("loss", "success", "reward", "violation_rate", "tokens_per_s")
        self.progress.update(self.step, **{name: row.get(name) for name in shown})
        self.taken = []
        self.recorded = self._position(done)

    def end_stage(self) -> None:
        """Have the recorded step be the stage's last."""
        assert self.recorded is not None
        self.stage_done = True
        self.recorded = {**self.recorded, "done": True}

    def settle(self) -> None:
        """The end of a step: checkpoint when due, and stop where a signal asked for it."""
        if not any(self.hosts.exchange(self.checkpoints.saving)):
            self.checkpoints.check()
        if self.stage_done or self.step % self.config.checkpoints.every == 0:
            self.keep()
        if self.hosts.count == 1:  # else only at a meeting: one that stopped by itself would leave the others waiting
            self.interrupts.check()

    def keep(self) -> None:
        """Checkpoint the last recorded step, unless that is done or the params have gone on since.

        Of the episodes under way those that are over are kept; the others begin anew.
        """
        if self.recorded is None or self.recorded["at"] != self.at or self.kept == self.at:
            return
        buffer = {"group_size": self.buffer.group_size, "counts": dict(self.buffer.counts)}
        recorded = {**self.recorded, "buffer": buffer, "processes": self.hosts.count}
        record = position(self.hosts, recorded, self.stored_left)
        score = self.measured[1] if self.measured is not None and self.measured[0] == self.at else None
        with self.clock.phase("checkpoint"):
            self.checkpoints.save(self.at, self._tree(self.state), record, held=self.waiting, score=score)
        self.kept = self.at

    @property
    def waiting(self) -> list[Trajectory]:
        """What was sampled for steps that are not recorded yet, whether a step has begun with it or not."""
        return [*self.buffer.held(), *self.taken]

    def _position(self, done: bool) -> dict[str, Any]:
        """Where the run stands, but for the buffer."""
        return {
            "stage": self.stage,
            "step": self.step,
            "at": self.at,
            "done": done,
            "seed": self.config.seed,
            # A resumed run publishes what it restores; if that was published before, it takes the same number again.
            "version": self.version - (self.published is self.params),
            "trained_tokens": self.trained_tokens,
            "seconds": self.clock.seconds,
            "stored": None if self.store is None else len(self.store),
            "shown": self.shown,
        }

    def store_all(self, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Keep the trajectories of the step, where the run has a store."""
        if self.store is not None:
            with self.clock.phase("store"):
                mine = self.hosts.share(len(groups))
                self.store.append([t for group in groups[mine.start : mine.stop] for t in group], step=self.at)

    def transcribe(
        self, groups: Sequence[Sequence[Trajectory]], rewards: np.ndarray, advantages: np.ndarray,
        per_turn: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """A few transcripts of the step, those with the largest advantages first: they say what it learned."""
        largest = np.abs(advantages if per_turn is None else advantages[..., None] + per_turn)
        largest = largest.reshape(*advantages.shape, -1).max(-1)
        flat = [(float(largest[p, t.member]), p, t) for p in self.hosts.share(len(groups)) for t in groups[p]]
        for _, p, t in sorted(flat, key=lambda item: -item[0])[:_TRANSCRIPTS_A_STEP]:
            own = None if per_turn is None else per_turn[p, t.member].tolist()
            reward, advantage = float(rewards[p, t.member]), float(advantages[p, t.member])
            row = transcript(t, self.policy.tokenizer, reward=reward, advantage=advantage, per_turn=own)
            self.sinks.transcript({"stage": self.stage, "step": self.step, "at": self.at, **row})

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of `evaluations.jsonl`."""
        path = self.directory / "evaluations.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def success(self) -> float | None:
        """What an evaluation in the middle of the stage has found at this step; None where there was none."""
        rows = self.evaluations() if self.hosts.leads else []  # another may see the file without its last lines
        found = [row["success"] for row in rows if row["at"] == self.at and not row.get("final")]
        return self.hosts.first(float(found[-1]) if found else None)

    def evaluated(self, row: dict[str, Any], *, best: bool = True) -> None:
        """Write what an evaluation has found; where it counts for the `best` checkpoints, this step's has its score."""
        self.sinks.evaluation(row)
        self.clock.lap()  # rates of a step are without it
        if best:
            self.measured = self.at, float(row["success"])
        self.progress.note(
            f"{row['split']} success {100 * row['success']:.1f} %, violations {100 * row['violation_rate']:.1f} %, "
            f"{row['mean_tool_calls']:.1f} tool calls ({row['scored']} episodes)"
        )

    def assert_compiled_once(self, *pieces: Any) -> None:
        """Every device function of the stage met one shape: a second compilation is a defect, never a slow step."""
        sizes: dict[str, int] = dict(self.engine.cache_sizes())
        for piece in pieces:
            sizes |= piece.cache_sizes() if hasattr(piece, "cache_sizes") else {"credit": piece._cache_size()}
        again = {name: size for name, size in sizes.items() if size > 1}
        if again:
            raise RuntimeError(f"device functions compiled more than once: {again}")
