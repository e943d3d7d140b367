"""Compositions: the papers' worked numbers, a float64 loop for every loss, and how their gradients agree on policy."""

import inspect
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl import advantages, algorithms, kl, ratios, weights
from agentrl_jax.rl.objective import Objective, assign, policy_loss

OLD = jnp.asarray([[-1, -2, 0], [-0.5, -1.5, -1]], jnp.float32)
NEW = jnp.asarray([[-0.7, -2, 0], [-0.2, -1.9, -1]], jnp.float32)
REF = jnp.asarray([[-1.1, -1.9, 0], [-0.5, -1.5, -1.3]], jnp.float32)
MASK = np.asarray([[True, True, False], [True, True, True]])
IDS = np.asarray([[0, 0, 2], [1, 1, 1]], np.int32)


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


def make_batch(mask, ids, behavior, turns=None, **fields):
    zeros, floats = np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.float32)
    return TokenBatch(
        **dict.fromkeys(("tokens", "parents", "subtree_ends", "positions", "policy_versions"), zeros),
        trajectory_ids=jnp.asarray(ids),
        turn_ids=zeros if turns is None else np.asarray(turns, np.int32),
        sources=zeros.astype(np.int8),
        action_mask=jnp.asarray(mask),
        behavior_logprobs=behavior,
        advantages=floats,
        weights=floats,
        **fields,
    )


@partial(jax.jit, static_argnums=0)
def loss_of(objective, batch, rewards, logprobs, credit=None):
    everyone = jnp.ones(rewards.shape, jnp.bool_)
    filled = assign(objective, batch, rewards, everyone, everyone, credit=credit)
    return policy_loss(objective, logprobs, -logprobs if objective.entropy_coef else None, filled)[0]


grad_of = partial(jax.jit, static_argnums=0)(jax.grad(loss_of, argnums=3))


def signs(objective):
    """The composition with the advantages of the fixture: +1 and -1."""
    return replace(objective, advantage=lambda rewards, valid: rewards, whiten=None)


PLUS_MINUS = jnp.asarray([[1.0, -1.0]])
FIXTURE = make_batch(MASK, IDS, OLD, ref_logprobs=REF)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (algorithms.grpo(beta=0.0), -0.0250235),
        (algorithms.grpo(), -0.0231122),
        (algorithms.dr_grpo(4.0), 0.1187324),
        (algorithms.dapo(), 0.1739718),
        (algorithms.dapo(high=0.2), 0.1899718),
        (algorithms.gspo(), -0.00035),
        (algorithms.gspo_token(), -0.00035),
        (algorithms.sapo(), -0.1309441),
    ],
)
def test_worked_numbers(objective, expected):
    assert float(loss_of(signs(objective), FIXTURE, PLUS_MINUS, NEW)) == pytest.approx(expected, abs=1e-6)


def test_cispo_gradient_worked_numbers():
    found = grad_of(signs(algorithms.cispo(high=0.28)), FIXTURE, PLUS_MINUS, NEW)
    close(5 * found, [[-1.28, -1, 0], [1.28, 0.670320, 1]])


def test_m_grpo_is_a_nested_mean():
    mask, ids = np.ones((1, 7), bool), np.asarray([[0] * 6 + [1]], np.int32)
    turns = np.asarray([[4, 4, 7, 7, 7, 7, 0]], np.int32)
    losses = np.asarray([[1, 1, 3, 3, 3, 3, 2]], np.float32)
    means = {"nested_turn_mean": 2.0, "sequence_mean": 2.1666667, "token_mean": 2.2857143}
    for name, expected in means.items():
        w = getattr(weights, name)(*(jnp.asarray(x) for x in (mask, ids, turns)), num_trajectories=2)
        assert float((w * losses).sum()) == pytest.approx(expected, abs=1e-6)
    assert algorithms.m_grpo().weights is weights.nested_turn_mean


def test_swe_master_is_leave_one_out_with_a_constant_divisor():
    ids = np.repeat(np.arange(4), [10, 40, 20, 30]).astype(np.int32)[None]
    zeros = jnp.zeros(ids.shape)
    objective = replace(algorithms.dr_grpo(100.0), advantage=advantages.leave_one_out)
    batch = make_batch(np.ones(ids.shape, bool), ids, zeros)
    found = loss_of(objective, batch, jnp.asarray([[1, 0.5, 0, 0]]), zeros)
    assert float(found) == pytest.approx(0.025, abs=1e-6)


