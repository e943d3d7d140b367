"""Loss and gradient of every algorithm: what may not change them.

One list, all properties: whoever joins `ALGORITHMS` is tested. Nothing about where a trajectory lies (row, column,
device, micro-batch), what the environment wrote where no action reads it, or how much padding there is may change
the loss or the gradient of the params by more than the rounding of f32.
"""

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from agentrl_jax.batch import Source, TokenBatch, validate
from agentrl_jax.rl import advantages, algorithms, corrections, ratios
from agentrl_jax.rl.objective import assign, credit_only, policy_loss
from agentrl_jax.rl.parallel import value_and_grad

ALGORITHMS = {
    "reinforce": algorithms.reinforce(),
    "rloo": algorithms.rloo(),
    "reinforce_plus_plus": algorithms.reinforce_plus_plus(),
    "reinforce_plus_plus_baseline": algorithms.reinforce_plus_plus_baseline(beta=0.1),
    "ppo": algorithms.ppo(dual=3.0, entropy_coef=0.01, whiten=advantages.global_whitened),
    "decoupled_ppo": algorithms.decoupled_ppo(),
    "grpo": algorithms.grpo(),
    "m_grpo": algorithms.m_grpo(beta=0.1),
    "dr_grpo": algorithms.dr_grpo(9.0),
    "dapo": algorithms.dapo(),
    "gspo": algorithms.gspo(),
    "gspo_token": algorithms.gspo_token(low=0.1, high=0.1),
    "cispo": algorithms.cispo(high=0.2),
    "sapo": algorithms.sapo(),
    "grpo with corrections of sequences": replace(
        algorithms.grpo(),
        correction=corrections.product(corrections.sequence(), corrections.geometric(0.8, 1.2), corrections.veto()),
        kl_ratio=ratios.token,
    ),
}
VOCAB, WIDTH, GROUPS, GROUP, ROWS, LENGTH = 11, 3, 3, 4, 16, 64
MEMBERS = GROUPS * GROUP


class Episode(NamedTuple):
    """One trajectory, a value per token."""

    member: int
    tokens: np.ndarray
    turns: np.ndarray
    actions: np.ndarray
    floats: np.ndarray  # [4, n] behavior, old and reference log-probs, credit


class Step(NamedTuple):
    """What one optimisation step is given."""

    batch: TokenBatch
    credit: np.ndarray
    rewards: np.ndarray
    valid: np.ndarray
    keep: np.ndarray


PARAMS = {
    "embedding": 0.5 * np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32),
    "unembedding": 0.5 * np.random.default_rng(1).normal(size=(WIDTH, VOCAB)).astype(np.float32),
}
REWARDS = np.random.default_rng(2).integers(0, 5, (GROUPS, GROUP)).astype(np.float32) / 4
VALID = np.ones((GROUPS, GROUP), bool)
VALID[0, 1] = False
KEEP = VALID.copy()
KEEP[1, 2] = KEEP[2, 0] = False
KEPT = KEEP.reshape(-1)


def episodes():
    rng, found = np.random.default_rng(3), []
    for member in range(MEMBERS):
        pieces = [(2, False, 0)]  # a prompt, then actions and observations in turn
        for turn in range(int(rng.integers(1, 4))):
            pieces += [(int(rng.integers(1, 4)), True, turn), (2, False, turn)]
        pieces = pieces[:-1]
        turns, actions = (np.concatenate([[p[k]] * p[0] for p in pieces]) for k in (2, 1))
        n = len(turns)
        floats = np.log(1 / VOCAB) + 0.3 * rng.normal(size=(4, n))
        floats[3] = rng.normal(size=n)
        found.append(Episode(member, rng.integers(0, VOCAB, n), turns, actions.astype(bool), floats))
    return found


