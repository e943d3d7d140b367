"""Forks an episode's environment into other workers of the pool: verified, refused where it is no copy, with its cost.

The policy's side of a fork (tokens, turns, receipt) is the episode's own record, which the caller has; what lives in a
worker is the environment, and this is how its state gets into others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_jax.protocol import Action, Task
from agentrl_jax.rollout.codec import Record
from agentrl_jax.rollout.pool import Pool
from agentrl_jax.rollout.wire import Answer, Capture, Captured, Refused, Reply, Resume, Resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkReport(Record):
    """What forking one state cost, and what came of it. `refused` has a reason for each worker without a fork."""

    bytes: int  # of the state and of the first one, which the verifier needs
    capture_s: float
    resume_s: tuple[float, ...]  # of each fork, in the worker
    seconds: float  # from the request to the last answer
    forked: tuple[int, ...]  # the workers that hold the state now
    refused: tuple[str, ...] = ()


def fork_episode(
    pool: Pool, source: int, task: Task, performed: Sequence[Action], workers: Sequence[int]
) -> ForkReport:
    """Brings `workers` to the state that worker `source` is in, having performed `performed` of `task`.

    The source goes on as before; each fork performs and finishes as if it had come there by itself. A state that cannot
    be copied, or whose copy has another hash or another history, is a refusal, never an error. Raises `RuntimeError`
    where a command is in flight: the answers would be mixed up.
    """
    if pool.expects:
        raise RuntimeError("a fork needs the pool to itself: a command is in flight")
    started = time.monotonic()
    pool.submit(source, Capture())
    captured = _answers(pool, [source])[source]
    if not isinstance(captured, Answer) or not isinstance(captured.value, Captured):
        reasons = (reason_of(captured),) * len(workers)
        wall_s = captured.wall_ms / 1e3
        return ForkReport(
            bytes=0, capture_s=wall_s, resume_s=(), seconds=time.monotonic() - started, forked=(), refused=reasons
        )  # fmt: skip
    states = captured.value
    for worker in workers:
        pool.submit(worker, Resume(task, tuple(performed), states.initial, states.state))
    answers = _answers(pool, workers)
    good = {worker: reply for worker, reply in answers.items() if resumed(reply, states.state.hash)}
    return ForkReport(
        bytes=len(states.initial.data) + len(states.state.data),
        capture_s=captured.wall_ms / 1e3,
        resume_s=tuple(reply.wall_ms / 1e3 for reply in good.values()),
        seconds=time.monotonic() - started,
        forked=tuple(good),
        refused=tuple(reason_of(reply) for worker, reply in answers.items() if worker not in good),
    )


def _answers(pool: Pool, workers: Sequence[int]) -> dict[int, Reply]:
    found: dict[int, Reply] = {}
    while len(found) < len(workers):
        found.update((worker, reply) for worker, reply in pool.poll(None) if worker in workers)
    return {worker: found[worker] for worker in workers}


def resumed(reply: Reply, state_hash: str) -> bool:
    """Whether the worker holds the state that it was sent."""
    return isinstance(reply, Answer) and isinstance(reply.value, Resumed) and reply.value.hash == state_hash


def reason_of(reply: Reply) -> str:
    """Why there is no fork."""
    if isinstance(reply, Answer):
        return reply.value.reason if isinstance(reply.value, Refused) else "the worker holds another state"
    return str(reply)
