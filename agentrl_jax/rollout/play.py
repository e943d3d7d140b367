"""Play a written script through the episode code that a policy runs through: demonstrations, reference solutions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Environment, Observation, StopReason, Suite, Task, ToolCall
from agentrl_jax.rollout.episode import Act, Ask, Done, Episode, EpisodePlan, Move, Renderer
from agentrl_jax.rollout.records import Trajectory, bounded
from agentrl_jax.rollout.sampling import Sample

MAX_OBSERVATION_CHARS = 20_000
_UNLIMITED = 1 << 30


def play(
    suite: Suite,
    renderer: Renderer,
    task: Task,
    script: Sequence[ToolCall | str],
    seed: int,
    *,
    group: int = 0,
    member: int = 0,
    environment: Environment | None = None,
) -> Trajectory:
    """The trajectory of a teacher that takes the turns of `script` in order, in this process.

    The turns' tokens are `Source.TEACHER` with `action_mask` True, log-probability 0 and policy version -1. A script
    that ends before the task does stops as `EARLY_STOP`; later turns are left out. Budgets hold as for a policy.
    `environment` is used where given and left open, else one is made and closed.

    Raises whatever the environment or the verifier raises: a suite whose own script breaks it is to be mended.
    """
    world = environment if environment is not None else suite.make()
    try:
        plan = EpisodePlan(group=group, member=member, task=task, seed=seed)
        episode = Episode(plan, suite.spec, renderer, max_turn_tokens=_UNLIMITED, source=Source.TEACHER)
        first = bounded(world.reset(task, seed), MAX_OBSERVATION_CHARS)
        initial = world.snapshot()
        turns, move = iter(script), episode.begin(first)
        while not isinstance(move, Done):
            move = _advance(episode, world, move, turns)
        verdict = suite.judge(task, initial, episode.performed, world.snapshot(), move.stop)
        return episode.trajectory(verdict, None, verifier_version=suite.verifier_version)
    finally:
        if environment is None:
            world.close()


def teacher_sample(renderer: Renderer, item: ToolCall | str, slot: int = 0) -> Sample:
    """What sampling would have given, had the policy written this turn."""
    ids = renderer.turn(item)
    return Sample(slot=slot, ids=ids, logprobs=(0.0,) * len(ids), versions=(-1,) * len(ids), stop="stop")


def _advance(episode: Episode, world: Environment, move: Move, turns: Iterator[ToolCall | str]) -> Move:
    if isinstance(move, Ask):
        item = next(turns, None)
        if item is None:
            return episode.give_up(StopReason.EARLY_STOP)
        return episode.on_sample(teacher_sample(episode.renderer, item))
    assert isinstance(move, Act)
    started = time.perf_counter()
    observation: Observation = bounded(world.step(move.action), MAX_OBSERVATION_CHARS)
    return episode.on_observation(observation, (time.perf_counter() - started) * 1e3)
