"""Every algorithm with its defaults, end to end: advantages, constants, loss and gradient against float64 loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.batch import TokenBatch
from agentrl_jax.rl import algorithms, kl, ratios, weights
from agentrl_jax.rl.imitation import imitation_loss
from agentrl_jax.rl.objective import assign, policy_loss

NAMES = [
    "reinforce", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "decoupled_ppo", "grpo",
    "m_grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "sapo",
]  # fmt: skip
LENGTH = 8.0  # the divisor of Dr. GRPO
BY_TOKEN = ("ppo", "decoupled_ppo", "dapo", "cispo")

# Two groups of four, packed; each trajectory begins with an observation, and 8 is padding.
IDS = np.asarray([[0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3], [4, 4, 4, 5, 5, 5, 5, 6, 6, 7, 7, 7, 8, 8]], np.int32)
TURNS = np.asarray([[0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0]], np.int32)
MASK = (IDS < 8) & (np.diff(IDS, axis=1, prepend=-1) == 0)
REWARDS = np.asarray([[1, 0, 0, 1], [0.2, 0.7, 0.7, 0.1]], np.float32)
VALID = np.asarray([[True] * 4, [True, False, True, True]])
KEEP = np.asarray([[True, True, True, False], [True] * 4])  # the last of the first group counts, but is not trained on
KEPT = (KEEP & VALID).reshape(-1)

_rng = np.random.default_rng(11)
NEW, BEHAVIOR, REF = (np.float32(-1 + 0.3 * _rng.normal(size=IDS.shape)) for _ in range(3))
OLD = np.float32(NEW + 0.3 * _rng.normal(size=IDS.shape))
OLD[0, 1], BEHAVIOR[0, 1] = -0.5, -2.5  # a ratio of 7.4, beyond the cap of decoupled PPO
OLD[1, 2], NEW[1, 2] = -2.5, -0.6  # and one of 6.7, beyond that of CISPO
CREDIT = np.float32(_rng.normal(size=IDS.shape))


def close(found, expected, rtol=1e-5, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=rtol, atol=atol)


def make(name):
    """The composition with its defaults; the KL of REINFORCE++-baseline is off by default, and is tested too."""
    if name == "dr_grpo":
        return algorithms.dr_grpo(LENGTH)
    return algorithms.reinforce_plus_plus_baseline(beta=0.01) if "baseline" in name else getattr(algorithms, name)()


def make_batch(mask, ids, behavior, turns=None, **fields):
    zeros, floats = np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.float32)
    fields = {"advantages": floats, "weights": floats} | fields
    return TokenBatch(
        **dict.fromkeys(("tokens", "parents", "subtree_ends", "positions", "policy_versions"), zeros),
        trajectory_ids=ids,
        turn_ids=zeros if turns is None else turns,
        sources=zeros.astype(np.int8),
        action_mask=mask,
        behavior_logprobs=behavior,
        **fields,
    )


BATCH = make_batch(MASK, IDS, BEHAVIOR, TURNS, old_logprobs=OLD, ref_logprobs=REF)


@partial(jax.jit, static_argnums=0)
def fill(name, batch, rewards, valid, keep):
    return assign(make(name), batch, rewards, valid, keep, credit=jnp.asarray(CREDIT) if name == "ppo" else None)


def group_advantages(name, r):
    """Of the valid rewards of one group, float64."""
    if name == "rloo":
        return np.asarray([r[i] - np.delete(r, i).mean() for i in range(len(r))])
    if name in ("dr_grpo", "reinforce_plus_plus_baseline"):
        return r - r.mean()
    if name in ("reinforce", "reinforce_plus_plus", "decoupled_ppo"):
        return r
    if name == "ppo":
        return np.zeros_like(r)
    eps = 1e-4 if name == "m_grpo" else 1e-6
    return (r - r.mean()) / (np.sqrt(((r - r.mean()) ** 2).sum() / (len(r) - 1)) + eps)


def expected_advantages(name, rewards):
    per_trajectory = np.zeros(9)
    for p in range(2):
        own = group_advantages(name, rewards[p][VALID[p]].astype(np.float64))
        per_trajectory[:8].reshape(2, 4)[p][VALID[p]] = own
    kept = MASK & np.append(KEPT, False)[IDS]
    found = per_trajectory[IDS] + (CREDIT if name == "ppo" else 0.0)
    x = found[kept]  # a value for every token, so long trajectories count more
    if name in ("reinforce_plus_plus", "decoupled_ppo"):
        found = (found - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-8)
    if name == "reinforce_plus_plus_baseline":
        found = found / np.sqrt((x**2).mean() + 1e-8)
    if name == "decoupled_ppo":
        found = found * np.minimum(np.exp(np.float64(OLD) - BEHAVIOR), 5.0)
    return np.where(kept, found, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 1e-4])  # rewards this small show every eps
def test_advantages_on_tokens(name, scale):
    rewards = np.float32(scale) * REWARDS
    found = fill(name, BATCH, rewards, VALID, KEEP).advantages
    expected = expected_advantages(name, rewards)
    close(found, expected, rtol=2e-5, atol=1e-6 * np.abs(expected).max())
    assert np.abs(expected).max() > 0


def test_the_advantages_tell_the_families_apart():
    """No two families agree on these rewards, so that none can stand in for another unseen."""
    families = ["reinforce", "rloo", "dr_grpo", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"]
    found = [expected_advantages(name, REWARDS) for name in families]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert np.abs(one - other).max() > 0.01
    tiny = np.float32(1e-4) * REWARDS
    assert np.abs(expected_advantages("grpo", tiny) - expected_advantages("m_grpo", tiny)).max() > 0.1


RANGES = {
    "reinforce_plus_plus": (0.2, 0.2), "reinforce_plus_plus_baseline": (0.2, 0.2), "ppo": (0.2, 0.2),
    "decoupled_ppo": (0.2, 0.2), "grpo": (0.2, 0.2), "m_grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4), "gspo_token": (3e-4, 4e-4),
}  # fmt: skip


def surrogate(name, ratio, advantage):
    """Value and slope in the ratio."""
    value, slope = jax.value_and_grad(make(name).surrogate)(jnp.float32(ratio), jnp.float32(advantage))
    return float(value), float(slope)


@pytest.mark.parametrize("name", RANGES)
def test_the_default_clip_range(name):
    for bound, sign in zip(RANGES[name], (-1.0, 1.0), strict=True):
        edge, step = 1 + sign * bound, sign * bound / 50
        assert surrogate(name, edge - step, sign) == pytest.approx((sign * (edge - step), sign), rel=1e-6)
        assert surrogate(name, edge + step, sign) == pytest.approx((sign * edge, 0.0), rel=1e-6)
        # Back towards the old policy nothing holds it, however far away: no dual clip.
        for far in (edge + step, 1 + sign * 0.9, 10.0 if sign > 0 else 0.05):
            assert surrogate(name, far, -sign) == pytest.approx((-sign * far, -sign), rel=1e-6)


@pytest.mark.parametrize("name", ["reinforce", "rloo"])
def test_a_plain_policy_gradient_has_no_clip_and_ignores_the_old_policy(name):
    assert make(name).ratio is ratios.on_policy
    for ratio in (0.01, 1.0, 9.0):
        assert surrogate(name, ratio, -2.0) == pytest.approx((-2 * ratio, -2.0))


def test_the_default_weight_of_cispo_is_at_most_5_and_has_no_floor():
    for ratio, weight in ((0.01, 0.01), (0.99, 0.99), (4.95, 4.95), (5.05, 5.0), (6.0, 5.0)):
        for advantage in (1.0, -1.0):
            expected = (weight * advantage, weight * advantage / ratio)
            assert surrogate("cispo", ratio, advantage) == pytest.approx(expected, rel=1e-5)


def test_the_default_gate_of_sapo():
    for ratio, advantage, gate in ((1.0, 1, 2.0), (1.5, 1, 2.489837), (1.0, -1, 1.904762), (1.5, -1, 2.393585)):
        assert surrogate("sapo", ratio, advantage)[0] == pytest.approx(advantage * gate, abs=1e-6)
    assert surrogate("sapo", 0.5, -1)[0] == pytest.approx(-1.415938, abs=1e-6)


def test_the_default_cap_of_decoupled_ppo_is_5_and_others_correct_nothing():
    log_ratio = np.float32(np.log([[0.1, 4.95, 5.05, 50.0]]))
    mask, ids = jnp.ones((1, 4), jnp.bool_), jnp.zeros((1, 4), jnp.int32)
    found = make("decoupled_ppo").correction(jnp.asarray(log_ratio), jnp.zeros((1, 4)), mask, ids)
    close(found, [[0.1, 4.95, 5.0, 5.0]])
    assert all(make(name).correction is None for name in NAMES if name != "decoupled_ppo")


def test_the_default_distance_to_the_reference_and_no_entropy_bonus():
    made = {name: make(name) for name in NAMES} | {"plain": algorithms.reinforce_plus_plus_baseline()}
    assert (made["grpo"].kl, made["grpo"].beta) == (kl.k3, 0.04)
    assert (made["m_grpo"].kl, made["m_grpo"].beta) == (kl.k3, 0.001)
    assert made["reinforce_plus_plus_baseline"].kl is kl.k2
    with_reference = ("grpo", "m_grpo", "reinforce_plus_plus_baseline")
    assert all(made[name].kl is None and made[name].beta == 0 for name in made if name not in with_reference)
    assert all(one.entropy_coef == 0 and one.kl_ratio is None for one in made.values())


def per_token(name, new, old, a):
    """The surrogate of a trajectory's tokens, and its slopes in their log-probabilities; float64."""
    r = np.exp(new - old)
    if name in ("reinforce", "rloo"):
        return a, a
    if name == "cispo":
        return np.minimum(r, 5.0) * a, np.minimum(r, 5.0) * a
    if name == "sapo":
        tau = np.where(a > 0, 1.0, 1.05)
        s = 1 / (1 + np.exp(-tau * (r - 1)))
        return 4 / tau * s * a, 4 * s * (1 - s) * a * r
    if name in ("gspo", "gspo_token"):
        # Each of L tokens has 1 / L of the slope of each of L ratios, and the tokens of a trajectory weigh alike.
        r = np.full_like(r, np.exp((new - old).mean()))
    low, high = RANGES[name]
    free, held = r * a, np.clip(r, 1 - low, 1 + high) * a
    return np.minimum(free, held), np.where(free <= held, free, 0.0)


