"""Advantages: worked numbers, a second route in numpy, and who leaves the baseline."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl.advantages import (
    batch_scaled,
    componentwise,
    global_whitened,
    group_baseline_whitened,
    group_centered,
    leave_one_out,
    turn_discounted,
)


def arrays(rewards, valid=None):
    valid = [True] * len(rewards) if valid is None else valid
    return jnp.asarray(rewards, jnp.float32), jnp.asarray(valid, jnp.bool_)


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=1e-6)


def test_worked_numbers():
    easy = arrays([1, 0, 0, 0])
    close(group_centered(*easy), [1.499997, -0.499999, -0.499999, -0.499999])
    close(group_centered(*easy, ddof=0), [1.732047, -0.577349, -0.577349, -0.577349])
    close(group_centered(*easy, eps=1e-4), [1.4997, -0.4999, -0.4999, -0.4999])
    close(group_centered(*easy, scale_by_std=False), [0.75, -0.25, -0.25, -0.25])
    close(leave_one_out(*arrays([1, 0, 0, 1])), [0.6666667, -0.6666667, -0.6666667, 0.6666667])


def test_p26_invalid_members_leave_the_statistics():
    group = arrays([1, 1, 0, 0], [True, False, True, True])
    close(group_centered(*group, scale_by_std=False), [0.6666667, 0, -0.3333333, -0.3333333])
    close(leave_one_out(*group), [1.0, 0, -0.5, -0.5])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_p26_what_stands_at_an_invalid_member_is_never_read(garbage):
    group = arrays([garbage, 1, 0, 0], [False, True, True, True])
    for estimate in (group_centered, leave_one_out):
        close(estimate(*group)[1:], estimate(*arrays([1, 0, 0])))
        assert estimate(*group)[0] == 0


def test_p27_groups_of_unequal_size_keep_apart():
    rewards = jnp.asarray([[1, 0, 1, 0], [0, 0, 1, 9], [5, 5, 5, 5]], jnp.float32)
    valid = jnp.asarray([[True] * 4, [True, True, True, False], [True] * 4])
    found = jax.vmap(lambda r, v: group_centered(r, v, scale_by_std=False))(rewards, valid)
    close(found[1], [-1 / 3, -1 / 3, 2 / 3, 0])
    assert not np.any(found[2])


@pytest.mark.parametrize("estimate", [group_centered, leave_one_out])
def test_p30_a_group_of_one_gets_zero(estimate):
    assert not np.any(estimate(*arrays([0.7, 0.2], [True, False])))
    assert not np.any(estimate(*arrays([0.7])))


@pytest.mark.parametrize("estimate", [group_centered, leave_one_out])
@pytest.mark.parametrize(("value", "count"), [(0.1, 7), (0.3, 11), (1e6 + 0.1, 13)])
def test_p31_a_constant_group_gets_exactly_zero(estimate, value, count):
    assert not np.any(jax.jit(estimate)(*arrays([value] * count)))
    assert not np.any(estimate(*arrays([9.0] + [value] * count, [False] + [True] * count)))


members = st.lists(st.tuples(st.integers(-8, 8), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(members)
def test_second_route_and_permutation(group):
    rewards, valid = np.asarray([r / 4 for r, _ in group], np.float64), np.asarray([v for _, v in group])
    padded = (np.pad(rewards, (0, 8 - len(group))), np.pad(valid, (0, 8 - len(group))))
    chosen = rewards[valid]
    centered, others = np.zeros(8), np.zeros(8)
    for i in np.flatnonzero(valid):
        if len(chosen) > 1:
            centered[i] = (rewards[i] - chosen.mean()) / (chosen.std(ddof=1) + 1e-6)
            others[i] = rewards[i] - (chosen.sum() - rewards[i]) / (len(chosen) - 1)
    found = group_centered(*arrays(*padded))
    close(found, centered)
    close(leave_one_out(*arrays(*padded)), others)
    assert abs(float(leave_one_out(*arrays(*padded)).sum())) < 1e-5
    turned = group_centered(*arrays(padded[0][::-1].copy(), padded[1][::-1].copy()))
    close(turned[::-1], found)


def test_grpo_standard_deviations_of_the_worked_group_and_of_binary_rewards():
    def std(rewards, ddof):
        centered = group_centered(*arrays(rewards), scale_by_std=False)
        return float(centered[0] / group_centered(*arrays(rewards), ddof=ddof)[0]) - 1e-6

    assert std([1, 0, 0, 0], 0) == pytest.approx(0.4330127018922193, abs=1e-6)
    assert std([1, 0, 0, 0], 1) == pytest.approx(0.5, abs=1e-6)
    assert std([1] + [0] * 19, 0) == pytest.approx(0.21794494717703367, abs=1e-6)
    assert std([1] * 10 + [0] * 10, 0) == pytest.approx(0.5, abs=1e-6)


def test_leave_one_out_is_the_centered_reward_times_n_over_n_minus_1():
    group = arrays([1, 0, 0, 1])
    scaled = 4 / 3 * np.asarray(group_centered(*group, scale_by_std=False))
    close(scaled, [0.6666666666666666, -0.6666666666666666, -0.6666666666666666, 0.6666666666666666])
    close(leave_one_out(*group), scaled)


def test_p19_a_truncated_rollout_leaves_the_baseline_or_counts_as_a_failure():
    masked, as_zero = arrays([1, 0, 0], [True, True, False]), arrays([1, 0, 0])
    close(group_centered(*masked, scale_by_std=False), [0.5, -0.5, 0])
    close(group_centered(*as_zero, scale_by_std=False), [2 / 3, -1 / 3, -1 / 3])


def test_p26_an_environment_failure_leaves_no_phantom_advantage():
    close(group_centered(*arrays([1, 0, 1, 0], [True] * 3 + [False]), scale_by_std=False), [1 / 3, -2 / 3, 1 / 3, 0])


TOKENS = jnp.asarray([[1, 1, 1], [0, 0, jnp.nan], [0, 7, jnp.inf]], jnp.float32)
TOKEN_MASK = jnp.asarray([[True, True, True], [True, True, False], [True, False, False]])


def test_whitening_worked_numbers_and_no_leak_off_the_mask():
    close(global_whitened(TOKENS, TOKEN_MASK), [[1, 1, 1], [-1, -1, 0], [-1, 0, 0]])
    up = 0.9128709139607618
    found = global_whitened(TOKENS, TOKEN_MASK, ddof=1)
    close(found, [[up, up, up], [-up, -up, 0], [-up, 0, 0]])
    assert not np.any(np.asarray(found)[~np.asarray(TOKEN_MASK)])


def whitened_in_float64(values, mask, ddof, eps=1e-8):
    chosen = [(i, float(values[i])) for i in np.ndindex(*values.shape) if mask[i]]
    out = np.zeros(values.shape)
    if not chosen:
        return out
    mean = sum(x for _, x in chosen) / len(chosen)
    variance = sum((x - mean) ** 2 for _, x in chosen) / max(len(chosen) - ddof, 1)
    for i, x in chosen:
        out[i] = (x - mean) / np.sqrt(variance + eps)
    return out


whiten = jax.jit(global_whitened, static_argnames=("ddof", "eps"))
baseline = jax.jit(group_baseline_whitened, static_argnames=("ddof", "eps"))
grouped = jax.jit(group_centered, static_argnames=("scale_by_std",))
by_component = jax.jit(componentwise, static_argnames=("coefficients", "advantage"))
cells = st.lists(st.tuples(st.integers(-8, 8), st.booleans()), min_size=12, max_size=12)


@settings(max_examples=30, deadline=None)
@given(cells, st.integers(0, 1), st.permutations(range(12)))
def test_whitening_second_route_and_permutation(batch, ddof, order):
    values = np.asarray([v / 4 for v, _ in batch], np.float32).reshape(3, 4)
    mask = np.asarray([m for _, m in batch]).reshape(3, 4)
    found = np.asarray(whiten(np.where(mask, values, np.float32(np.nan)), mask, ddof=ddof))
    np.testing.assert_allclose(found, whitened_in_float64(values, mask, ddof), rtol=1e-5, atol=1e-5)
    assert not np.any(found[~mask])
    shuffled = whiten(values.reshape(-1)[order].reshape(3, 4), mask.reshape(-1)[order].reshape(3, 4), ddof=ddof)
    np.testing.assert_allclose(np.asarray(shuffled).reshape(-1), found.reshape(-1)[list(order)], atol=1e-5)


def test_whitening_does_not_mind_scale_and_offset():
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    mask = np.ones((3, 4), bool)
    np.testing.assert_allclose(whiten(values * 4 + 100, mask), whiten(values, mask), atol=2e-5)


def baseline_in_float64(rewards, valid, ddof):
    centered = np.zeros(rewards.shape)
    for p in range(rewards.shape[0]):
        chosen = rewards[p][valid[p]].astype(np.float64)
        centered[p][valid[p]] = chosen - chosen.mean() if chosen.size else 0
    return whitened_in_float64(centered, valid, ddof)


@settings(max_examples=30, deadline=None)
@given(cells, st.integers(0, 1))
def test_group_baseline_second_route(batch, ddof):
    rewards = np.asarray([v / 4 for v, _ in batch], np.float32).reshape(3, 4)
    valid = np.asarray([m for _, m in batch]).reshape(3, 4)
    found = baseline(np.where(valid, rewards, np.float32(np.inf)), valid, ddof=ddof)
    np.testing.assert_allclose(found, baseline_in_float64(rewards, valid, ddof), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_p27_p29_the_baseline_form_groups_by_id_and_not_by_position(seed):
    ids = np.random.default_rng(seed).permutation(12)  # trajectory p * 4 + g, in the order of arrival
    arrived = np.asarray([1, 0, 1, 0, 0, 0, 1, 9, 5, 5, 5, 5], np.float32)[ids]
    rewards, valid = np.zeros((3, 4), np.float32), np.ones((3, 4), bool)
    rewards[ids // 4, ids % 4], valid[1, 3] = arrived, False
    found = np.asarray(baseline(rewards, valid))
    # Squares: 4 of 1/4, then 1/9, 1/9, 4/9, then none; 11 members count.
    std = np.sqrt((1 + 2 / 3) / 11)
    expected = np.asarray([[0.5, -0.5, 0.5, -0.5], [-1 / 3, -1 / 3, 2 / 3, 0], [0, 0, 0, 0]]) / std
    close(found[ids // 4, ids % 4], expected[ids // 4, ids % 4])
    assert not found[2].any()


def test_p30_p31_singleton_and_constant_groups_get_exactly_zero_beside_others():
    rewards = np.asarray([[0.1] * 7, [0.7] + [0.0] * 6, [1, 0, 0, 1, 0, 0, 0]], np.float32)
    valid = np.asarray([[True] * 7, [True] + [False] * 6, [True] * 7])
    components = np.stack([rewards, rewards[:, ::-1]], axis=-1)
    gdpo = jax.jit(lambda r, v: batch_scaled(jax.vmap(componentwise)(r, v), v))(components, valid)
    for found in (baseline(rewards, valid), gdpo):
        assert not np.any(found[:2]) and np.any(found[2])


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1])
def test_p31_a_constant_batch_and_an_empty_one_get_exactly_zero(value):
    values = np.full((7, 3), value, np.float32)
    assert not np.any(whiten(values, np.ones((7, 3), bool)))
    assert not np.any(whiten(values, np.zeros((7, 3), bool)))
    assert not np.any(whiten(values, np.arange(21).reshape(7, 3) == 4, ddof=1))


def test_garbage_off_the_mask_reaches_no_gradient():
    slopes = np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(global_whitened(x, TOKEN_MASK)[0])))(TOKENS))
    assert np.all(np.isfinite(slopes)) and not np.any(slopes[~np.asarray(TOKEN_MASK)]) and np.any(slopes)


def spread(function, how):
    """The function on 8 devices, one leading row each, with the batch's statistics over the axis."""
    local = partial(function, axis_name="data")
    if how == "pmap":
        mapped = jax.pmap(lambda x, m: local(x[None], m[None])[0], axis_name="data")
        return lambda values, mask: mapped(values, mask)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    if how == "shard_map":
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows, rows), out_specs=rows))
    place = partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, rows))
    return lambda values, mask: jax.jit(function)(place(values), place(mask))


