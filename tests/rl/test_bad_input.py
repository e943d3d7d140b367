"""What would go wrong in silence is refused while tracing, by the name of the function and of the argument."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.rl import algorithms, corrections, kl, preferences, ratios, rewards, steps, weights

NAN = float("nan")
MASK = np.asarray([[True, True, False], [True, True, True]])
IDS = np.asarray([[0, 0, 2], [1, 1, 1]], np.int32)
X = np.zeros((2, 3), np.float32)
WEIGHTS = {
    "token_mean": weights.token_mean,
    "sequence_mean": weights.sequence_mean,
    "nested_turn_mean": weights.nested_turn_mean,
    "constant": weights.constant(4.0),
}
RATIOS = (ratios.token, ratios.sequence, ratios.sequence_token, ratios.on_policy)
CORRECTIONS = {
    "truncated": corrections.truncated(),
    "masked": corrections.masked(),
    "sequence": corrections.sequence(),
    "sequence_masked": corrections.sequence_masked(),
    "geometric": corrections.geometric(),
    "veto": corrections.veto(),
    "mismatch": corrections.mismatch,
}


def refused(words, function, *args):
    """While tracing, and with numpy arrays as well as with tracers."""
    for call in (partial(function, *args), partial(jax.eval_shape, function, *args)):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_refuse_what_would_exclude_or_count_the_wrong_tokens(name):
    weigh = partial(WEIGHTS[name], num_trajectories=2)
    assert weigh(MASK, IDS, IDS, keep=np.asarray([True, False])).shape == MASK.shape
    refused(f"^{name}: action_mask: expected bool", weigh, MASK.astype(np.float32), IDS, IDS)
    refused(f"^{name}: trajectory_ids: expected", weigh, MASK, IDS[:1], IDS)
    refused(f"^{name}: turn_ids: expected", weigh, MASK, IDS, IDS[:, :1])
    for keep in (np.ones(1, bool), np.ones(3, bool), np.ones((1, 2), bool), np.ones(2, np.float32)):
        refused(rf"^{name}: keep: expected bool\[2\]", lambda k: weigh(MASK, IDS, IDS, keep=k), keep)


@pytest.mark.parametrize("ratio", RATIOS, ids=lambda ratio: ratio.__name__)
def test_ratios_refuse_what_would_be_broadcast(ratio):
    name = ratio.__name__
    refused(f"^{name}: logprobs: expected", ratio, X[:1], X, MASK, IDS)
    refused(f"^{name}: old_logprobs: expected", ratio, X, X[:1], MASK, IDS)
    refused(f"^{name}: trajectory_ids: expected", ratio, X, X, MASK, IDS[:1])
    refused(f"^{name}: action_mask: expected bool", ratio, X, X, MASK.astype(np.float32), IDS)


def test_what_pools_rows_asks_for_rows_and_what_does_not_takes_one():
    row = (X[0], X[0], MASK[0], IDS[0])
    assert ratios.token(*row).shape == corrections.truncated()(*row).shape == (3,)
    for name, function in (("sequence", ratios.sequence), ("veto", corrections.veto())):
        refused(rf"^{name}: action_mask: expected bool\[B, T\]", function, *row)
    refused("^pooled: values", ratios.pooled, X[0], IDS[0])
    refused("^nested_turn_mean: action_mask", partial(weights.nested_turn_mean, num_trajectories=2), *row[2:], IDS[0])
    refused("^renormalised: kept: expected bool", ratios.renormalised, X, MASK.astype(np.float32))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_refuse_what_would_be_broadcast(name):
    correct = CORRECTIONS[name]
    refused(f"^{name}: old_logprobs: expected", correct, X[:1], X, MASK, IDS)
    refused(f"^{name}: behavior_logprobs: expected", correct, X, X[:1], MASK, IDS)
    refused(f"^{name}: action_mask: expected bool", correct, X, X, MASK.astype(np.int32), IDS)


def test_interpolation_is_of_one_shape():
    refused("^proximal_share: versions: expected", corrections.proximal_share, IDS, IDS, IDS[:1])
    for between in (corrections.proximal_log_linear, corrections.proximal_linear):
        refused(f"^{between.__name__}: share: expected", between, X, X, X[:1])


@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3, kl.k1_plus, kl.k3_plus], ids=lambda k: k.__name__)
def test_kl_is_of_one_shape(estimator):
    refused(f"^{estimator.__name__}: ref_logprobs: expected", estimator, X, X[:1])
    refused("^off_policy: ratio: expected", kl.off_policy, X, X[:1])


def test_pairs_are_of_one_shape():
    column, flat = np.zeros((4, 1), np.float32), np.zeros(4, np.float32)
    for loss in (preferences.simpo, preferences.orpo, preferences.bradley_terry):
        refused(f"^{loss.__name__}: rejected: expected", loss, column, flat)
    refused("^reference_margins: ref_rejected", preferences.reference_margins, flat, flat, flat, column)
    refused("^bradley_terry: margin", lambda m: preferences.bradley_terry(flat, flat, margin=m), column)
    refused("^bce: targets", preferences.bce, flat, column)
    refused(
        "^trajectory_logprobs: logprobs", partial(preferences.trajectory_logprobs, num_trajectories=2), X[:1], MASK, IDS
    )


def test_kto_takes_verdicts_and_not_scores():
    flat, zero = np.zeros(4, np.float32), np.float32(0)
    refused("^kto: desirable: expected bool", preferences.kto, flat, np.ones(4, np.int32), zero)
    refused("^kto: desirable: expected", preferences.kto, flat, np.ones((4, 1), bool), zero)
    refused("^kto: baseline: expected one number", preferences.kto, flat, np.ones(4, bool), flat)
    refused("^kto_baseline: mismatched", preferences.kto_baseline, flat[:0])


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("^simpo: gamma", lambda x: preferences.simpo(x, x, gamma=NAN)),
        ("^simpo: beta", lambda x: preferences.simpo(x, x, beta=NAN)),
        ("^dpo: beta", lambda x: preferences.dpo(x, beta=-0.1)),
        ("^kto: beta", lambda x: preferences.kto(x, x > 0, jnp.float32(0), beta=0.0)),
        ("^bradley_terry: centring", lambda x: preferences.bradley_terry(x, x, centring=-0.01)),
        ("^bradley_terry: centring", lambda x: preferences.bradley_terry(x, x, centring=NAN)),
        ("^lexicographic: quality_scale", lambda x: rewards.lexicographic(x > 0, x, x, quality_scale=NAN)),
    ],
)
def test_settings_without_a_meaning_are_refused(words, call):
    refused(words, call, X)


@pytest.mark.parametrize("name", ["grpo", "m_grpo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("beta", [-0.1, NAN, float("inf")])
def test_algorithms_refuse_a_penalty_that_rewards_distance(name, beta):
    with pytest.raises(ValueError, match=f"^{name}: beta"):
        getattr(algorithms, name)(beta=beta)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_algorithms_refuse_an_entropy_coefficient_that_is_no_number(name):
    with pytest.raises(ValueError, match=f"^{name}: entropy_coef"):
        getattr(algorithms, name)(entropy_coef=NAN)


@pytest.mark.parametrize("credit", [steps.gigpo, steps.anchor_step_advantages], ids=lambda f: f.__name__)
def test_credit_of_steps_names_its_own_settings_and_ids(credit):
    name = credit.__name__
    for setting in ({"gamma": 2.0}, {"gamma": NAN}, {"ddof": 2}, {"ddof": -1}, {"eps": 0.0}, {"eps": NAN}):
        refused(f"^{name}: {next(iter(setting))}: expected", partial(credit, **setting), X, IDS, MASK)
    refused(f"^{name}: state_ids: expected integers", credit, X, IDS.astype(np.float32), MASK)


def test_float_ids_are_refused_by_the_function_that_was_called():
    floats, scores = IDS.astype(np.float32), np.zeros(2, np.float32)
    for targets in (steps.agent_prm_return_to_go, steps.agent_prm_from_start):
        refused(f"^{targets.__name__}: action_ids: expected integers", targets, scores, IDS, floats, MASK)
        refused(f"^{targets.__name__}: scores", targets, scores[:1], IDS, IDS, MASK)
    refused("^action_advantages: state_ids: expected integers", steps.action_advantages, X, floats, IDS, MASK)
    refused(r"^group_ids: keys\[1\]: expected integers", steps.group_ids, MASK, IDS, floats)
    refused("^group_ids: valid: expected bool", steps.group_ids, MASK.astype(np.int32), IDS)
    refused("^center_by_group: groups: expected integers", steps.center_by_group, X, floats)


def test_lexicographic_takes_violations_and_not_how_many():
    refused("^lexicographic: violated: expected bool", rewards.lexicographic, MASK.astype(np.float32), X, X)
    refused("^lexicographic: quality: expected", rewards.lexicographic, MASK, X, X[:1])
    refused("^lexicographic: cost: expected", rewards.lexicographic, MASK, X, X, X[:1])
