"""Advantages: worked numbers, a second route in numpy, and who leaves the baseline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl.advantages import group_centered, leave_one_out


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
