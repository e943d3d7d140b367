"""What the host does for each step of an environment: an environment that does nothing, a sampler that answers at once.

64 episodes (8 groups of 8) of 8 turns, all in flight, each reply 16 tokens, each observation a short line; receipts
with their hash chain, budgets, attribution and grouping are on, as in training. What remains is the package's own work.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
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
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.sampling import Sample, SampleRequest
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.rollout.wire import Command, Reply, Reset
from agentrl_jax.rollout.worker import Worker

GROUPS, GROUP, TURNS, REPLY = 8, 8, 8, 16
STEPS = GROUPS * GROUP * TURNS
OBSERVATION = "ok, next move please"
REPLY_TEXT = " ".join(f"w{i}" for i in range(REPLY))
SPEC = EnvironmentSpec(
    name="nothing", version="1", tools=(), budget=Budget(steps=TURNS, tool_calls=TURNS, tokens=100_000), fork="replay"
)
REF = EnvironmentRef(target="benchmarks.env:nothing")


class Nothing:
    """Answers every action with the same line and is over after `TURNS`."""

    spec = SPEC

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.turn = 0
        return Observation(content=(Message(role="user", content="play"),))

    def step(self, action: Action) -> Observation:
        self.turn += 1
        return Observation(content=(Message(role="user", content=OBSERVATION),), terminated=self.turn == TURNS)

    def snapshot(self) -> Snapshot:
        return Snapshot(data=b"%d" % self.turn, hash=str(self.turn))

    def restore(self, snapshot: Snapshot) -> None:
        self.turn = int(snapshot.data)

    def close(self) -> None:
        pass


def nothing() -> Suite:
    return Suite(
        spec=SPEC, make=Nothing, tasks=lambda split, count, seed: _tasks(count), verifier_version="1",
        verify=lambda task, initial, actions, final: Verdict(outcome=len(actions) == TURNS),
    )  # fmt: skip


def _tasks(count: int) -> list[Task]:
    return [Task(id=f"play-{index}", split="train") for index in range(count)]


class Inline:
    """The worker's body in this process, behind the pool's interface: what peers' environments run in."""

    ref, deadlines, workers, expects = REF, Deadlines(), GROUPS * GROUP, False
    spec, verifier_version = SPEC, "1"

    def __init__(self) -> None:
        suite = nothing()
        self._workers = [Worker(suite, lambda note: None, 20_000) for _ in range(self.workers)]
        self._free, self._replies = list(range(self.workers)), []

    def acquire(self) -> int | None:
        return self._free.pop() if self._free else None

    def release(self, worker: int) -> None:
        self._free.append(worker)

    def submit(self, worker: int, command: Command) -> None:
        self._replies.append((worker, self._workers[worker].handle(command)))

    def poll(self, timeout: float | None) -> list[tuple[int, Reply]]:
        replies, self._replies = self._replies, []
        return replies


class Instant:
    """A sampler that has its answer ready."""

    slots, context = GROUPS * GROUP, 4096

    def __init__(self, renderer: ChatRenderer) -> None:
        ids = renderer.turn(REPLY_TEXT)
        assert len(ids) == REPLY + 1  # and the token that ends the turn
        self._fields: Any = {"ids": ids, "logprobs": (-1.0,) * len(ids), "versions": (0,) * len(ids), "stop": "stop"}
        self._asked: list[SampleRequest] = []

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def submit(self, request: SampleRequest) -> None:
        self._asked.append(request)

    def advance(self) -> list[Sample]:
        asked, self._asked = self._asked, []
        return [Sample(slot=request.slot, **self._fields) for request in asked]


def make_renderer() -> ChatRenderer:
    return ChatRenderer(build([f"play {OBSERVATION} {REPLY_TEXT}"] * 2, vocab_size=400), TINY)


def make_plan() -> list[EpisodePlan]:
    tasks = _tasks(GROUPS)
    return [
        EpisodePlan(group=g, member=m, task=tasks[g], seed=g, key=(0, 0, g, m))
        for g in range(GROUPS)
        for m in range(GROUP)
    ]


def play(pool: Any, renderer: ChatRenderer, plan: list[EpisodePlan]) -> int:
    """All the episodes into whole groups; returns the steps that they took."""
    buffer = Buffer(GROUP)
    for trajectory in collect(plan, Instant(renderer), pool, renderer, max_turn_tokens=64, temperature=1.0):
        buffer.add(trajectory)
    groups = buffer.pop(range(GROUPS))
    assert all(t.success and t.receipt.breach() is None for t in groups[0])
    return sum(len(t.receipt.steps) for group in groups for t in group)


def timed(work: Callable[[], int], rounds: int) -> dict[str, float]:
    """Medians over `rounds` of a step's CPU microseconds in this process and of steps a wall second."""
    work()
    cpu, wall = [], []
    for _ in range(rounds):
        now, used = time.perf_counter(), time.process_time()
        steps = work()
        wall.append((time.perf_counter() - now) / steps)
        cpu.append((time.process_time() - used) / steps)
    return {"cpu_us_per_step": 1e6 * statistics.median(cpu), "steps_per_s": 1 / statistics.median(wall)}


def start(workers: int) -> float:
    """Seconds from nothing until every one of `workers` processes has reset its environment."""
    begun = time.perf_counter()
    with Pool(REF, workers) as pool:
        for _ in range(workers):
            worker = pool.acquire()
            assert worker is not None
            pool.submit(worker, Reset(Task(id="play", split="train"), 0))
        ready = 0
        while ready < workers:
            ready += len(pool.poll(None))
        return time.perf_counter() - begun


def measure(rounds: int) -> list[dict[str, Any]]:
    """Rows of `what`, `value`, `unit` and `bar`: in this process, through two worker processes, and a pool's start."""
    renderer, plan, inline = make_renderer(), make_plan(), Inline()
    here = timed(lambda: play(inline, renderer, plan), rounds)
    with Pool(REF, 2) as pool:
        processes = timed(lambda: play(pool, renderer, plan), rounds)
    started = statistics.median(start(64) for _ in range(min(rounds, 3)))
    return [
        _row("step, environment in this process", here["cpu_us_per_step"], "CPU us", "at most 75"),
        _row("step, two worker processes: this process", processes["cpu_us_per_step"], "CPU us", ""),
        _row("two worker processes", processes["steps_per_s"], "steps/s", "at least 5000"),
        _row("64 environments started and reset", started, "s", "under 2"),
    ]


def _row(what: str, value: float, unit: str, bar: str) -> dict[str, Any]:
    return {"what": what, "value": round(value, 3), "unit": unit, "bar": bar, "load": round(os.getloadavg()[0], 2)}


def table(rows: list[dict[str, Any]]) -> str:
    """One line a row."""
    lines = [f"{'what':<44}{'value':>12}  {'unit':<10}bar"]
    lines += [f"{row['what']:<44}{row['value']:>12,.6g}  {row['unit']:<10}{row['bar']}" for row in rows]
    return "\n".join(lines)


def peak_rss_gib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3)
