"""Supervised fine-tuning on demonstrations: the prior that makes reward reachable, and no more than that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from agentrl_jax.batch import TokenBatch
from agentrl_jax.errors import UserError
from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.update import make_update
from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes.evaluate import evaluate
from agentrl_jax.rl.imitation import imitation_loss
from agentrl_jax.rollout.collect import play
from agentrl_jax.rollout.packing import pack, used_rows
from agentrl_jax.rollout.records import Trajectory

if TYPE_CHECKING:
    from agentrl_jax.recipes.config import Sft, Shown
    from agentrl_jax.recipes.run import Run

_VALIDATION_SEED = 77


def sft(run: Run) -> None:
    """The stage: demonstrations from the environment's own teacher, masked cross-entropy, an early stop."""
    settings = run.config.sft
    assert settings is not None
    with run.clock.phase("demonstrations"):
        data = packed_demonstrations(run, settings)
    optimizer = adamw(
        settings.learning_rate,
        warmup=settings.warmup,
        total=settings.steps,
        schedule="constant",
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )
    update = make_update(run.logprobs, imitation_loss, optimizer, micro_rows=settings.micro_rows, needs_entropy=False)
    state, start = run.begin(optimizer)
    done = run.stage_done
    for step in range(start, settings.steps):
        if done:
            break
        with run.clock.phase("sft"):
            host = select(data, run.config.seed, step, settings.rows)
            batch = jax.device_put(host, run.rows)
            state, info = update.step(state, batch, range(0, settings.rows, settings.micro_rows))
        row = run.learned(state, info, trained_tokens=int(host.action_mask.sum()))
        if settings.until_success is not None and (step + 1) % settings.check_every == 0:
            found = check(run, settings)
            row |= {"validation_success": found}
            done = found >= settings.until_success
        run.record(row, done=done or step + 1 == settings.steps)
    run.assert_compiled_once(update)


def check(run: Run, settings: Sft) -> float:
    run.publish()
    row = evaluate(run, stage="sft", split="validation", episodes=settings.check_episodes, seed=_VALIDATION_SEED)
    return float(row["success"])


def packed_demonstrations(run: Run, settings: Sft) -> TokenBatch:
    """Every demonstration of the run, as packed rows; a demonstration that does not fit a row is refused."""
    played = [t for shown in settings.demonstrations for t in play_all(run, shown) if any(t.action_mask)]
    groups = [[replace(t, group=index)] for index, t in enumerate(played)]
    packed = pack(groups, rows=len(groups), width=settings.width, group_size=1, pad_id=0)
    count = used_rows(packed)
    return TokenBatch(*(None if field is None else field[:count] for field in packed))


def play_all(run: Run, shown: Shown) -> Iterator[Trajectory]:
    ref, seed = run.config.environment, run.config.seed
    suite = EnvironmentRef(target=ref.target, options={**ref.options, **shown.options}).load()
    if suite.demonstrate is None:
        raise UserError(f"stage sft: the environment {suite.spec.name!r} offers no demonstrate()")
    world = suite.make()
    for index, task in enumerate(suite.tasks(shown.split, shown.count, seed)):
        script = suite.demonstrate(task, seed + index)
        yield play(suite, run.policy.renderer, task, script, seed + index, environment=world)
    world.close()


def order(rows: int, seed: int, step: int, take: int) -> np.ndarray:
    """The rows of one step: epochs are seeded permutations, so that any step can be recomputed alone."""
    places = np.arange(step * take, (step + 1) * take)
    epochs = {e: np.random.default_rng((seed, e)).permutation(rows) for e in np.unique(places // rows).tolist()}
    return np.asarray([epochs[place // rows][place % rows] for place in places.tolist()])


def select(data: TokenBatch, seed: int, step: int, take: int) -> TokenBatch:
    """The batch of one step; weights are the mean over its action tokens."""
    picks = order(len(data.tokens), seed, step, take)
    part = TokenBatch(*(None if field is None else field[picks] for field in data))
    weights = part.action_mask.astype(np.float32) / np.float32(max(1, int(part.action_mask.sum())))
    return part._replace(weights=weights)
