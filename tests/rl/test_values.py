"""The critic: clipped loss, targets and advantages of ArCHer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl.values import archer_advantage, archer_q_target, clipped_value_loss


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


def make_batch(mask, values, returns, weights=None):
    mask = np.asarray(mask, bool)
    fields = dict.fromkeys(TokenBatch._fields)
    weights = mask.astype(np.float32) if weights is None else np.asarray(weights, np.float32)
    floats = {"values": np.asarray(values, np.float32), "returns": np.asarray(returns, np.float32), "weights": weights}
    return TokenBatch(**{**fields, **floats, "action_mask": mask})


def test_value_clip_worked_numbers():
    batch = make_batch([[1]], [[0.2]], [[1.0]])
    value = jnp.asarray([[0.9]], jnp.float32)
    clipped, figures = clipped_value_loss(value, batch)
    close(clipped, 0.18)
    assert [float(part) for part in figures.sums["value_clip_fraction"]] == [1.0, 1.0]
    close(figures.sums["value_error"][0], 0.01)
    plain, figures = clipped_value_loss(value, batch, clip=None)
    close(plain, 0.0049999999999999975)
    assert float(figures.sums["value_clip_fraction"][0]) == 0


def test_the_gradient_stops_where_the_clip_binds_and_only_there():
    batch = make_batch([[1, 1, 1, 1]], [[0.2] * 4], [[1.0, 1.0, 0.0, 0.2]])
    values = jnp.asarray([[0.9, 0.3, 0.9, 0.25]], jnp.float32)
    grad = jax.grad(lambda v: clipped_value_loss(v, batch)[0])(values)
    close(grad, [[0.0, -0.7, 0.9, 0.05]])  # toward the return too fast; inside; away from it; inside


def test_the_loss_equals_a_loop_and_adds_up_over_rows():
    rng = np.random.default_rng(0)
    mask = rng.random((3, 6)) < 0.6
    values, old, returns = rng.normal(size=(3, 3, 6)).astype(np.float32)
    weights = np.where(mask, rng.random((3, 6)), 0)
    total = 0.0
    for v, o, r, w in zip(values[mask], old[mask], returns[mask], weights[mask], strict=True):
        total += w * 0.5 * max((v - r) ** 2, (min(max(v, o - 0.3), o + 0.3) - r) ** 2)
    batch = make_batch(mask, old, returns, weights)
    close(clipped_value_loss(jnp.asarray(values), batch, clip=0.3)[0], total, atol=1e-5)
    parts = [
        clipped_value_loss(
            jnp.asarray(values[n : n + 1]), make_batch(*(x[n : n + 1] for x in (mask, old, returns, weights))), clip=0.3
        )
        for n in range(3)
    ]
    close(sum(float(part) for part, _ in parts), total, atol=1e-5)
    count = sum(float(figures.sums["value_error"][1]) for _, figures in parts)
    assert count == mask.sum()


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_garbage_off_actions_reaches_neither_value_nor_gradient(garbage):
    mask = [[True, False]]
    batch = make_batch(mask, [[0.2, garbage]], [[1.0, garbage]])
    value, grad = jax.value_and_grad(lambda v: clipped_value_loss(v, batch)[0])(jnp.asarray([[0.3, garbage]]))
    close(value, 0.245)
    close(grad, [[-0.7, 0.0]])


def test_archer_worked_numbers():
    rewards, ahead = jnp.asarray([0.0, 1.0], jnp.float32), jnp.asarray([0.5, np.nan], jnp.float32)
    terminated = jnp.asarray([False, True])
    close(archer_q_target(rewards, ahead, terminated), [0.45, 1.0])
    close(jax.jit(jax.vmap(archer_q_target))(rewards, ahead, terminated), [0.45, 1.0])
    twins = jnp.asarray([0.62, 0.60], jnp.float32), jnp.asarray([0.5, 0.55], jnp.float32)
    close(archer_advantage(*twins), 0.10)
    stacked = [jnp.stack([twin, twin[::-1]], axis=1) for twin in twins]
    close(archer_advantage(*stacked), [0.10, 0.10])


def test_archer_targets_and_advantages_are_detached():
    numbers = jnp.asarray([0.3, 0.4], jnp.float32)
    ends = jnp.asarray([False, True])
    assert not np.any(jax.grad(lambda v: archer_q_target(numbers, v, ends).sum())(numbers))
    assert not np.any(jax.grad(lambda q: archer_advantage(q, numbers))(numbers))


def test_what_would_go_wrong_in_silence_is_refused():
    numbers, batch = jnp.zeros((1, 2)), make_batch([[1, 1]], [[0, 0]], [[0, 0]])
    with pytest.raises(ValueError, match="clipped_value_loss: clip"):
        clipped_value_loss(numbers, batch, clip=0.0)
    with pytest.raises(ValueError, match="needs values and returns"):
        clipped_value_loss(numbers, batch._replace(returns=None))
    with pytest.raises(ValueError, match="clipped_value_loss: values"):
        clipped_value_loss(numbers[0], batch)
    with pytest.raises(ValueError, match="archer_q_target: expected rewards"):
        archer_q_target(numbers, numbers[0], jnp.zeros((1, 2), jnp.bool_))
    with pytest.raises(ValueError, match="terminated: expected bool"):
        archer_q_target(numbers, numbers, numbers)
    with pytest.raises(ValueError, match="archer_q_target: gamma"):
        archer_q_target(numbers, numbers, jnp.zeros((1, 2), jnp.bool_), gamma=9)
    with pytest.raises(ValueError, match="twin heads"):
        archer_advantage(jnp.zeros((3,)), jnp.zeros((3,)))