@pytest.mark.parametrize(("ddof", "scale"), [(0, 1.0), (1, 0.9128709)])
def test_reinforce_plus_plus_whitens_the_tokens_of_the_step_and_nothing_else(ddof, scale):
    mask = np.asarray([[True] * 3, [True, True, False], [True, False, False]])
    ids = np.where(mask, np.arange(3)[:, None], 4).astype(np.int32)
    objective = algorithms.reinforce_plus_plus()
    objective = replace(objective, whiten=partial(advantages.global_whitened, ddof=ddof))
    yes = jnp.ones((1, 4), jnp.bool_)
    batch = make_batch(mask, ids, jnp.zeros(mask.shape))
    filled = assign(objective, batch, jnp.asarray([[1.0, 0.0, 0.0, 7.0]]), yes, yes)
    close(filled.advantages, scale * np.asarray([[1, 1, 1], [-1, -1, 0], [-1, 0, 0]]))


def test_reinforce_plus_plus_baseline_keeps_a_constant_group_at_zero():
    ids = np.asarray([[0, 0, 0], [1, 4, 4], [2, 2, 4], [3, 4, 4]], np.int32)
    batch = make_batch(ids < 4, ids, jnp.zeros(ids.shape))
    yes = jnp.ones((2, 2), jnp.bool_)
    rewards = jnp.asarray([[1.0, 0.0], [0.1, 0.1]])
    filled = assign(algorithms.reinforce_plus_plus_baseline(), batch, rewards, yes, yes)
    assert not np.any(filled.advantages[2:])
    close(filled.advantages[:2], np.sqrt(7 / 4) * np.asarray([[1, 1, 1], [-1, 0, 0]]))


def test_whitening_leaves_out_what_is_not_trained_on():
    ids = np.asarray([[0, 1, 2, 3]], np.int32)
    batch = make_batch(ids >= 0, ids, jnp.zeros(ids.shape))
    valid, keep = jnp.asarray([[True, True, True, False]]), jnp.asarray([[True, True, False, True]])
    filled = assign(algorithms.reinforce_plus_plus(), batch, jnp.asarray([[3.0, 1.0, 50.0, np.nan]]), valid, keep)
    close(filled.advantages, [[1, -1, 0, 0]])
    close(filled.weights, [[0.5, 0.5, 0, 0]])


def test_ppo_takes_its_credit_per_token_and_refuses_to_go_without():
    credit = jnp.asarray([[0.5, -2, np.nan], [1, 2, 3]])
    yes = jnp.ones((1, 2), jnp.bool_)
    filled = assign(algorithms.ppo(), FIXTURE, PLUS_MINUS, yes, yes, credit=credit)
    close(filled.advantages, [[0.5, -2, 0], [1, 2, 3]])
    with pytest.raises(ValueError, match="assign: credit"):
        assign(algorithms.ppo(), FIXTURE, PLUS_MINUS, yes, yes)
    with pytest.raises(ValueError, match="assign: credit"):
        assign(algorithms.ppo(), FIXTURE, PLUS_MINUS, yes, yes, credit=credit[:1])


def test_credit_per_token_adds_to_that_of_the_group_and_not_where_invalid():
    credit = jnp.asarray([[0.25, 0.5, np.nan], [np.nan, np.nan, np.nan]])
    valid = jnp.asarray([[True, False]])
    filled = assign(algorithms.reinforce(), FIXTURE, jnp.asarray([[1.0, np.nan]]), valid, valid, credit=credit)
    close(filled.advantages, [[1.25, 1.5, 0], [0, 0, 0]])


def test_kl_in_the_reward_is_credit():
    """REINFORCE++: the return of a token is the reward less what the policy still pays for leaving the reference."""
    beta, masked_k1 = 0.1, np.where(MASK, np.asarray(kl.k1(OLD, REF)), 0)
    to_go = np.cumsum(masked_k1[:, ::-1], axis=1)[:, ::-1]
    objective, yes = algorithms.reinforce_plus_plus(), jnp.ones((1, 2), jnp.bool_)
    filled = assign(objective, FIXTURE, jnp.asarray([[1.0, 0.0]]), yes, yes, credit=jnp.asarray(-beta * to_go))
    returns = (np.asarray([[1.0], [0.0]]) - beta * to_go)[MASK]
    expected = np.zeros(MASK.shape)
    expected[MASK] = (returns - returns.mean()) / returns.std()
    close(filled.advantages, expected)


