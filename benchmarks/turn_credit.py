"""Credit by episode, by turn and by branch at the same number of episodes: how soon does a policy decide rightly?

    JAX_PLATFORMS=cpu python benchmarks/turn_credit.py

A world where credit matters: an episode is 24 independent decisions, each on one of 24 items with 4 choices, and all
that comes back is one number at the end, the share that was right. The policy is a table, so that only credit can make
a difference: one softmax an item, trained by `rl.objective` with `rl.turns` on 32 episodes a step (4 tasks x 8), by
Adam, whose steps do not depend on the scale of an advantage. Branched groups are 3 episodes from the start, and 5 that
continue one of them or of each other from a state that is drawn uniformly.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from agentrl_jax.batch import GroupTurns, Source, TokenBatch
from agentrl_jax.rl import turns, weights
from agentrl_jax.rl.algorithms import rloo
from agentrl_jax.rl.objective import Objective, assign, credit_only, policy_loss
from agentrl_jax.rl.types import TurnCredit

ITEMS, CHOICES, DECISIONS, TASKS, MEMBERS = 24, 4, 24, 4, 8
EPISODES = replace(rloo(), weights=weights.token_mean)
TURNS_ALONE = replace(EPISODES, advantage=credit_only)


class Method(NamedTuple):
    objective: Objective
    credit: TurnCredit | None = None
    branched: bool = False
    measured: float = 1.0  # the share of items whose decisions the environment measures at once


METHODS = {
    "episode (leave-one-out)": Method(EPISODES),
    "GiGPO steps beside it": Method(EPISODES, turns.step_credit(gamma=1.0)),
    "RTMC": Method(TURNS_ALONE, turns.rtmc_credit(gamma=1.0)),
    "branches": Method(TURNS_ALONE, turns.branch_credit, branched=True),
    "evidence of a quarter of the items": Method(EPISODES, turns.potential_credit(scale=1.0), measured=0.25),
    "evidence of all items": Method(EPISODES, turns.potential_credit(scale=1.0)),
}


def sampled(rng: np.random.Generator, logits: np.ndarray, right: np.ndarray, method: Method) -> tuple[Any, ...]:
    """One step's episodes: (items, choices, rewards, turns)."""
    shape = (TASKS, MEMBERS, DECISIONS)
    items = np.repeat(rng.integers(0, ITEMS, (TASKS, 1, DECISIONS)), MEMBERS, axis=1)
    choices = (logits[items] + rng.gumbel(size=(*shape, CHOICES))).argmax(-1)
    valid, begins = np.ones(shape, bool), np.full((2, TASKS, MEMBERS), -1, np.int32)
    for p in range(TASKS if method.branched else 0):
        for g in range(3, MEMBERS):
            source, turn = int(rng.integers(0, g)), int(rng.integers(1, DECISIONS))
            choices[p, g, :turn], valid[p, g, :turn] = choices[p, source, :turn], False
            begins[:, p, g] = source, turn
    good = choices == right[items]
    measured = (items < method.measured * ITEMS) & valid
    gains = np.where(measured & good, 1 / DECISIONS, 0).astype(np.float32)
    found = GroupTurns(
        valid=valid, state_ids=items.astype(np.int32), action_ids=choices.astype(np.int32), answered=valid, gains=gains,
        measured=measured, potentials=np.pad(gains, ((0, 0), (0, 0), (1, 0))).cumsum(-1, dtype=np.float32),
        branch_member=begins[0], branch_turn=begins[1],
        violated=np.zeros(shape[:2], bool), cut=np.zeros(shape[:2], np.int32),
    )  # fmt: skip
    return items, choices, good.mean(-1).astype(np.float32), found


def batch_of(items: np.ndarray, choices: np.ndarray, valid: np.ndarray) -> TokenBatch:
    """A row an episode, a token a decision: the item stands in `positions`."""
    shape = (TASKS * MEMBERS, DECISIONS)
    columns = np.broadcast_to(np.arange(DECISIONS, dtype=np.int32), shape)
    rows = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
    blank = np.zeros(shape, np.float32)
    return TokenBatch(
        tokens=choices.reshape(shape).astype(np.int32), parents=columns - 1, subtree_ends=columns + 1,
        positions=items.reshape(shape).astype(np.int32), trajectory_ids=rows, turn_ids=columns,
        sources=np.full(shape, Source.POLICY, np.int8), action_mask=valid.reshape(shape), behavior_logprobs=blank,
        advantages=blank, weights=blank, policy_versions=np.zeros(shape, np.int32),
    )  # fmt: skip


def updated(
    method: Method, optimizer: Any, logits: Any, state: Any, batch: TokenBatch, rewards: Any, found: Any
) -> Any:
    valid, per_token = jnp.ones(rewards.shape, jnp.bool_), None
    if method.credit is not None:
        per_turn = jax.vmap(method.credit)(found, rewards, valid)
        per_token = turns.on_tokens(per_turn, batch.trajectory_ids, batch.turn_ids, batch.action_mask)
    batch = assign(method.objective, batch, rewards, valid, valid, credit=per_token)

    def loss(logits: Any) -> Any:
        chosen = jax.nn.log_softmax(logits)[batch.positions, batch.tokens]
        held = batch._replace(behavior_logprobs=jax.lax.stop_gradient(chosen))
        return policy_loss(method.objective, chosen, None, held)[0]

    updates, state = optimizer.update(jax.grad(loss)(logits), state)
    return optax.apply_updates(logits, updates), state


def trained(method: Method, step: Any, optimizer: Any, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """After each step: (chance of deciding rightly, decisions that were sampled so far)."""
    rng = np.random.default_rng(seed)
    right = rng.integers(0, CHOICES, ITEMS)
    logits = jnp.zeros((ITEMS, CHOICES))
    state, curve, taken = optimizer.init(logits), [], []
    for _ in range(steps):
        items, choices, rewards, found = sampled(rng, np.asarray(logits, np.float64), right, method)
        taken.append(int(found.valid.sum()))
        logits, state = step(logits, state, batch_of(items, choices, found.valid), rewards, found)
        chances = jax.nn.softmax(logits)
        curve.append(float(np.asarray(chances)[np.arange(ITEMS), right].mean()))
    return np.asarray(curve), np.cumsum(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rate", type=float, default=0.1)
    given = parser.parse_args()
    a_step, shown = TASKS * MEMBERS, [given.steps // 4, given.steps // 2, given.steps]
    decisions = shown[0] * a_step * DECISIONS  # what the first of them takes without branches
    heads = " | ".join(f"after {steps * a_step} episodes" for steps in shown)
    print(f"| credit | {heads} | after {decisions} decisions |\n| --- | --- | --- | --- | --- |")
    for name, method in METHODS.items():
        optimizer = optax.adam(given.rate)
        step = jax.jit(partial(updated, method, optimizer))
        trained(method, step, optimizer, 1, 0)  # compiles
        runs = [trained(method, step, optimizer, given.steps, seed) for seed in range(given.seeds)]
        figures = [[*curve[np.asarray(shown) - 1], np.interp(decisions, taken, curve)] for curve, taken in runs]
        means, errors = np.mean(figures, 0), np.std(figures, 0, ddof=1) / np.sqrt(given.seeds)
        cells = " | ".join(f"{100 * mean:.1f} +- {100 * error:.1f}" for mean, error in zip(means, errors, strict=True))
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
