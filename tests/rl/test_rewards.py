"""Rewards: the order of what counts, the length penalty, and values that nobody scored."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl import weights
from agentrl_jax.rl.advantages import group_centered, leave_one_out
from agentrl_jax.rl.rewards import check_rewards, decided, lexicographic, read_scores, scored_mean, soft_overlong


def floats(*values):
    return jnp.asarray(values, jnp.float32)


def bools(*values):
    return jnp.asarray([bool(v) for v in values], jnp.bool_)


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=1e-6)


VIOLATED, OUTCOME, QUALITY = bools(1, 0, 0, 0), floats(1, 0, 1, 1), floats(1, 1, 0, 1)


def test_lexicographic_worked_numbers():
    close(lexicographic(VIOLATED, OUTCOME, QUALITY), [0, 0, 1, 1.05])
    close(lexicographic(VIOLATED, OUTCOME, QUALITY, broken=-1.0), [-1, 0, 1, 1.05])


def test_cost_ranks_successes_of_one_quality_and_nothing_else():
    cost = floats(0, 0, 1, 0.5)
    close(lexicographic(VIOLATED, OUTCOME, QUALITY, cost), [0, 0, 1, 1.05 + 0.5 * 0.0025])
    cheap = lexicographic(VIOLATED, OUTCOME, QUALITY, jnp.zeros(4))
    close(cheap - lexicographic(VIOLATED, OUTCOME, QUALITY, jnp.ones(4)), [0, 0, 0.0025, 0.0025])
    four = partial(lexicographic, quality_levels=4)
    close(four(bools(0, 0), floats(1, 1), floats(0.45, 0.55), floats(1, 0)), [1.025, 1.025 + 0.05 / 8])


score = jax.jit(partial(lexicographic, quality_levels=20))
verdict = st.tuples(
    st.booleans(), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(0, 20), st.integers(0, 4), st.integers(-2, 2)
)


@settings(max_examples=50, deadline=None)
@given(verdict, verdict)
def test_no_amount_of_the_later_reverses_the_earlier(one, other):
    """Against the order of tuples, with qualities up to a half step off their level and out of range."""
    pair = (one, other)
    levels = [q for *_, q, _, _ in pair]
    quality = floats(*((q + shift / 5) / 20 for *_, q, _, shift in pair))
    reward = score(
        bools(*(v for v, *_ in pair)), floats(*(o for _, o, *_ in pair)), quality, floats(*(c / 4 for *_, c, _ in pair))
    )
    keys = [
        (0,) if v else (1, o, level, -c) if o >= 1 else (1, o)
        for (v, o, _, c, _), level in zip(pair, levels, strict=True)
    ]
    found, expected = np.sign(float(reward[0]) - float(reward[1])), (keys[0] > keys[1]) - (keys[0] < keys[1])
    if keys[0][0] != keys[1][0] and 0.0 in (one[1], other[1]):
        assert found in (0, expected)  # broken = 0: breaking a rule pays no better than failing, and no worse
    else:
        assert found == expected


def test_quality_and_cost_out_of_range_are_limited():
    solved = (bools(0, 0), floats(1, 1))
    close(lexicographic(*solved, floats(9, -9)), [1.05, 1])
    close(lexicographic(*solved, floats(9, -9), floats(-9, 9)), [1.0525, 1])


@pytest.mark.parametrize(
    ("given_cost", "choice", "named"),
    [
        (False, {"quality_scale": -0.1}, "quality_scale"),
        (False, {"broken": 0.5}, "broken"),
        (False, {"quality_levels": 5}, "no effect without cost"),
        (True, {"quality_levels": 0}, "quality_levels"),
        (True, {"quality_scale": 0.0}, "quality_scale: expected at least 0.0002"),
    ],
)
def test_choices_that_cannot_hold_the_order_are_refused(given_cost, choice, named):
    cost = jnp.zeros(4) if given_cost else None
    with pytest.raises(ValueError, match=named):
        jax.eval_shape(partial(lexicographic, **choice), VIOLATED, OUTCOME, QUALITY, cost)


def test_length_penalty_worked_numbers():
    lengths = jnp.asarray([0, 16384, 16385, 18432, 20480, 30000], jnp.int32)
    found = soft_overlong(lengths, max_length=20480, buffer=4096)
    np.testing.assert_array_equal(found, np.float32([0, 0, -0.000244140625, -0.5, -1, -1]))


@pytest.mark.parametrize("buffer", [0, 101])
def test_length_penalty_needs_a_buffer_below_the_limit(buffer):
    with pytest.raises(ValueError, match="buffer"):
        soft_overlong(jnp.asarray([1]), max_length=100, buffer=buffer)


def test_p41_an_unscored_member_is_not_a_zero():
    rewards, scored = read_scores([1.0, None, 0.0])
    close(group_centered(rewards, scored, scale_by_std=False), [0.5, 0, -0.5])
    close(leave_one_out(rewards, scored), [1, 0, -1])
    total, count = scored_mean(rewards, scored)
    assert (float(total), float(count), len(rewards) - int(count)) == (1.0, 2.0, 1)
    ids = jnp.arange(3, dtype=jnp.int32)[:, None]
    weight = weights.token_mean(jnp.ones((3, 1), jnp.bool_), ids, ids, num_trajectories=3, keep=scored)
    close(weight[:, 0], [0.5, 0, 0.5])


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300])
def test_p41_a_reward_that_is_no_number_names_the_trajectory(wrong):
    names = ["task-3/0", "task-3/1", "task-4/0", "task-4/1"]
    rewards = np.asarray([[1.0, 0.0], [wrong, 0.5]])
    with pytest.raises(ValueError, match=r"task-4/0: (nan|inf|-inf|1e\+300): correct"):
        check_rewards(rewards, np.ones((2, 2), bool), names)
    check_rewards(rewards, np.asarray([[True, True], [False, True]]), names)


def test_p41_missing_rewards_are_refused_where_they_count_and_long_lists_are_cut():
    with pytest.raises(ValueError, match="b: nan"):
        check_rewards([1.0, None, 0.0], [True] * 3, "abc")
    with pytest.raises(ValueError, match=r"e: nan and 3 more"):
        check_rewards([np.nan] * 8, [True] * 8, "abcdefgh")
    with pytest.raises(ValueError, match="a name for each"):
        check_rewards([1.0, 2.0], [True] * 2, "abc")


def test_a_nan_is_a_score_and_not_a_missing_one():
    values, scored = read_scores([np.nan, None])
    assert np.isnan(values[0]) and scored.tolist() == [True, False]
    with pytest.raises(ValueError, match="first"):
        check_rewards(values, scored, ["first", "second"])


def test_scored_means_add_up_over_parts_and_read_nothing_unscored():
    values = np.asarray([[0.5, np.nan, 1], [np.inf, 2, 4]], np.float32)
    scored = np.asarray([[True, False, True], [False, True, True]])
    whole, parts = scored_mean(values, scored), [scored_mean(values[i], scored[i]) for i in range(2)]
    close(whole, [7.5, 4])
    close(whole, np.sum(np.asarray(parts), axis=0))
    assert [float(x) for x in scored_mean(values, np.zeros_like(scored))] == [0, 0]
    with pytest.raises(ValueError, match="scored_mean: scored"):
        scored_mean(values, scored.astype(np.float32))


verdicts = st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), min_size=5, max_size=5)
decide = jax.jit(decided)


@settings(max_examples=40, deadline=None)
@given(verdicts)
def test_decided_second_route(group):
    violated, outcome, valid = (np.asarray(column) for column in zip(*group, strict=True))
    outcome = np.where(valid, outcome, np.nan).astype(np.float32)
    distinct = {(v, float(o)) for v, o, counts in zip(violated, outcome, valid, strict=True) if counts}
    assert bool(decide(violated, outcome, valid)) == (len(distinct) > 1)


def test_p30_p31_quality_alone_is_never_blown_up_to_unit_size():
    violated, valid = jnp.zeros((2, 3), jnp.bool_), jnp.asarray([[True] * 3, [True, False, False]])
    outcome, quality = jnp.ones((2, 3)), jnp.asarray([[0.1, 0.5, 0.9]] * 2, jnp.float32)
    rewards = lexicographic(violated, outcome, quality)
    assert np.abs(np.asarray(group_centered(rewards[0], valid[0]))).max() > 0.9  # what happens without the rule
    rewards = jnp.where(jax.vmap(decided)(violated, outcome, valid)[:, None], rewards, 0.0)
    assert not np.any(jax.vmap(group_centered)(rewards, valid))


def test_decided_is_of_one_group():
    with pytest.raises(ValueError, match="vmap"):
        decided(VIOLATED[None], OUTCOME[None], bools(1, 1, 1, 1)[None])