@pytest.mark.parametrize("how", ["pmap", "shard_map", "sharded inputs"])
@pytest.mark.parametrize("function", [global_whitened, batch_scaled, group_baseline_whitened])
def test_eight_devices_give_what_one_gives(function, how):
    draw = np.random.default_rng(3)
    values, mask = draw.normal(size=(8, 6)).astype(np.float32), draw.random((8, 6)) < 0.7
    mask[2] = False
    values = np.where(mask, values, np.float32(np.nan))
    found = np.asarray(spread(function, how)(values, mask))
    np.testing.assert_allclose(found, function(values, mask), rtol=1e-5, atol=1e-6)
    assert not found[~mask].any()


@pytest.mark.parametrize("how", ["pmap", "shard_map"])
def test_p31_a_batch_constant_over_eight_devices_gets_exactly_zero(how):
    assert not np.any(spread(global_whitened, how)(np.full((8, 7), 0.1, np.float32), np.ones((8, 7), bool)))


# Tool calls: exact, extra call, missing parameter, wrong name, wrong value; and whether the format was right.
CORRECT, FORMAT = [3, 2.25, 0.75, -3, 1.5], [0, 1, 0, 1, 1]


def z_scores(rewards):
    rewards = np.asarray(rewards, np.float64)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def test_gdpo_second_route_on_tool_calling_rewards():
    components = jnp.asarray(np.stack([CORRECT, FORMAT], 1), jnp.float32)
    valid = jnp.ones(5, jnp.bool_)
    close(by_component(components, valid), z_scores(CORRECT) + z_scores(FORMAT))
    close(by_component(components, valid, coefficients=(1.0, 0.25)), z_scores(CORRECT) + 0.25 * z_scores(FORMAT))
    centered = partial(group_centered, scale_by_std=False)
    summed = grouped(components.sum(1), valid, scale_by_std=False)
    close(by_component(components, valid, advantage=centered), summed)