def loop(name, advantages):
    """The loss and its gradient by the log-probabilities, trajectory by trajectory in float64."""
    new, old, ref = (x.astype(np.float64) for x in (NEW, OLD, REF))
    kept = [n for n in range(8) if KEPT[n]]
    all_tokens = sum(((n == IDS) & MASK).sum() for n in kept)
    total, grad = 0.0, np.zeros(IDS.shape)
    for n in kept:
        at = np.nonzero((n == IDS) & MASK)
        value, slope = per_token(name, new[at], old[at], advantages[at])
        loss, up = -value, -slope
        if name in ("grpo", "m_grpo"):
            beta, gap = (0.04 if name == "grpo" else 0.001), ref[at] - new[at]
            loss, up = loss + beta * (np.exp(gap) - gap - 1), up + beta * (1 - np.exp(gap))
        if name == "reinforce_plus_plus_baseline":
            gap = new[at] - ref[at]
            loss, up = loss + 0.01 * gap**2 / 2, up + 0.01 * gap
        turns = TURNS[at]
        in_turn = np.asarray([(turns == turn).sum() for turn in turns])
        if name in BY_TOKEN:
            weight = np.full(len(loss), 1 / all_tokens)
        elif name in ("reinforce", "rloo", "dr_grpo"):
            weight = np.full(len(loss), 1 / (len(kept) * (LENGTH if name == "dr_grpo" else 1.0)))
        elif name == "m_grpo":
            weight = 1 / (len(kept) * len(set(turns)) * in_turn)
        else:
            weight = np.full(len(loss), 1 / (len(kept) * len(loss)))
        total += (weight * loss).sum()
        grad[at] = weight * up
    return total, grad


