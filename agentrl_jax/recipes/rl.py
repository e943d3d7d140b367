"""Reinforcement learning: roll out, verify, assign credit, update, publish."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentrl_jax import sharding
from agentrl_jax.batch import TokenBatch
from agentrl_jax.errors import UserError
from agentrl_jax.learner.score import Scorer, make_score
from agentrl_jax.learner.update import Update, make_update
from agentrl_jax.recipes.evaluate import evaluate, measure
from agentrl_jax.recipes.optimizing import make_optimizer
from agentrl_jax.recipes.pacing import admit, capped_rate, roll_out, take_in
from agentrl_jax.recipes.shares import dealt, global_batch, micro_batches, renumbered, summed
from agentrl_jax.recipes.turn_credit import lives_on_evidence, read_step, refuse_endless, still_blind, turn_figures
from agentrl_jax.rl.objective import assign, policy_loss
from agentrl_jax.rl.rewards import check_rewards, decided
from agentrl_jax.rl.turns import on_tokens
from agentrl_jax.rollout.episode import EpisodePlan
from agentrl_jax.rollout.packing import pack, used_rows
from agentrl_jax.rollout.records import Trajectory

if TYPE_CHECKING:
    from agentrl_jax.protocol import Task
    from agentrl_jax.recipes.config import Loop
    from agentrl_jax.recipes.run import Run

_TRAINING = 0  # first element of every request key here; evaluation has 1
Groups = Sequence[Sequence[Trajectory]]


class Outcomes(NamedTuple):
    """What the verifier said of P groups of G, as arrays the device composes into rewards."""

    violated: Any  # bool[P, G]
    outcome: Any  # f32[P, G]
    quality: Any  # f32[P, G]
    valid: Any  # bool[P, G] counts in the baseline
    keep: Any  # bool[P, G] trains
    turns: Any = None  # GroupTurns where the loop gives them credit


def rl(run: Run) -> None:
    """The stage. Each step: `tasks` x `group` episodes, one batch, one publication; see `Loop` for how they overlap."""
    loop = run.config.loop
    assert loop is not None
    objective, optimizer = loop.objective, optimizer_of(loop)
    update = update_of(loop, run.scorer)
    credit, score = make_credit(loop, run.everywhere), make_score(run.scorer, micro_rows=loop.micro_rows)
    state, start = run.begin(optimizer, reference=objective.kl is not None)

    def rescore(batch: TokenBatch, micro: list[int]) -> TokenBatch:
        """Log-probs under the params at the start of the step and under the reference, where something reads them."""
        if loop.rescores:
            batch = batch._replace(old_logprobs=score(state.params, batch, micro))
        return batch if run.reference is None else batch._replace(ref_logprobs=score(run.reference, batch, micro))

    if (rate := capped_rate(loop)) < loop.learning_rate:
        run.progress.note(f"learning rate {rate:.3g}: loop.rate_cap bears no more at a lag of {loop.oldest}")
    tasks = list(run.suite.tasks("train", loop.train_tasks, run.config.seed))
    ahead: deque[list[EpisodePlan]] = deque()  # the steps whose episodes have begun
    blind = lives_on_evidence(loop)
    if _to_evaluate(run, loop, start) and run.success() is None:  # it was stopped before that was over
        evaluate_now(run)
    for step in range(start, loop.steps):
        run.publish()
        before: Any = replace(run.engine.counters)
        for later in range(step + len(ahead), min(step + loop.max_lag + 1, loop.steps)):
            ahead.append(plan_step(run.config.seed, later, loop, tasks))
            admit(run, ahead[-1], run.finished)
        groups, pace = roll_out(run, loop, ahead.popleft(), run.finished)
        with run.clock.phase("update"):
            host, outcomes = assemble(run, loop, groups)
            blind = blind and still_blind(run.suite.spec.name, outcomes.turns)
            figures = {"packed_rows": used_rows(host), "trained_tokens": carried(host, outcomes)}
            everyones = run.hosts.exchange({**figures, **run.engine.counters.since(before)})
            used, totals = [part["packed_rows"] for part in everyones], summed(everyones)
            micro = micro_batches(used, dealt(run.rows, len(host.tokens) * len(used)), loop.micro_rows)
            batch = rescore(global_batch(host, run.rows), micro)
            batch, *credited = credit(batch, sharding.put(outcomes, run.everywhere))
            rewards, advantages, per_turn = jax.device_get(credited)
            refuse_wrong(groups, rewards, outcomes.valid)
            refuse_endless(per_turn)
            for _ in range(loop.updates_per_batch):
                state, info = update.step(state, batch, micro)
            row = run.learned(state, info, trained_tokens=totals.pop("trained_tokens") * loop.updates_per_batch)
        run.store_all(groups)
        run.transcribe(groups, rewards, advantages, per_turn)
        row |= {**totals, **pace}
        row |= step_figures(groups, outcomes, rewards)
        row |= turn_figures(outcomes.turns, per_turn, outcomes.valid)
        take_in(run, run.finished)
        run.record(row, done=step + 1 == loop.steps)
        if _to_evaluate(run, loop, step + 1):
            evaluate_now(run)
        run.settle()
    run.assert_compiled_once(update, credit, score)


def _to_evaluate(run: Run, loop: Loop, steps: int) -> bool:
    every = run.config.evaluation.every
    return bool(every) and 0 < steps < loop.steps and steps % every == 0


def optimizer_of(loop: Loop) -> optax.GradientTransformation:
    """What applies the gradients of the stage."""
    capped = replace(loop, learning_rate=capped_rate(loop))
    return make_optimizer(capped, updates=loop.steps * loop.updates_per_batch)


def update_of(loop: Loop, scorer: Scorer) -> Update:
    """The stage's optimisation step."""
    objective = loop.objective
    return make_update(
        scorer,
        lambda logprobs, entropy, batch: policy_loss(objective, logprobs, entropy, batch),
        optimizer_of(loop),
        micro_rows=loop.micro_rows,
        needs_entropy=objective.entropy_coef != 0.0,
    )


