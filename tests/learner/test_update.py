"""The update: one weighted sum, whatever the packing, the split into micro-batches and the number of devices."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentrl_jax.batch import Source, TokenBatch, validate
from agentrl_jax.learner import metrics
from agentrl_jax.learner.optimizers import adamw
from agentrl_jax.learner.score import Scorer, make_score
from agentrl_jax.learner.state import LearnerState, init_state
from agentrl_jax.learner.update import make_update
from agentrl_jax.models import llama
from agentrl_jax.rl import algorithms, weights
from agentrl_jax.rl.imitation import imitation_loss
from agentrl_jax.rl.objective import assign, policy_loss
from agentrl_jax.rl.types import Metrics

CONFIG = llama.LlamaConfig(
    vocab_size=23, width=8, layers=2, heads=2, kv_heads=1, head_width=4, mlp_width=12, context=32
)
SCORER = Scorer(partial(llama.hidden, CONFIG), partial(llama.unembedding, CONFIG), temperature=0.8, chunk=16)
ROWS, WIDTH, GROUP, GROUPS = 8, 16, 4, 3
PROMPT, SGD = 4, optax.sgd(1.0)


@pytest.fixture(scope="module")
def params():
    return llama.init(CONFIG, jax.random.key(0))


def clone(tree):
    return jax.tree.map(jnp.copy, tree)


def trajectories(seed=0):
    """(id, tokens, mask, behavior) of P groups of G: one prompt a group, observations among the actions."""
    rng, found = np.random.default_rng(seed), []
    for p in range(GROUPS):
        prompt = rng.integers(0, 23, PROMPT)
        for g in range(GROUP):
            length = int(rng.integers(1, 7))
            mask = rng.random(length) < 0.7
            mask[0] = True
            tokens = np.concatenate([prompt, rng.integers(0, 23, length)])
            found.append((p * GROUP + g, tokens, mask, np.where(mask, -rng.random(length) * 3, 0)))
    return found


def empty_rows():
    ints = {name: np.zeros((ROWS, WIDTH), np.int32) for name in ("tokens", "positions", "turn_ids")}
    return TokenBatch(
        **ints,
        parents=np.full((ROWS, WIDTH), -1, np.int32),
        subtree_ends=np.tile(np.arange(WIDTH, dtype=np.int32), (ROWS, 1)),
        trajectory_ids=np.full((ROWS, WIDTH), GROUPS * GROUP, np.int32),
        sources=np.zeros((ROWS, WIDTH), np.int8),
        action_mask=np.zeros((ROWS, WIDTH), bool),
        behavior_logprobs=np.zeros((ROWS, WIDTH), np.float32),
        advantages=np.zeros((ROWS, WIDTH), np.float32),
        weights=np.zeros((ROWS, WIDTH), np.float32),
        policy_versions=np.full((ROWS, WIDTH), -1, np.int32),
    )


def write(batch, row, start, tokens, parent, depth):
    """A chain of tokens that continues `parent`; every ancestor's subtree is extended over it."""
    for n, token in enumerate(tokens):
        t = start + n
        batch.tokens[row, t], batch.parents[row, t], batch.positions[row, t] = token, parent, depth + n
        batch.sources[row, t] = Source.ENVIRONMENT
        above = t
        while above >= 0:
            batch.subtree_ends[row, above], above = t + 1, batch.parents[row, above]
        parent = t
    return start + len(tokens)


def pack(found, *, share):
    """Trees with one prompt for as many members as fit, or every trajectory with a prompt of its own."""
    batch, row, column, last = empty_rows(), 0, 0, None
    for id_, tokens, mask, behavior in found:
        group, tail = id_ // GROUP, tokens[PROMPT:]
        fresh = not share or last is None or last[0] != group or column + len(tail) > WIDTH
        if fresh:
            if column + len(tokens) > WIDTH:
                row, column = row + 1, 0
            last = (group, column + PROMPT - 1)
            column = write(batch, row, column, tokens[:PROMPT], -1, 0)
        assert last is not None
        end = write(batch, row, column, tail, last[1], PROMPT)
        here = slice(column, end)
        batch.trajectory_ids[row, here], batch.action_mask[row, here] = id_, mask
        batch.sources[row, here] = np.where(mask, Source.POLICY, Source.ENVIRONMENT)
        batch.behavior_logprobs[row, here] = behavior
        batch.policy_versions[row, here] = np.where(mask, 0, -1)
        column = end
    return validate(batch, vocab_size=23)