@partial(jax.jit, static_argnums=0)
def value_and_gradient(name, logprobs, batch):
    return jax.value_and_grad(lambda x: policy_loss(make(name), x, None, batch)[0])(logprobs)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_those_of_a_loop_over_trajectories_in_float64(name):
    filled = fill(name, BATCH, REWARDS, VALID, KEEP)
    loss, grad = value_and_gradient(name, NEW, filled)
    expected, slopes = loop(name, expected_advantages(name, REWARDS))
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=2e-6)
    close(grad, slopes, rtol=2e-5, atol=1e-6)


def test_cispo_worked_loss_in_the_papers_form():
    """`-token_mean(sg[w] * A * log pi)`: our value leaves log pi out, but d loss / d log pi is the factor before it."""
    mask, ids = np.asarray([[True, True, False], [True] * 3]), np.asarray([[0, 0, 2], [1, 1, 1]], np.int32)
    old = np.float32([[-1, -2, 0], [-0.5, -1.5, -1]])
    new = np.float32([[-0.7, -2, 0], [-0.2, -1.9, -1]])
    weight = weights.token_mean(jnp.asarray(mask), jnp.asarray(ids), jnp.asarray(ids), num_trajectories=2)
    advantages = np.where(mask, np.float32([[1], [-1]]), np.float32(0))
    batch = make_batch(mask, ids, old, advantages=advantages, weights=np.asarray(weight))
    objective = algorithms.cispo(low=1.0, high=0.28)
    grad = np.asarray(jax.grad(lambda x: policy_loss(objective, x, None, batch)[0])(jnp.asarray(new)))
    close(5 * grad, [[-1.28, -1, 0], [1.28, 0.6703200460356393, 1]])
    close(5 * grad * new, [[0.896, 2, 0], [-0.256, -1.2736080874677147, -1]])
    assert float((grad * new).sum()) == pytest.approx(0.07327838250645699, abs=1e-6)