def plan_step(seed: int, step: int, loop: Loop, tasks: Sequence[Task]) -> list[EpisodePlan]:
    """The episodes of one step, from (seed, step) alone: a resumed run draws the same tasks, keys and branches.

    Groups are numbered through all steps.
    """
    first = step * loop.tasks
    plans = []
    for group in range(loop.tasks):
        epoch, place = divmod(first + group, len(tasks))
        task = tasks[int(np.random.default_rng((seed, epoch)).permutation(len(tasks))[place])]
        for member in range(loop.group):
            key = (_TRAINING, step, group, member)
            branch = None if loop.branching is None else loop.branching.branch(seed, step, group, member)
            plans.append(
                EpisodePlan(group=first + group, member=member, task=task, seed=first + group, key=key, branch=branch)
            )
    return plans


def refuse_wrong(groups: Groups, rewards: np.ndarray, valid: np.ndarray) -> None:
    """Raises `UserError` naming the trajectory whose reward is no finite number: before it reaches a gradient."""
    names = [f"task {t.task.id!r} member {t.member}" for group in groups for t in group]
    try:
        check_rewards(rewards, valid, names)
    except ValueError as error:
        raise UserError(str(error)) from error


def assemble(run: Run, loop: Loop, groups: Groups) -> tuple[TokenBatch, Outcomes]:
    """Host arrays of one step: the packed rows of this process, and what the verifier said of all."""
    outcomes = read_outcomes(groups, loop)._replace(turns=read_step(run, loop, groups))
    packed = [
        [] if loop.skip_constant_groups and is_constant(outcomes, i) else list(group) for i, group in enumerate(groups)
    ]
    if loop.skip_constant_groups:
        constant = np.asarray([not group for group in packed])
        outcomes = outcomes._replace(keep=outcomes.keep & ~constant[:, None])
    segments = 1 if run.policy.renderer.appends else run.config.rollout.max_segments
    mine = run.hosts.share(loop.tasks)
    rows, vocab = len(mine) * loop.group * segments, run.policy.model.vocab_size
    # A batch that may hold kept sets always does: their coming and going would compile again.
    settings: Any = {"group_size": loop.group, "pad_id": 0, "vocab_size": vocab, "kept": run.config.rollout.records}
    host = pack(packed[mine.start : mine.stop], rows=rows, width=loop.width, **settings)
    return renumbered(host, mine, loop.group, loop.tasks), outcomes


