"""Weights, credit and the loss as a whole: aggregation numbers, exclusions, compositions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.batch import TokenBatch
from agentrl_jax.kernels.logprobs import token_logprobs
from agentrl_jax.rl import algorithms, kl, weights
from agentrl_jax.rl.imitation import imitation_loss, mixture_weights
from agentrl_jax.rl.objective import Objective, assign, policy_loss

OLD = jnp.asarray([[-1, -2, 0], [-0.5, -1.5, -1]], jnp.float32)
NEW = jnp.asarray([[-0.7, -2, 0], [-0.2, -1.9, -1]], jnp.float32)
REF = jnp.asarray([[-1.1, -1.9, 0], [-0.5, -1.5, -1.3]], jnp.float32)
MASK = np.asarray([[True, True, False], [True, True, True]])
IDS = np.asarray([[0, 0, 2], [1, 1, 1]], np.int32)


def make_batch(mask, ids, behavior, **fields):
    zeros, floats = np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.float32)
    return TokenBatch(
        tokens=zeros,
        parents=zeros - 1,
        subtree_ends=zeros,
        positions=zeros,
        trajectory_ids=jnp.asarray(ids),
        turn_ids=zeros,
        sources=zeros.astype(np.int8),
        action_mask=jnp.asarray(mask),
        behavior_logprobs=behavior,
        advantages=fields.pop("advantages", floats),
        weights=fields.pop("weights", floats),
        policy_versions=zeros,
        **fields,
    )


def fixture(weigh, **fields):
    weight = weigh(jnp.asarray(MASK), jnp.asarray(IDS), jnp.zeros_like(IDS), num_trajectories=2)
    advantages = np.where(MASK, np.float32([[1.0], [-1.0]]), np.float32(0))
    return make_batch(MASK, IDS, OLD, advantages=advantages, weights=weight, **fields)


fill = partial(jax.jit, static_argnums=0)(assign)


@partial(jax.jit, static_argnums=0)
def slopes(objective, logprobs, batch):
    """d loss / d logprobs, and the metrics."""
    return jax.grad(lambda x: policy_loss(objective, x, None, batch), has_aux=True)(logprobs)


def loss_of(objective, batch, logprobs=NEW):
    return float(policy_loss(objective, logprobs, None, batch)[0])


@pytest.mark.parametrize(
    ("weigh", "expected"),
    [
        (weights.sequence_mean, -0.0250235),
        (weights.token_mean, 0.1899718),
        (weights.constant(1.0), 0.4749294),
        (weights.constant(4.0), 0.1187324),
    ],
)
def test_aggregation_worked_numbers(weigh, expected):
    assert loss_of(algorithms.grpo(beta=0.0), fixture(weigh)) == pytest.approx(expected, abs=1e-6)


def test_whole_objectives_worked_numbers():
    assert loss_of(algorithms.grpo(), fixture(weights.sequence_mean, ref_logprobs=REF)) == pytest.approx(
        -0.0231122, abs=1e-6
    )
    assert loss_of(algorithms.dapo(), fixture(weights.token_mean)) == pytest.approx(0.1739718, abs=1e-6)


def test_p25_length_bias_of_each_aggregation():
    mask = np.arange(8)[None] < np.asarray([[2], [8]])
    ids = np.where(mask, np.asarray([[0], [1]]), 2).astype(np.int32)
    for weigh, ratio in ((weights.sequence_mean, 4.0), (weights.token_mean, 1.0), (weights.constant(8.0), 1.0)):
        w = np.asarray(weigh(jnp.asarray(mask), jnp.asarray(ids), jnp.zeros_like(ids), num_trajectories=2))
        assert w[0, 0] / w[1, 0] == pytest.approx(ratio)


@pytest.mark.parametrize("sizes", [(10,), (5, 5), (1, 9), (2,) * 5, (1,) * 10])
def test_p23_the_mean_over_tokens_is_that_of_the_step_however_it_is_split(sizes):
    ids = np.asarray([[0]] + [[1]] * 9, np.int32)
    mask = np.ones((10, 1), bool)
    weight = weights.token_mean(jnp.asarray(mask), jnp.asarray(ids), jnp.asarray(ids), num_trajectories=2)
    advantages = np.asarray([[-1.0]] + [[0.0]] * 9, np.float32)
    behavior = jnp.zeros((10, 1))
    batch = make_batch(mask, ids, behavior, advantages=advantages, weights=weight)
    ends = np.cumsum(sizes)
    parts = [jax.tree.map(lambda x, a=end - size, b=end: x[a:b], batch) for size, end in zip(sizes, ends, strict=True)]
    losses = [loss_of(algorithms.dapo(), one, one.behavior_logprobs) for one in parts]
    assert sum(losses) == pytest.approx(0.1, abs=1e-7)  # a mean of two rows' means would be 0.5


def test_accumulation_keeps_the_denominator_of_the_step():
    ids = np.asarray([[0, 2, 2], [1, 1, 1]], np.int32)
    weight = weights.token_mean(jnp.asarray(ids < 2), jnp.asarray(ids), jnp.asarray(ids), num_trajectories=2)
    losses = np.asarray([[1, 0, 0], [1, 1, 5]], np.float32)
    assert float((weight * losses).sum()) == pytest.approx(2.0)  # the mean of both micro-batches' means is 1.667


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_p24_a_constant_divisor_does_not_depend_on_the_micro_batches(micro):
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(4, dtype=np.int32)[:, None], 5, axis=1)
    behavior = jnp.asarray(-rng.random((4, 5)), jnp.float32)
    objective = algorithms.dr_grpo(5.0)
    everyone = np.ones((1, 4), bool)
    batch = jax.device_get(fill(objective, make_batch(ids < 4, ids, behavior), REWARDS[:1], everyone, everyone))
    parts = [jax.tree.map(lambda x, a=start: x[a : a + micro], batch) for start in range(0, 4, micro)]
    grads = [slopes(objective, part.behavior_logprobs, part)[0] for part in parts]
    expected = -np.asarray([[0.5], [-0.5], [0.5], [-0.5]]) * np.ones((4, 5)) / (4 * 5)
    np.testing.assert_allclose(np.concatenate(grads), expected, atol=1e-7)


rows = st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=4, max_size=4)


@settings(max_examples=25, deadline=None)
@given(rows, st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 2**24 - 1))
def test_excluding_equals_deleting(ids, keep, bits):
    ids = np.asarray(ids, np.int32)
    mask = (np.asarray([bits >> i & 1 for i in range(ids.size)], bool).reshape(ids.shape)) & (ids < 4)
    kept = np.append(np.asarray(keep), False)
    without = mask & kept[ids]
    for weigh in (weights.token_mean, weights.sequence_mean, weights.constant(5.0), weights.nested_turn_mean):
        call = partial(weigh, num_trajectories=4)
        excluded = call(jnp.asarray(mask), jnp.asarray(ids), jnp.asarray(ids), keep=jnp.asarray(keep))
        deleted = call(jnp.asarray(without), jnp.asarray(ids), jnp.asarray(ids))
        np.testing.assert_allclose(excluded, deleted, rtol=1e-6)
        total = float(np.asarray(excluded).sum())
        if weigh is not weights.token_mean and without.any():
            lengths = np.asarray([(without & (ids == n)).sum() for n in range(4)])
            means = (weights.sequence_mean, weights.nested_turn_mean)
            pooled = 1.0 if weigh in means else lengths.sum() / ((lengths > 0).sum() * 5.0)
            assert total == pytest.approx(pooled, abs=1e-5)
        elif without.any():
            assert total == pytest.approx(1.0, abs=1e-5)
        else:
            assert total == 0


REWARDS = np.asarray([[1, 0, 1, 0], [0, 0, 1, 7], [5, 5, 5, 5]], np.float32)
VALID = np.asarray([[True] * 4, [True, True, True, False], [True] * 4])


def one_token_each(order):
    ids = np.asarray(order, np.int32)[:, None]
    return make_batch(np.ones(ids.shape, bool), ids, np.zeros(ids.shape, np.float32))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_p27_p29_grouping_is_by_id_and_not_by_position(seed):
    order = np.random.default_rng(seed).permutation(12)
    objective = algorithms.dr_grpo(4.0)
    filled = jax.jit(partial(assign, objective))(one_token_each(order), REWARDS, VALID, VALID)
    expected = np.asarray([0.5, -0.5, 0.5, -0.5, -1 / 3, -1 / 3, 2 / 3, 0, 0, 0, 0, 0], np.float32)
    np.testing.assert_allclose(filled.advantages[:, 0], expected[order], atol=1e-6)
    assert not np.any(np.asarray(filled.advantages[:, 0])[order >= 8])
    np.testing.assert_allclose(filled.weights[:, 0], np.where(order == 7, 0, 1 / 44), rtol=1e-5)


def test_p15_a_truncated_trajectory_that_is_not_trained_on_leaves_loss_denominator_and_metrics():
    everyone, keep = np.ones((1, 2), bool), np.asarray([[True, False]])
    rewards = np.asarray([[1.0, 0.0]], np.float32)
    objective = algorithms.dapo()
    filled = fill(objective, make_batch(MASK, IDS, OLD), rewards, everyone, keep)
    np.testing.assert_allclose(filled.weights, [[0.5, 0.5, 0], [0, 0, 0]])
    grad, figures = slopes(objective, NEW, filled)
    assert not np.any(grad[1]) and np.any(grad[0])
    assert {float(count) for _, count in figures.sums.values()} == {2.0}
    alone = MASK & (IDS == 0)
    deleted = fill(objective, make_batch(alone, IDS, OLD), rewards, everyone, everyone)
    assert loss_of(objective, filled) == loss_of(objective, deleted)
    # It still counts in the baseline: whether it may is `valid`'s question.
    np.testing.assert_allclose(np.asarray(filled.advantages)[0, 0], 0.5 / (np.sqrt(0.5) + 1e-6), rtol=1e-5)


def test_p11_an_end_token_that_nobody_sampled_is_no_action():
    mask, ids = np.asarray([[True, True, True, False]]), np.zeros((1, 4), np.int32)
    behavior = jnp.asarray([[-1.0, -2.0, -0.5, 0.0]])  # the appended one has no log-prob: 0 stands for nothing
    objective, one = algorithms.reinforce(), np.ones((1, 1), bool)
    batch = fill(objective, make_batch(mask, ids, behavior), np.ones((1, 1), np.float32), one, one)
    grad, figures = slopes(objective, behavior.at[0, 3].set(-9.0), batch)
    np.testing.assert_allclose(grad, [[-1, -1, -1, 0]], atol=1e-6)
    assert float(figures.sums["mean_logprob"][1]) == 3
    assert float(figures.maxima["ratio_deviation_max"]) == 0


def test_p12_lengths_come_from_the_mask_and_not_from_the_id_of_the_padding():
    tokens = np.asarray([[5, 9], [5, 6], [9, 9]], np.int32)  # 9 ends a sequence and pads it
    mask = np.asarray([[True, True], [True, True], [True, False]])
    ids = np.where(mask, np.arange(3)[:, None], 3).astype(np.int32)
    batch = make_batch(mask, ids, np.zeros(mask.shape, np.float32))._replace(tokens=tokens)
    everyone = np.ones((1, 3), bool)
    filled = fill(algorithms.grpo(beta=0.0), batch, np.eye(1, 3, dtype=np.float32), everyone, everyone)
    np.testing.assert_allclose(filled.weights, [[1 / 6, 1 / 6], [1 / 6, 1 / 6], [1 / 3, 0]], rtol=1e-6)


def test_an_invalid_trajectory_is_never_kept_and_shared_tokens_get_nothing():
    batch = one_token_each([0, 1, 2, 3])
    batch = batch._replace(trajectory_ids=jnp.asarray([[0], [1], [2], [4]], jnp.int32))
    valid = np.asarray([[True, True, False, True]])
    filled = assign(algorithms.dapo(), batch, REWARDS[:1], valid, np.ones((1, 4), bool))
    np.testing.assert_allclose(filled.weights[:, 0], [0.5, 0.5, 0, 0])
    assert not np.any(np.asarray(filled.advantages)[2:])


def test_p31_constant_groups_push_no_gradient_without_kl_and_only_the_kl_with_it():
    constant = np.full((1, 2), 0.1, np.float32)
    everyone = np.ones((1, 2), bool)
    batch = make_batch(MASK, IDS, OLD, ref_logprobs=REF)
    for objective in (algorithms.grpo(beta=0.0), algorithms.dapo(), algorithms.rloo(), algorithms.dr_grpo(8.0)):
        filled = assign(objective, batch, constant, everyone, everyone)
        assert not np.any(jax.grad(lambda x, o=objective, b=filled: policy_loss(o, x, None, b)[0])(NEW))
        assert np.asarray(filled.weights).any()  # they do count in the denominator
    anchored = algorithms.grpo(beta=0.04)
    filled = assign(anchored, batch, constant, everyone, everyone)
    found = jax.grad(lambda x: policy_loss(anchored, x, None, filled)[0])(NEW)
    alone = jax.grad(lambda x: 0.04 * jnp.sum(filled.weights * jnp.where(MASK, kl.k3(x, REF), 0.0)))(NEW)
    np.testing.assert_allclose(found, alone, atol=1e-7)


def test_metrics_are_sums_and_maxima_of_counted_tokens():
    _, figures = policy_loss(algorithms.dapo(), NEW, -NEW, fixture(weights.token_mean))
    total, count = figures.sums["clip_fraction"]
    assert (float(total), float(count)) == (2.0, 5.0)  # +1 above 1.28, -1 below 0.8
    assert float(figures.maxima["ratio_deviation_max"]) == pytest.approx(0.349859, abs=1e-5)
    assert float(figures.sums["entropy"][0]) == pytest.approx(4.8 + 1.0, abs=1e-5)


def test_contradictions_are_refused_before_anything_runs():
    parts = vars(algorithms.dapo())
    with pytest.raises(ValueError, match="beta"):
        Objective(**{**parts, "beta": 0.1})
    with pytest.raises(ValueError, match="no effect"):
        Objective(**{**parts, "kl": kl.k3})
    with pytest.raises(ValueError, match="needs_entropy"):
        policy_loss(Objective(**{**parts, "entropy_coef": 0.1}), NEW, None, fixture(weights.token_mean))
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(algorithms.grpo(), NEW, None, fixture(weights.token_mean))


def test_imitation_learns_from_actions_only():
    mask = np.asarray([[True, True, False, False, True]])
    logprobs = jnp.asarray([[-0.5, -0.1, -2, -3, -0.2]], jnp.float32)
    ids = np.zeros((1, 5), np.int32)
    weight = weights.token_mean(jnp.asarray(mask), jnp.asarray(ids), jnp.asarray(ids), num_trajectories=1)
    batch = make_batch(mask, ids, logprobs, weights=weight)
    loss, figures = imitation_loss(logprobs, None, batch)
    assert float(loss) == pytest.approx(0.8 / 3, abs=1e-6)
    assert float(figures.sums["mean_logprob"][0]) == pytest.approx(-0.8, abs=1e-6)
    assert np.asarray(jax.grad(lambda x: imitation_loss(x, None, batch)[0])(logprobs))[0, 2:4].tolist() == [0, 0]


def head(logits, tokens, mask, temperature=1.0):
    """The loss head over given logits: hidden states are logits, the unembedding is the identity."""
    logits = jnp.asarray(logits, jnp.float32)[None]
    tokens, parents = np.asarray([tokens], np.int32), np.arange(-1, len(tokens) - 1, dtype=np.int32)[None]
    unembedding, mask = jnp.eye(logits.shape[-1]), jnp.asarray([mask])
    args = (unembedding, jnp.asarray(tokens), jnp.asarray(parents), mask)
    return token_logprobs(logits, *args, temperature=temperature)[0]


def test_p09_the_loss_is_carried_by_the_logits_that_predict_the_actions():
    mask, logits = [False, False, True, True], np.random.default_rng(0).normal(size=(4, 5))
    batch = make_batch(np.asarray([mask]), np.zeros((1, 4), np.int32), np.zeros((1, 4), np.float32))
    one = np.ones((1, 1), bool)
    batch = fill(algorithms.reinforce(), batch, np.ones((1, 1), np.float32), one, one)

    def loss(logits):
        return policy_loss(algorithms.reinforce(), head(logits, [1, 2, 3, 4], mask), None, batch)[0]

    grad = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(logits, jnp.float32)))
    assert np.abs(grad).max(axis=1).astype(bool).tolist() == [False, True, True, False]
    assert grad[1].argmin() == 3 and grad[2].argmin() == 4  # up goes the token taken


def test_p36_the_ratio_is_one_only_at_the_samplers_temperature():
    logits, mask = np.asarray([[1.0, 0, 0], [0, 0, 0]]), [False, True]
    sampler = np.log(np.exp(2) / (np.exp(2) + 2))  # 0.787 at temperature 0.5
    found = {t: float(head(logits, [0, 0], mask, t)[0, 1]) for t in (0.5, 1.0)}
    assert np.exp(found[0.5] - sampler) == pytest.approx(1.0, abs=1e-6)
    assert np.exp(found[1.0] - sampler) == pytest.approx(0.732, abs=1e-3)


MIXED = np.asarray([[0, 0, 0, 0], [1, 1, 3, 3], [2, 3, 3, 3]], np.int32)  # agent, agent, general


@pytest.mark.parametrize("shares", [(0.2, 0.8), (1.0, 0.0), (0.5, 0.5)])
def test_mixture_gives_each_data_set_its_share_of_the_loss_however_long_its_samples_are(shares):
    sets = jnp.asarray([0, 0, 1], jnp.int32)
    mask = jnp.asarray(MIXED < 3)
    weight = mixture_weights(mask, jnp.asarray(MIXED), sets, shares=shares, num_trajectories=3)
    agent, general = (float(weight[at].sum()) for at in (slice(0, 2), slice(2, 3)))
    assert (agent, general) == pytest.approx(shares)
    np.testing.assert_allclose(weight[0].sum(), weight[1].sum(), rtol=1e-6)  # samples of a set weigh alike
    losses = np.asarray([[0.5], [0.5], [2.0]], np.float32)
    assert float((weight * losses).sum()) == pytest.approx(shares[0] * 0.5 + shares[1] * 2.0)


def test_mixture_worked_number_and_refusals():
    call = partial(mixture_weights, jnp.asarray(MIXED < 3), jnp.asarray(MIXED), num_trajectories=3)
    sets = jnp.asarray([0, 0, 1], jnp.int32)
    losses = np.asarray([[0.5], [0.5], [2.0]], np.float32)
    assert float((call(sets, shares=(0.2, 0.8)) * losses).sum()) == pytest.approx(1.7)
    assert float(call(jnp.zeros_like(sets), shares=(0.2, 0.8)).sum()) == pytest.approx(0.2)  # no general sample
    for shares in ((0.2, 0.9), (1.5, -0.5), ()):
        with pytest.raises(ValueError, match="shares"):
            call(sets, shares=shares)
    with pytest.raises(ValueError, match="data_sets"):
        call(sets[:2], shares=(0.2, 0.8))


@pytest.mark.parametrize("garbage", [np.nan, -np.inf])
@pytest.mark.parametrize("objective", [algorithms.grpo(), algorithms.decoupled_ppo(), algorithms.gspo()])
def test_what_stands_in_an_excluded_trajectory_reaches_neither_the_loss_nor_its_gradient(objective, garbage):
    spoilt = np.asarray([[False] * 3, [False, True, False]])
    fields = {name: np.where(spoilt, garbage, clean) for name, clean in (("old_logprobs", OLD), ("ref_logprobs", REF))}
    rewards, included = jnp.asarray([[1.0, 0.5]]), jnp.asarray([[True, False]])

    def evaluate(logprobs, behavior, fields):
        fields = {name: jnp.asarray(value, jnp.float32) for name, value in fields.items()}
        batch = assign(objective, make_batch(MASK, IDS, behavior, **fields), rewards, included, included)
        return jax.value_and_grad(lambda x: policy_loss(objective, x, None, batch)[0])(logprobs)

    clean = evaluate(NEW, OLD, {"old_logprobs": OLD, "ref_logprobs": REF})
    found = evaluate(jnp.where(spoilt, garbage, NEW), jnp.where(spoilt, garbage, OLD), fields)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, clean)


def test_imitation_does_not_read_what_has_no_weight():
    batch = make_batch(MASK, IDS, OLD, weights=jnp.asarray([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    logprobs = jnp.asarray([[-1.0, -2.0, 0.0], [-jnp.inf, jnp.nan, -1.0]])
    value, gradient = jax.value_and_grad(lambda x: imitation_loss(x, None, batch)[0])(logprobs)
    assert float(value) == 1.5
    np.testing.assert_array_equal(np.asarray(gradient), [[-0.5, -0.5, 0.0], [0.0, 0.0, 0.0]])
