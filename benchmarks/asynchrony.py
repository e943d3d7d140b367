"""What rolling out ahead of the learner is worth where environments are slow, and that slow tasks do not pay for it.

    python -m benchmarks.asynchrony --scale 0.03

Every answer of the environment takes log-normal time, median 1 s and 99th percentile 30 s; 0.3 of its log-variance is
the task's own, so some tasks are slow throughout, and the slowest quarter is counted apart. 64 episodes a step (8
groups of 8) of 16 turns. What is simulated: the latencies, times `--scale`, are slept by real worker processes; the
learner's step is a sleep of fixed length (165 s times `--scale`: 0.78 of what a step's slowest episode takes on
average); the sampler answers at once. What is real: plans, admission, the collector's thread, the pool, episodes,
receipts and the buffer.

With a bound of k at most k + 1 steps are under way, so an idle learner and a gain are two sides of one choice: with a
longer learner step the idle share falls, and so does the gain. `ideal` is what the same latencies give with no work
at all on the host.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentrl_jax.protocol import (
    Action,
    Budget,
    EnvironmentRef,
    EnvironmentSpec,
    Message,
    Observation,
    Snapshot,
    Suite,
    Task,
    Verdict,
)
from agentrl_jax.recipes.config import Loop, Rollout
from agentrl_jax.recipes.guards import Drops
from agentrl_jax.recipes.pacing import admit, roll_out, take_in
from agentrl_jax.recipes.rl import plan_step
from agentrl_jax.recipes.run import Run
from agentrl_jax.rl.algorithms import cispo
from agentrl_jax.rl.rewards import lexicographic
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import Driver
from agentrl_jax.rollout.collector import Collector, Finished
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.sampling import Sample, SampleRequest
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime.clock import Clock

TASKS, GROUP, TURNS, LAG = 8, 8, 16, 2
SIGMA, OWN = math.log(30) / 2.3263, 0.3  # of the log-latency; the share of its variance that is the task's
LEARNER_S = 165.0
SLOW = 0.6745  # standard deviations above the median: the slowest quarter of the tasks
SKIPPED = LAG + 1  # first steps that are not measured: the pipeline fills
SPEC = EnvironmentSpec(name="slow", version="1", tools=(), budget=Budget(steps=TURNS, wall_s=1e9), fork="none")
WORDS = [str(number) for number in range(GROUP)]


def _normal(*parts: Any) -> float:
    """A standard normal number that depends on `parts` only."""
    word = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return statistics.NormalDist().inv_cdf((int.from_bytes(word, "little") + 0.5) / 2**64)


def latency_s(task: str, seed: int, member: int, turn: int) -> float:
    """Simulated seconds that an answer takes."""
    common, own = _normal(task), _normal(task, seed, member, turn)
    return math.exp(SIGMA * (math.sqrt(OWN) * common + math.sqrt(1 - OWN) * own))


class Slow:
    """Sleeps before it answers; the action's text is the member's number."""

    spec = SPEC

    def __init__(self, scale: float) -> None:
        self.scale, self.turn = scale, 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.task, self.seed, self.turn = task.id, seed, 0
        return Observation(content=(Message(role="user", content="play"),))

    def step(self, action: Action) -> Observation:
        time.sleep(self.scale * latency_s(self.task, self.seed, int(action.text), self.turn))
        self.turn += 1
        return Observation(content=(Message(role="user", content="go on"),), terminated=self.turn == TURNS)

    def snapshot(self) -> Snapshot:
        return Snapshot(data=b"%d" % self.turn, hash=str(self.turn))

    def restore(self, snapshot: Snapshot) -> None:
        self.turn = int(snapshot.data)

    def close(self) -> None:
        pass


def suite(scale: float) -> Suite:
    return Suite(
        spec=SPEC, make=lambda: Slow(scale), tasks=lambda split, count, seed: tasks(count), verifier_version="1",
        verify=lambda task, initial, actions, final: Verdict(outcome=len(actions) == TURNS),
    )  # fmt: skip


def tasks(count: int) -> list[Task]:
    return [Task(id=f"slow-{index}", split="train") for index in range(count)]


class Instant:
    """A sampler that has its answer ready: the number of the member that asks."""

    slots, context, version = (LAG + 1) * TASKS * GROUP, 4096, 0

    def __init__(self, renderer: ChatRenderer) -> None:
        self._turns, self._asked = [renderer.turn(word) for word in WORDS], []

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def publish(self, params: Any, version: int) -> None:
        self.version = version

    def submit(self, request: SampleRequest) -> None:
        self._asked.append(request)

    def advance(self) -> list[Sample]:
        asked, self._asked = self._asked, []
        return [self._sample(request.slot, self._turns[request.key[3]]) for request in asked]

    def _sample(self, slot: int, ids: tuple[int, ...]) -> Sample:
        versions = (self.version,) * len(ids)
        return Sample(slot=slot, ids=ids, logprobs=(-1.0,) * len(ids), versions=versions, stop="stop")


def as_run(collector: Collector, loop: Loop) -> Run:
    """As much of a run as pacing needs; receipts are made and thrown away."""
    run = Run.__new__(Run)
    rollout = Rollout(free_space_gb=0.0)
    vars(run).update(
        config=SimpleNamespace(rollout=rollout), directory=Path(), collector=collector, buffer=Buffer(loop.group),
        sinks=SimpleNamespace(receipt=lambda row: None, broken=lambda row: None), clock=Clock(), version=0,
        interrupts=SimpleNamespace(check=lambda: None), drops=Drops(1, Path()),
    )  # fmt: skip
    return run


def train(collector: Collector, loop: Loop, scale: float) -> dict[str, float]:
    """The loop of `recipes.rl` with a sleep in the update's place; figures of the steps after the first `SKIPPED`."""
    run, drawn, finished = as_run(collector, loop), tasks(loop.tasks * loop.steps), Finished()
    ahead: deque[Any] = deque()
    rows, trained, begun = [], [], time.perf_counter()
    for step in range(loop.steps):
        run.version = step + 1
        collector.publish(None, run.version)
        for later in range(step + len(ahead), min(step + loop.max_lag + 1, loop.steps)):
            ahead.append(plan_step(0, later, loop, drawn))
            admit(run, ahead[-1], finished)
        groups, row = roll_out(run, loop, ahead.popleft(), finished)
        trained += [t for group in groups for t in group]
        time.sleep(scale * LEARNER_S)
        take_in(run, finished)
        now = time.perf_counter()
        rows.append({**row, "step_s": now - begun})
        begun = now
    measured = rows[SKIPPED:]
    seconds = sum(row["step_s"] for row in measured)
    slow = {task.id for task in drawn if _normal(task.id) > SLOW}
    return {
        "step_s": seconds / len(measured) / scale,
        "learner_idle": sum(row["waited_s"] for row in measured) / seconds,
        "lag_max": max(row["lag_max"] for row in rows),
        "lag_mean": statistics.mean(row["lag_mean"] for row in rows),
        "slow_share_of_tasks": len(slow) / len(drawn),
        "slow_share_of_trained": sum(t.task.id in slow for t in trained) / len(trained),
        "discarded": loop.steps * loop.tasks * loop.group - len(trained),
        "failed": sum(not t.success for t in trained),
    }