def lay_out(rows, rewards=REWARDS, valid=VALID, keep=KEEP, gap=0, garbage=0.0):
    """Episodes placed row by row, each after `gap` columns of padding; `garbage` stands where no action is."""
    shape = (ROWS, LENGTH)
    ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "turn_ids")}
    floats = np.zeros((4, *shape), np.float32)
    parents, ids = np.full(shape, -1, np.int32), np.full(shape, MEMBERS, np.int32)
    ends = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    mask, sources = np.zeros(shape, bool), np.zeros(shape, np.int8)
    for row, listed in enumerate(rows):
        column = 0
        for one in listed:
            column += gap
            n = len(one.tokens)
            at = (row, slice(column, column + n))
            ints["tokens"][at], ints["turn_ids"][at], ints["positions"][at] = one.tokens, one.turns, np.arange(n)
            ids[at], mask[at], floats[:, row, column : column + n] = one.member, one.actions, one.floats
            parents[at], ends[at] = np.where(np.arange(n) > 0, np.arange(column - 1, column + n - 1), -1), column + n
            sources[at] = np.where(one.actions, Source.POLICY, Source.ENVIRONMENT)
            column += n
    zeros = np.zeros(shape, np.float32)
    names = ("behavior_logprobs", "old_logprobs", "ref_logprobs")
    batch = TokenBatch(
        **ints,
        **dict(zip(names, np.where(mask, floats[:3], np.float32(0)), strict=True)),
        parents=parents,
        subtree_ends=ends,
        trajectory_ids=ids,
        sources=sources,
        action_mask=mask,
        advantages=zeros,
        weights=zeros,
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )
    validate(batch, vocab_size=VOCAB)
    dirty = np.where(mask, floats, np.float32(garbage))
    return Step(batch._replace(**dict(zip(names, dirty[:3], strict=True))), dirty[3], rewards, valid, keep)


def alone(found, **options):
    return lay_out([[one] for one in found], **options)


def relabelled():
    """Members of each group in another order, with their rewards."""
    order = np.asarray([[2, 0, 3, 1], [0, 3, 1, 2], [3, 2, 1, 0]])  # order[p, g] becomes member g
    places = {p * GROUP + old: p * GROUP + new for p in range(GROUPS) for new, old in enumerate(order[p])}
    moved = [one._replace(member=places[one.member]) for one in episodes()]
    arrays = (np.take_along_axis(x, order, axis=1) for x in (REWARDS, VALID, KEEP))
    return alone(moved, **dict(zip(("rewards", "valid", "keep"), arrays, strict=True)))


def other_observations():
    """Other tokens wherever no action continues them, and nonsense in every number that belongs to no action."""
    rng, changed = np.random.default_rng(9), []
    for one in episodes():
        unread = ~one.actions & ~np.append(one.actions[1:], False)
        assert unread.any()
        changed.append(one._replace(tokens=np.where(unread, rng.integers(0, VOCAB, len(unread)), one.tokens)))
    return alone(changed, garbage=np.nan)


def deleted():
    """What is not trained on is not in the rows at all, and an invalid reward is no number."""
    kept = [one for one in episodes() if KEPT[one.member]]
    return alone(kept, rewards=np.where(VALID, REWARDS, np.nan))


def packed_otherwise():
    """Rows of one to three episodes in other orders, and empty rows between them."""
    first, *_, last = found = episodes()
    return lay_out([[last, first], [], found[1:3][::-1], found[3:6], [], *([one] for one in found[6:-1])])


VARIANTS = {
    "packed": lambda: lay_out([episodes()[i : i + 4] for i in range(0, MEMBERS, 4)]),
    "packed otherwise": packed_otherwise,
    "row order": lambda: lay_out([[one] for one in episodes()][::-1]),
    "padding": lambda: lay_out([[], *[[one] for one in episodes()]], gap=17),
    "members of a group permuted": relabelled,
    "observations": other_observations,
    "masked is deleted": deleted,
}