def test_p42_an_episodes_reward_reaches_every_turn_alike():
    mask = np.asarray([[False, True, True, False, True, False, False, True]])
    ids, turns = np.zeros((1, 8), np.int32), np.asarray([[0, 0, 0, 1, 1, 2, 2, 2]], np.int32)
    batch = make_batch(mask, ids, jnp.zeros((1, 8)), turns)
    yes = jnp.ones((1, 1), jnp.bool_)
    for objective in (algorithms.reinforce(), replace(algorithms.grpo(), advantage=algorithms.reinforce().advantage)):
        filled = assign(objective, batch, jnp.ones((1, 1)), yes, yes)
        close(filled.advantages, mask)


CLIPPED = ["grpo", "dr_grpo", "dapo", "ppo", "cispo", "sapo", "reinforce", "rloo", "gspo_token", "reinforce_plus_plus"]


def composed(name):
    objective = algorithms.dr_grpo(8.0) if name == "dr_grpo" else getattr(algorithms, name)()
    return replace(signs(objective), kl=None, beta=0.0)


@pytest.mark.parametrize("name", CLIPPED)
def test_on_policy_gradients_are_the_policy_gradient_up_to_the_aggregation(name):
    objective = composed(name)
    weight = objective.weights(jnp.asarray(MASK), jnp.asarray(IDS), jnp.zeros_like(IDS), num_trajectories=2)
    advantage = np.where(MASK, np.asarray([[1.0], [-1.0]]), 0)
    close(grad_of(objective, FIXTURE, PLUS_MINUS, OLD), -np.asarray(weight) * advantage)


@pytest.mark.parametrize("other", ["gspo", "gspo_token"])
def test_gspo_is_grpo_with_a_mean_per_sequence_at_a_ratio_of_one(other):
    expected = grad_of(composed("grpo"), FIXTURE, PLUS_MINUS, OLD)
    close(grad_of(composed(other), FIXTURE, PLUS_MINUS, OLD), expected)


def test_gspo_of_one_token_each_is_ppo():
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = make_batch(np.ones((2, 3), bool), ids, OLD)
    rewards = jnp.asarray([[1.0, -1.0, 0.5, -0.5, 2.0, -2.0]])
    one, other = (signs(make(low=0.2, high=0.28)) for make in (algorithms.gspo, algorithms.dapo))
    close(loss_of(one, batch, rewards, NEW), loss_of(other, batch, rewards, NEW))
    close(grad_of(one, batch, rewards, NEW), grad_of(other, batch, rewards, NEW))


def loop(name, trajectories):
    """The loss of a list of (new, old, behavior, ref, advantage, turns), written as a loop in float64."""
    clip = lambda r, low, high: np.clip(r, 1 - low, 1 + high)  # noqa: E731
    pessimistic = lambda r, a, low, high: np.minimum(r * a, clip(r, low, high) * a)  # noqa: E731
    totals, tokens = [], sum(len(new) for new, *_ in trajectories)
    for new, old, behavior, ref, a, turns in trajectories:
        r = np.exp(new - old)
        s = np.full_like(r, np.exp((new - old).mean()))
        k3 = np.exp(ref - new) - (ref - new) - 1
        gate = 4 / (1.0 if a > 0 else 1.05)
        loss = {
            "reinforce": -a * np.ones_like(r),
            "grpo": -pessimistic(r, a, 0.2, 0.2) + 0.04 * k3,
            "m_grpo": -pessimistic(r, a, 0.2, 0.2) + 0.001 * k3,
            "dr_grpo": -pessimistic(r, a, 0.2, 0.2),
            "dapo": -pessimistic(r, a, 0.2, 0.28),
            "ppo": -pessimistic(r, a, 0.2, 0.2),
            "decoupled_ppo": -np.minimum(np.exp(old - behavior), 5.0) * pessimistic(r, a, 0.2, 0.2),
            "gspo": -pessimistic(s, a, 3e-4, 4e-4),
            "cispo": -np.minimum(r, 5.0) * a,
            "sapo": -gate / (1 + np.exp(-4 / gate * (r - 1))) * a,
        }[name]
        turn_mean = np.mean([loss[turns == turn].mean() for turn in np.unique(turns)])
        pooled = {"reinforce": loss.sum(), "dr_grpo": loss.sum() / 8, "m_grpo": turn_mean}
        by_token = name in ("dapo", "ppo", "decoupled_ppo", "cispo")
        totals.append(loss.sum() if by_token else pooled.get(name, loss.mean()))
    return sum(totals) / (tokens if name in ("dapo", "ppo", "decoupled_ppo", "cispo") else len(totals))