def credited(objective, batch):
    rng = np.random.default_rng(7)
    rewards = rng.random((GROUPS, GROUP)).astype(np.float32)
    valid = rng.random((GROUPS, GROUP)) < 0.9
    return jax.jit(partial(assign, objective))(batch, rewards, valid, valid)


@cache
def updates(micro_rows):
    """Compiled once for all: the objectives differ in what `assign` fills in, not in the loss of a token."""
    return make_update(SCORER, loss_for(OBJECTIVES["token_mean"]), SGD, micro_rows=micro_rows)


def gradient(params, batch, micro_rows):
    update = updates(micro_rows)
    acc = update.start(params)
    for row in range(0, ROWS, micro_rows):
        acc = update.accumulate(params, acc, batch, row)
    return acc


def same(one, other, atol=1e-6):
    np.testing.assert_allclose(one.loss, other.loss, atol=atol)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), one.grads, other.grads)
    assert {k: pytest.approx(v, abs=1e-4) for k, v in metrics.to_host(one.metrics).items()} == metrics.to_host(
        other.metrics
    )


OBJECTIVES = {
    "token_mean": algorithms.dapo(high=0.2),
    "sequence_mean": algorithms.grpo(beta=0.0),
    "constant": algorithms.dr_grpo(6.0),
}


def loss_for(objective):
    return lambda logprobs, entropy, batch: policy_loss(objective, logprobs, entropy, batch)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_p23_p24_packing_and_micro_batches_change_neither_loss_nor_gradient(params, name):
    objective = OBJECTIVES[name]
    packed = credited(objective, pack(trajectories(), share=True))
    apart = credited(objective, pack(trajectories()[::-1], share=False))
    assert packed.tokens.shape == apart.tokens.shape
    whole = gradient(params, packed, ROWS)
    assert float(optax.tree.norm(whole.grads)) > 1e-2
    same(gradient(params, packed, 2), whole)
    same(gradient(params, apart, ROWS), whole)


def test_a_batch_of_one_micro_batch_is_not_added_to_zeros(params):
    batch = credited(OBJECTIVES["token_mean"], pack(trajectories(), share=True))
    update = updates(ROWS)
    same(update.gradients(params, batch, 0), gradient(params, batch, ROWS))
    update.step(init_state(SGD, clone(params)), batch, [0])
    assert update.cache_sizes()["gradients"] == 1


def test_eight_devices_change_neither_loss_nor_gradient_nor_placement(params):
    objective = OBJECTIVES["sequence_mean"]
    batch = credited(objective, pack(trajectories(), share=True))
    whole = gradient(params, batch, ROWS)
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    everywhere, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    update = make_update(SCORER, loss_for(objective), adamw(1e-2), micro_rows=ROWS)
    score = make_score(SCORER, micro_rows=ROWS)
    state = jax.device_put(init_state(adamw(1e-2), clone(params)), everywhere)
    spread = jax.device_put(batch, rows)
    with jax.transfer_guard("disallow"):
        same(update.accumulate(state.params, update.start(state.params), spread, 0), whole)
        assert score(state.params, spread).sharding == rows
        for _ in range(2):
            state, _ = update.step(state, spread, range(0, ROWS, ROWS))
    assert set(update.cache_sizes().values()) == {1} == {1, *score.cache_sizes().values()}
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(state))