def test_imitation_of_the_policys_words_alone_and_with_what_it_read():
    logprobs = jnp.asarray([[-0.5, -0.1, -2, -3, -0.2]], jnp.float32)
    ids = jnp.zeros((1, 5), jnp.int32)
    for mask, expected in (([1, 1, 0, 0, 1], 0.26666666666666666), ([1, 1, 1, 1, 1], 1.16)):
        mask = jnp.asarray([mask], jnp.bool_)
        weight = weights.token_mean(mask, ids, ids, num_trajectories=1)
        loss, _ = imitation_loss(logprobs, None, make_batch(mask, ids, logprobs, weights=weight))
        assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_p25_a_token_of_a_short_answer_weighs_a_half_and_of_a_long_one_an_eighth():
    """Up to the factor 1 / N of the mean over the N = 2 trajectories; the other modes weigh both alike."""
    mask = np.arange(8)[None] < np.asarray([[2], [8]])
    ids = np.where(mask, np.asarray([[0], [1]]), 2).astype(np.int32)
    expected = {
        weights.sequence_mean: (0.5, 0.125),
        weights.token_mean: (0.2, 0.2),
        weights.constant(8.0): (1 / 8,) * 2,
    }
    for weigh, (short, long) in expected.items():
        found = weigh(jnp.asarray(mask), jnp.asarray(ids), jnp.asarray(ids), num_trajectories=2)
        close(2 * found, np.where(mask, np.asarray([[short], [long]]), 0.0))


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo"])
def test_p23_one_gradient_however_the_rows_are_split(name):
    """Ten rows of 1 and 9 tokens in turn: the gradients of 1, 2, 5 and 10 micro-batches add up to the same."""
    rng = np.random.default_rng(5)
    mask = np.arange(9)[None] < np.asarray([1, 9] * 5)[:, None]
    ids = np.where(mask, np.arange(10)[:, None], 10).astype(np.int32)
    old, ref = (np.float32(-1 + 0.1 * rng.normal(size=mask.shape)) for _ in range(2))
    features, everyone = np.float32(0.3 * rng.normal(size=(10, 9, 3))), np.ones((1, 10), bool)
    rewards = np.float32(rng.normal(size=(1, 10)))
    batch = make_batch(mask, ids, old, ref_logprobs=ref)
    filled = jax.device_get(fill(name, batch, rewards, everyone, everyone))

    def loss(theta, rows, x):
        return policy_loss(make(name), rows.behavior_logprobs + x @ theta, None, rows)[0]

    slope, theta = jax.jit(jax.grad(loss)), jnp.asarray([0.2, -0.1, 0.3])

    def split(n, rows):
        size = 10 // n
        starts = range(0, 10, size)
        parts = [jax.tree.map(lambda x, a=a: x[a : a + size], (rows, features)) for a in starts]
        return [np.asarray(slope(theta, *part)) for part in parts]

    whole = split(1, filled)[0]
    assert np.abs(whole).max() > 1e-2
    for n in (2, 5, 10):
        np.testing.assert_allclose(sum(split(n, filled)), whole, rtol=0, atol=1e-6)
    if name == "dapo":  # with a mean in each micro-batch, tokens of short rows would count as much as whole long ones
        local = filled._replace(weights=np.float32(mask / mask.sum(axis=1, keepdims=True)))
        assert np.abs(sum(split(10, local)) / 10 - whole).max() > 1e-3


@pytest.mark.parametrize(
    ("valid", "reward", "expected"),
    [
        ([True, True, False], np.nan, [0.5, -0.5, 0.0]),  # masked: it leaves the baseline and the loss
        ([True, True, True], 0.0, [2 / 3, -1 / 3, -1 / 3]),  # zero: it counts as a failure
    ],
)
def test_p19_a_truncated_rollout_is_masked_or_counts_as_a_failure(valid, reward, expected):
    ids = np.arange(3, dtype=np.int32)[:, None]
    batch = make_batch(np.ones((3, 1), bool), ids, np.zeros((3, 1), np.float32))
    everyone = np.ones((1, 3), bool)
    filled = fill("dr_grpo", batch, np.float32([[1.0, 0.0, reward]]), np.asarray([valid]), everyone)
    close(filled.advantages[:, 0], expected)
    close(filled.weights[:, 0], np.asarray(valid) / (sum(valid) * LENGTH))