@pytest.mark.parametrize(
    "name", ["reinforce", "grpo", "m_grpo", "dr_grpo", "dapo", "ppo", "decoupled_ppo", "gspo", "cispo", "sapo"]
)
def test_second_route_a_loop_over_trajectories_in_float64(name):
    rng = np.random.default_rng(3)
    ids = np.asarray([[0, 0, 0, 0, 1, 1, 3, 3], [2, 2, 2, 3, 3, 3, 3, 3]], np.int32)
    ids[1, 3:] = 4  # padding
    mask, turns = ids < 4, rng.integers(0, 2, ids.shape)
    new, old, behavior, ref = (-1 + 0.3 * rng.normal(size=ids.shape) for _ in range(4))
    rewards = rng.normal(size=(1, 4))
    listed = [
        (new[at], old[at], behavior[at], ref[at], rewards[0, n], turns[at])
        for n in range(4)
        for at in [np.nonzero((ids == n) & mask)]
    ]
    single = {"old_logprobs": jnp.asarray(old, jnp.float32), "ref_logprobs": jnp.asarray(ref, jnp.float32)}
    batch = make_batch(mask, ids, jnp.asarray(behavior, jnp.float32), turns, **single)
    objective = signs(algorithms.dr_grpo(8.0) if name == "dr_grpo" else getattr(algorithms, name)())
    found = loss_of(objective, batch, jnp.asarray(rewards, jnp.float32), jnp.asarray(new, jnp.float32))
    assert float(found) == pytest.approx(loop(name, listed), abs=2e-6)


def test_the_off_policy_kl_weighs_with_its_own_ratio():
    plain = signs(algorithms.grpo())
    weighed = replace(plain, kl_ratio=ratios.token)
    found, without = (float(loss_of(x, FIXTURE, PLUS_MINUS, NEW)) for x in (weighed, replace(plain, kl=None, beta=0.0)))
    ratio, k3 = np.exp(np.asarray(NEW - OLD)), np.asarray(kl.k3(NEW, REF))
    expected = 0.04 * np.mean([(ratio * k3)[n][MASK[n]].mean() for n in range(2)])
    assert found - without == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="kl_ratio"):
        replace(plain, kl=None, beta=0.0, kl_ratio=ratios.token)


def test_garbage_off_actions_reaches_no_loss_and_no_gradient():
    bad = jnp.where(MASK, OLD, jnp.nan)
    batch = FIXTURE._replace(old_logprobs=bad, behavior_logprobs=bad, ref_logprobs=jnp.where(MASK, REF, jnp.inf))
    clean = FIXTURE._replace(old_logprobs=OLD)
    for name in ("grpo", "decoupled_ppo", "gspo", "cispo", "sapo"):
        objective = signs(getattr(algorithms, name)())
        new = jnp.where(MASK, NEW, jnp.nan)
        close(loss_of(objective, batch, PLUS_MINUS, new), loss_of(objective, clean, PLUS_MINUS, NEW))
        close(grad_of(objective, batch, PLUS_MINUS, new), grad_of(objective, clean, PLUS_MINUS, NEW))


def test_every_algorithm_states_its_paper():
    for name, make in inspect.getmembers(algorithms, inspect.isfunction):
        if make.__module__ == algorithms.__name__ and not name.startswith("_"):
            assert "https://" in (make.__doc__ or ""), name
            made = make(4.0) if name == "dr_grpo" else make()
            assert isinstance(made, Objective)