def read_outcomes(groups: Groups, loop: Loop) -> Outcomes:
    shape = (loop.tasks, loop.group)
    violated, valid, keep = (np.zeros(shape, np.bool_) for _ in range(3))
    outcome, quality = (np.zeros(shape, np.float32) for _ in range(2))
    for p, group in enumerate(groups):
        for t in group:
            at = (p, t.member)
            valid[at] = t.valid
            keep[at] = t.valid and (loop.train_truncated or not t.truncated)
            if t.valid and t.verdict is not None:
                violated[at] = t.verdict.violated
                outcome[at] = float(t.verdict.outcome or 0.0)
                quality[at] = float(t.verdict.quality or 0.0)
    return Outcomes(violated, outcome, quality, valid, keep)


def carried(batch: TokenBatch, outcomes: Outcomes) -> int:
    """Action tokens of the trajectories that train."""
    keep = np.append(outcomes.keep.reshape(-1), False)
    return int((batch.action_mask & keep[batch.trajectory_ids]).sum())


def is_constant(outcomes: Outcomes, group: int) -> bool:
    """True where constraints and outcome are the same for every valid member: no signal but quality."""
    valid = outcomes.valid[group]
    pairs = set(zip(outcomes.violated[group][valid].tolist(), outcomes.outcome[group][valid].tolist(), strict=True))
    return len(pairs) <= 1


def make_credit(loop: Loop, everywhere: Any = None) -> Any:
    """Jitted once: (batch, outcomes) -> (batch with credit and weights, rewards, advantages, credit of turns or None).

    `advantages[b, t] = objective.advantage(rewards)[p, g] + loop.credit(turns, rewards)[p, g, k]` for the action tokens
    of turn k of member g of group p. All but the batch, which stays as it lies, are `everywhere`.
    """

    @partial(jax.jit, out_shardings=(None, everywhere, everywhere, everywhere))
    def credit(batch: TokenBatch, o: Outcomes) -> tuple[TokenBatch, jax.Array, jax.Array, jax.Array | None]:
        rewards = loop.reward(o.violated, o.outcome, o.quality)
        # Quality ranks successes only where outcomes differ: alone it would be blown up to unit size.
        told_apart = jax.vmap(decided)(o.violated, o.outcome, o.valid)[:, None]
        credited = jnp.where(told_apart, rewards, 0.0)
        per_turn = per_token = None
        if loop.credit is not None:
            counted = o.turns.valid & o.valid[:, :, None]
            per_turn = jnp.where(counted, jax.vmap(loop.credit)(o.turns, credited, o.valid), 0.0)
            per_token = on_tokens(per_turn, batch.trajectory_ids, batch.turn_ids, batch.action_mask)
        batch = assign(loop.objective, batch, credited, o.valid, o.keep, credit=per_token)
        return batch, rewards, jax.vmap(loop.objective.advantage)(credited, o.valid), per_turn

    return credit


def step_figures(groups: Groups, outcomes: Outcomes, rewards: np.ndarray) -> dict[str, Any]:
    flat = [t for group in groups for t in group]
    valid = outcomes.valid
    figures = measure(flat)
    return {
        "reward": float(rewards[valid].mean()) if valid.any() else None,
        "constant_groups": sum(is_constant(outcomes, i) for i in range(len(groups))) / len(groups),
        "singletons": int((valid.sum(1) == 1).sum()),
        "unscored": int((~valid).sum()),
        **{name: figures[name] for name in ("success", "violation_rate", "mean_tool_calls", "failures", "stops")},
        **{name: figures[name] for name in ("premature_stop_rate", "unfinished_after_budget")},
        **{name: figures[name] for name in ("segments", "retokenize_mismatch", "breaks", "dropped/token_mismatch")},
    }


def evaluate_now(run: Run) -> None:
    e = run.config.evaluation
    run.publish()
    run.evaluated(evaluate(run, stage="rl", split=e.split, episodes=e.every_episodes or e.episodes, seed=e.seed))