def test_gdpo_no_range_drowns_another():
    valid = jnp.ones(5, jnp.bool_)

    def both(range_of_correctness):
        components = np.stack([np.multiply(CORRECT, range_of_correctness), FORMAT], 1).astype(np.float32)
        return by_component(components, valid), grouped(components.sum(1), valid)

    (apart, summed), (apart_wide, summed_wide) = both(1), both(100)
    np.testing.assert_allclose(apart, apart_wide, atol=1e-5)
    np.testing.assert_allclose(summed_wide, z_scores(CORRECT), atol=0.01)  # the format is gone
    assert np.abs(np.asarray(summed) - np.asarray(summed_wide)).max() > 0.1


def test_gdpo_keeps_apart_what_a_sum_makes_equal():
    components = jnp.asarray([[1, 0], [0, 1], [0, 0], [0, 0], [0, 1]], jnp.float32)
    valid = jnp.ones(5, jnp.bool_)
    summed, apart = grouped(components.sum(1), valid), by_component(components, valid)
    assert summed[0] == summed[1] and apart[0] > apart[1] + 0.3  # the rarer success is worth more


def test_gdpo_an_unscored_component_leaves_its_own_baseline_only():
    components = jnp.asarray([[1, 0.5], [0, jnp.nan], [1, 0.1], [jnp.inf, jnp.inf]], jnp.float32)
    scored = jnp.asarray([[True, True], [True, False], [True, True], [False, False]])
    found = by_component(components, scored)
    first, second = z_scores([1, 0, 1]), z_scores([0.5, 0.1])
    close(found, [first[0] + second[0], first[1], first[2] + second[1], 0])