def loss(objective, params, batch):
    """Logits of each token from its parent alone: `embedding[parent] @ unembedding`."""
    before = jnp.take_along_axis(batch.tokens, jnp.maximum(batch.parents, 0), axis=1)
    full = jax.nn.log_softmax(params["embedding"][before] @ params["unembedding"])
    logprobs = jnp.take_along_axis(full, batch.tokens[:, :, None], axis=2)[:, :, 0]
    entropy = -jnp.sum(jnp.exp(full) * full, axis=2)
    logprobs, entropy = (jnp.where(batch.action_mask, x, 0.0) for x in (logprobs, entropy))
    return policy_loss(objective, logprobs, entropy if objective.entropy_coef else None, batch)


def fill(objective, step, axis_name=None):
    credit = step.credit if objective.advantage is credit_only else None
    return assign(objective, *step[:1], *step[2:], credit=credit, axis_name=axis_name)


def evaluate(params, step):
    """Every algorithm in one program: compiling is what costs."""
    return {
        name: jax.value_and_grad(lambda p, o=objective: loss(o, p, fill(o, step))[0])(params)
        for name, objective in ALGORITHMS.items()
    }


def accumulate(params, step, micro):
    """Summed over micro-batches of `micro` rows, from weights and advantages of the whole step."""

    def over(objective):
        batch = fill(objective, step)
        pieces = jax.tree.map(lambda x: x.reshape(-1, micro, *x.shape[1:]), batch)
        each = jax.value_and_grad(lambda p, piece: loss(objective, p, piece)[0])
        return jax.tree.map(lambda x: x.sum(0), lax.map(partial(each, params), pieces))

    return {name: over(objective) for name, objective in ALGORITHMS.items()}


def shared(params, batch, credit, *same):
    """On one of several devices."""
    found, step = {}, Step(batch, credit, *same)
    for name, objective in ALGORITHMS.items():
        gradient = value_and_grad(partial(loss, objective), axis_name="data")
        (value, _), grads = gradient(params, fill(objective, step, axis_name="data"))
        found[name] = (value, grads)
    return found


def over_devices(setup, devices):
    step, mesh = alone(episodes()), Mesh(np.asarray(jax.devices()[:devices]), ("data",))
    if setup == "jit":
        rows = NamedSharding(mesh, P("data"))
        return jax.jit(evaluate)(PARAMS, step._replace(batch=jax.device_put(step.batch, rows)))
    if setup == "pmap":
        rows = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), step[:2])
        mapped = jax.pmap(shared, axis_name="data", in_axes=(None, 0, 0, None, None, None))
        return jax.tree.map(lambda x: x[0], mapped(PARAMS, *rows, *step[2:]))
    specs = (P(), P("data"), P("data"), P(), P(), P())
    return jax.jit(jax.shard_map(shared, mesh=mesh, in_specs=specs, out_specs=P()))(PARAMS, *step)


def split(micro):
    return jax.jit(accumulate, static_argnums=2)(PARAMS, alone(episodes()), micro)


RUNS = {
    **{name: lambda make=make: jitted()(PARAMS, make()) for name, make in VARIANTS.items()},
    "4 micro-batches": partial(split, 4),
    "16 micro-batches": partial(split, 1),
    **{f"shard_map over {n}": partial(over_devices, "shard_map", n) for n in (2, 8)},  # 1 and 4: test_parallel.py
    "pmap over 8": partial(over_devices, "pmap", 8),
    "jit over 8": partial(over_devices, "jit", 8),
}


@cache
def jitted():
    return jax.jit(evaluate)


@cache
def result(run):
    return jax.device_get(jitted()(PARAMS, alone(episodes())) if run == "as it is" else RUNS[run]())


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("run", RUNS)
def test_loss_and_gradient_do_not_change(name, run):
    found, expected = result(run)[name], result("as it is")[name]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6), found, expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_there_is_a_gradient_that_could_change(name):
    _, grads = result("as it is")[name]
    assert min(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) > 1e-3


def test_every_public_algorithm_has_joined_the_list():
    own = {name for name, make in vars(algorithms).items() if getattr(make, "__module__", "") == algorithms.__name__}
    assert {name for name in own if not name.startswith("_")} <= set(ALGORITHMS)