def ideal(loop: Loop) -> dict[str, float]:
    """Step time and idle share where the host's own work takes no time."""
    drawn, ends, waited = tasks(loop.tasks * loop.steps), [0.0], [0.0]
    for step in range(loop.steps):
        slowest = max(
            sum(latency_s(plan.task.id, plan.seed, plan.member, turn) for turn in range(TURNS))
            for plan in plan_step(0, step, loop, drawn)
        )
        ready = ends[max(0, step - loop.max_lag)] + slowest
        waited.append(max(0.0, ready - ends[-1]))
        ends.append(ends[-1] + waited[-1] + LEARNER_S)
    seconds = ends[-1] - ends[SKIPPED]
    return {"step_s": seconds / (loop.steps - SKIPPED), "learner_idle": sum(waited[SKIPPED + 1 :]) / seconds}


def measure(steps: int, scale: float) -> dict[str, Any]:
    """Figures in turn and with a bound of `LAG`, their ratio, and the same without any work of the host."""
    renderer = ChatRenderer(build([" ".join(["play", "go", "on", *WORDS])] * 2, vocab_size=400), TINY)
    ref = EnvironmentRef(target="benchmarks.asynchrony:suite", options={"scale": scale})
    loops = {
        name: Loop(steps=steps, tasks=TASKS, group=GROUP, max_lag=lag, objective=cispo(), reward=lexicographic)
        for name, lag in (("synchronous", 0), ("asynchronous", LAG))
    }
    found: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    for name, loop in loops.items():
        with Pool(ref, Instant.slots, Deadlines(start=600.0, reset=60.0, step=1e4, verify=60.0)) as pool:
            driver = Driver(Instant(renderer), pool, renderer, max_turn_tokens=16)
            with Collector(driver) as collector:
                found[name] = train(collector, loop, scale) | {"ideal": ideal(loop)}
    for place, pick in (("speedup", lambda row: row), ("ideal_speedup", lambda row: row["ideal"])):
        found[place] = pick(found["synchronous"])["step_s"] / pick(found["asynchronous"])["step_s"]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--scale", type=float, default=0.03, help="seconds slept for each simulated second")
    given = parser.parse_args()
    print(json.dumps(measure(given.steps, given.scale), indent=2))