def test_what_another_run_of_the_process_compiled_is_not_counted(params):
    batch = pack(trajectories(), share=True)
    first, second = make_score(SCORER, micro_rows=2), make_score(SCORER, micro_rows=2)
    first(params, batch)
    second(params, jax.tree.map(lambda field: field[: ROWS // 2], batch))
    assert set(first.cache_sizes().values()) == {1} == set(second.cache_sizes().values())


def test_p23_global_token_mean_for_every_split():
    mask = np.zeros((10, 10), bool)
    mask[0, 1], mask[1:, 1] = True, True
    losses = np.where(np.arange(10) == 0, 1.0, 0.0).astype(np.float32)
    weight = np.asarray(
        weights.token_mean(
            jnp.asarray(mask), jnp.zeros((10, 10), jnp.int32), jnp.zeros((10, 10), jnp.int32), num_trajectories=1
        )
    )
    for parts in (1, 2, 5, 10):
        pieces = np.split(weight * mask * losses[:, None], parts)
        assert sum(float(piece.sum()) for piece in pieces) == pytest.approx(0.1, abs=1e-6)


def test_p09_gradient_of_the_loss_reaches_no_logprob_off_the_mask(params):
    batch = credited(OBJECTIVES["token_mean"], pack(trajectories(), share=True))
    logprobs, _ = SCORER.logprobs(params, batch)
    grad = jax.grad(lambda x: policy_loss(OBJECTIVES["token_mean"], x, None, batch)[0])(logprobs)
    assert not np.any(np.asarray(grad)[~np.asarray(batch.action_mask)])


def test_ratio_is_one_when_the_learner_scores_its_own_batch(params):
    batch = credited(OBJECTIVES["token_mean"], pack(trajectories(), share=True))
    scores = make_score(SCORER, micro_rows=2)(params, batch)
    acc = gradient(params, batch._replace(behavior_logprobs=scores), 2)
    assert metrics.to_host(acc.metrics)["ratio_deviation_max"] < 1e-5


def test_each_function_compiles_once_and_steps_reduce_the_loss(params):
    optimizer = adamw(1e-2, warmup=3, total=20, schedule="cosine", weight_decay=0.01)
    batch = pack(trajectories(), share=True)
    weight = weights.token_mean(batch.action_mask, batch.trajectory_ids, batch.turn_ids, num_trajectories=12)
    batch = jax.device_put(batch._replace(weights=np.asarray(weight)))
    update = make_update(SCORER, imitation_loss, optimizer, micro_rows=4, needs_entropy=True)
    state, losses = init_state(optimizer, clone(params)), []
    with jax.transfer_guard("disallow"):
        for _ in range(6):
            state, info = update.step(state, batch, range(0, ROWS, 4))
            losses.append(info.to_host()["loss"])
    assert losses == sorted(losses, reverse=True) and int(state.step) == 6
    assert set(update.cache_sizes().values()) == {1}
    host = info.to_host()
    assert host["finite"] and host["entropy"] > 0 and host["loss"] == pytest.approx(-host["mean_logprob"], abs=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(params):
    optimizer = adamw(1e-2)
    batch = credited(OBJECTIVES["token_mean"], pack(trajectories(), share=True))
    update = make_update(SCORER, loss_for(OBJECTIVES["token_mean"]), optimizer, micro_rows=ROWS)
    state = init_state(optimizer, clone(params))
    kept = jax.device_get(state)
    action = jnp.unravel_index(jnp.argmax(batch.action_mask), (ROWS, WIDTH))
    for poison in (np.nan, np.inf):
        poisoned = batch._replace(weights=batch.weights.at[action].set(poison))
        state, info = update.step(state, poisoned, [0])
        assert not info.to_host()["finite"] and info.to_host()["update_norm"] == 0
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), kept)
    state, info = update.step(state, batch, [0])
    assert info.to_host()["finite"] and int(state.step) == 1


def test_state_and_gradients_are_donated(params):
    update = updates(ROWS)
    batch = credited(OBJECTIVES["token_mean"], pack(trajectories(), share=True))
    state = init_state(SGD, clone(params))
    first = update.start(state.params)
    second = update.accumulate(state.params, first, batch, 0)
    update.apply(state, second)
    gone = [state.params, first.grads, second.grads]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(gone))
    assert isinstance(state, LearnerState)


def test_micro_rows_that_do_not_divide_the_batch_are_named(params):
    batch = pack(trajectories(), share=True)
    with pytest.raises(ValueError, match=r"micro_rows.*8 rows, got 3"):
        make_score(SCORER, micro_rows=3)(params, jax.device_put(batch))


def test_metrics_merge_keeps_sums_apart_from_counts():
    one, many = (
        Metrics({"x": (jnp.float32(s), jnp.float32(c))}, {"m": jnp.float32(m)}) for s, c, m in ((1, 1, 3), (0, 9, 2))
    )
    assert metrics.to_host(metrics.merge(one, many)) == {"x": pytest.approx(0.1), "m": 3.0}
    assert metrics.to_host(metrics.empty(one)) == {"m": 0.0}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"warmup": -1}, "warmup"),
        ({"schedule": "cosine"}, "total"),
        ({"schedule": "cosine", "warmup": 5, "total": 5}, "total"),
        ({"schedule": "linear"}, "schedule"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ],
)
def test_optimizer_settings_that_contradict_are_named(settings, name):
    with pytest.raises(ValueError, match=name):
        adamw(1e-3, **settings)
    with pytest.raises(ValueError, match="learning_rate"):
        adamw(0.0)


def test_warm_up_and_cosine_reach_their_ends():
    optimizer = adamw(1.0, warmup=4, total=10, schedule="cosine", max_grad_norm=None)
    state, moves = optimizer.init(jnp.zeros(1)), []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(11):
            move, state = optimizer.update(jnp.ones(1), state, jnp.zeros(1))
            moves.append(-float(move[0]))
    np.testing.assert_allclose(moves[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-4)
    np.testing.assert_allclose(moves[10], 0.0, atol=1e-6)
