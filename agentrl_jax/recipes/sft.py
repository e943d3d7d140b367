"""Supervised fine-tuning on demonstrations: the prior that makes reward reachable, and no more than that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import optax

from agentrl_jax import sharding
from agentrl_jax.batch import TokenBatch
from agentrl_jax.learner.score import Scorer
from agentrl_jax.learner.update import Update, make_update
from agentrl_jax.recipes.demonstrations import open_stores, order, packed, read_all, rename, take, token_ids
from agentrl_jax.recipes.evaluate import evaluate
from agentrl_jax.recipes.optimizing import make_optimizer
from agentrl_jax.rl.imitation import imitation_loss

if TYPE_CHECKING:
    from agentrl_jax.recipes.config import Sft
    from agentrl_jax.recipes.run import Run

_VALIDATION_SEED = 77


def sft(run: Run) -> None:
    """The stage: demonstrations from the environment's own teacher or a store, masked cross-entropy, an early stop."""
    settings = run.config.sft
    assert settings is not None
    with run.clock.phase("demonstrations"):
        stores = open_stores(run.config, run.policy, run.shown or None)
        run.shown = [len(store) for store in stores]
        stored = read_all(run.config, stores)
        data = packed(run.config.environment, run.policy.renderer, settings, run.config.seed, stored)
    handles = renamed_handles(run, settings)
    optimizer, update = optimizer_of(settings), update_of(settings, run.scorer)
    state, start = run.begin(optimizer)
    # A run that was stopped may have been stopped before the validation of its last step was over.
    done = run.stage_done or (_to_check(settings, start) and reached(run, settings))
    for step in range(start, settings.steps):
        if done:
            break
        with run.clock.phase("sft"):
            host = select(data, settings, run.config.seed, step, handles)
            batch = sharding.put(host, run.rows)
            state, info = update.step(state, batch, range(0, settings.rows, settings.micro_rows))
            row = run.learned(state, info, trained_tokens=int(host.action_mask.sum()))
        run.record(row, done=step + 1 == settings.steps)
        if _to_check(settings, step + 1) and reached(run, settings):
            done = True
            run.end_stage()
        run.settle()
    run.assert_compiled_once(update)


def optimizer_of(settings: Sft) -> optax.GradientTransformation:
    """What applies the gradients of the stage."""
    return make_optimizer(settings, updates=settings.steps)


def update_of(settings: Sft, scorer: Scorer) -> Update:
    """The stage's optimisation step."""
    return make_update(
        scorer, imitation_loss, optimizer_of(settings), micro_rows=settings.micro_rows, needs_entropy=False
    )


def _to_check(settings: Sft, steps: int) -> bool:
    return settings.until_success is not None and 0 < steps < settings.steps and steps % settings.check_every == 0


def reached(run: Run, settings: Sft) -> bool:
    """Whether the policy succeeds at validation tasks as often as is asked for: measured at a step once."""
    run.publish()  # also where it was measured before a stop: versions are numbered as without one
    found = run.success()
    if found is None:
        episodes = settings.check_episodes
        row = evaluate(run, stage="sft", split="validation", episodes=episodes, seed=_VALIDATION_SEED)
        run.evaluated(row, best=False)
        found = float(row["success"])
    assert settings.until_success is not None
    return found >= settings.until_success


def select(data: TokenBatch, settings: Sft, seed: int, step: int, handles: np.ndarray) -> TokenBatch:
    """The batch of one step, from (seed, step) alone; weights are the mean over its action tokens."""
    part = take(data, order(len(data.tokens), seed, step, settings.rows))
    part = rename(part, handles, np.random.default_rng((seed, step, 1)))
    return part._replace(weights=part.action_mask.astype(np.float32) / np.float32(max(1, int(part.action_mask.sum()))))


def renamed_handles(run: Run, settings: Sft) -> np.ndarray:
    if not settings.rename_handles:
        return np.zeros(0, np.int32)
    assert run.suite.handles is not None  # checks.check_environment
    return token_ids(run.suite.handles(), run.policy.tokenizer)