def test_turn_discounting_worked_numbers():
    taken = jnp.asarray([True, True, False, True, False])
    close(turn_discounted(jnp.float32(2), taken, gamma=0.9), [2 * 0.81, 2 * 0.9, 0, 2, 0])
    close(turn_discounted(jnp.float32(-1), taken, gamma=0.5), [-0.25, -0.5, 0, -1, 0])
    close(turn_discounted(jnp.float32(2), taken, gamma=0.0), [0, 0, 0, 2, 0])


def test_turn_discounting_gives_every_turn_the_same_at_gamma_one_and_never_changes_a_sign():
    rewards, valid = arrays([1, 0, 0, 9], [True, True, True, False])
    turns = jnp.arange(5)[None] < jnp.asarray([[5], [3], [1], [4]])
    group = group_centered(rewards, valid)
    per_turn = jax.vmap(partial(turn_discounted, gamma=1.0))(group, turns)
    np.testing.assert_array_equal(per_turn, np.where(turns, np.asarray(group)[:, None], 0))
    less = np.asarray(jax.vmap(partial(turn_discounted, gamma=0.8))(group, turns))
    np.testing.assert_array_equal(np.sign(less), np.sign(per_turn))
    assert np.all(np.diff(np.abs(less[0])) > 0) and not less[3].any()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: global_whitened(TOKENS, TOKEN_MASK[0]), "global_whitened: mask"),
        (lambda: global_whitened(TOKENS, TOKEN_MASK.astype(jnp.float32)), r"bool\[3, 3\], got float32"),
        (lambda: global_whitened(TOKENS, TOKEN_MASK, ddof=2), "ddof"),
        (lambda: batch_scaled(TOKENS, TOKEN_MASK, eps=0.0), "eps"),
        (lambda: group_baseline_whitened(TOKENS[0], TOKEN_MASK[0]), r"expected \[P, G\]"),
        (lambda: componentwise(TOKENS[0], TOKEN_MASK[0]), "vmap over groups"),
        (lambda: componentwise(TOKENS, TOKEN_MASK[:2, 0]), "componentwise: valid"),
        (lambda: componentwise(TOKENS, TOKEN_MASK, coefficients=(1.0,)), "coefficients: expected 3"),
        (lambda: turn_discounted(TOKENS[0], TOKEN_MASK[0], gamma=1.0), "vmap"),
        (lambda: turn_discounted(TOKENS[0, 0], TOKEN_MASK[0], gamma=1.1), "gamma"),
    ],
)
def test_bad_input_is_named_at_trace_time(call, named):
    with pytest.raises(ValueError, match=named):
        call()
