"""Which groups are kept, how often that happens, and loops that end."""

from itertools import product
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl.dynamic_sampling import balanced_rollouts, keep_mixed, keep_probability, refill_decision
from agentrl_jax.rl.rewards import soft_overlong


def bools(*values):
    return jnp.asarray([bool(v) for v in values], jnp.bool_)


def test_filter_worked_groups():
    solved = jnp.stack([bools(0, 0, 0, 0), bools(1, 1, 1, 1), bools(1, 0, 0, 1)])
    assert jax.vmap(keep_mixed)(solved, jnp.ones((3, 4), jnp.bool_)).tolist() == [False, False, True]


def test_p26_an_invalid_member_neither_makes_nor_breaks_a_mixed_group():
    assert not keep_mixed(bools(1, 1, 0), bools(1, 1, 0))
    assert keep_mixed(bools(1, 0, 0), bools(1, 1, 0))


def test_p30_a_group_of_one_or_of_none_is_not_kept():
    assert not keep_mixed(bools(1, 0), bools(1, 0))
    assert not keep_mixed(bools(1, 0), bools(0, 0))


def test_a_length_penalty_breaks_ties_and_is_refused():
    failures = bools(0, 0, 0)
    shaped = failures.astype(jnp.float32) + soft_overlong(jnp.asarray([9, 5, 10]), max_length=10, buffer=4)
    assert len(set(shaped.tolist())) > 1  # a rule on the reward would keep this group
    assert not keep_mixed(failures, bools(1, 1, 1))
    with pytest.raises(ValueError, match=r"keep_mixed: solved: expected bool.*float32"):
        keep_mixed(shaped, bools(1, 1, 1))
    with pytest.raises(ValueError, match="vmap over groups"):
        keep_mixed(failures[None], bools(1, 1, 1)[None])


@pytest.mark.parametrize(
    ("pass_rate", "group", "expected"),
    [
        (0.05, 8, 0.3365795686718752),
        (0.05, 16, 0.5598733313482347),
        (0.5, 8, 0.9921875),
        (0.5, 16, 0.999969482421875),
        (0.95, 8, 0.3365795686718753),
        (0.95, 16, 0.5598733313482347),
    ],
)
def test_keep_probability_worked_numbers(pass_rate, group, expected):
    assert float(keep_probability(pass_rate, group)) == pytest.approx(expected, abs=1e-6)


def test_keep_probability_at_the_ends_for_one_rollout_and_for_rare_successes():
    assert keep_probability(jnp.asarray([0.0, 1.0]), 8).tolist() == [0.0, 0.0]
    np.testing.assert_allclose(keep_probability(jnp.asarray([0.0, 0.3, 1.0]), 1), [0, 0, 0], atol=1e-7)
    rare = comb(8, 1) * 1e-9
    np.testing.assert_allclose(keep_probability(1e-9, 8), rare, rtol=1e-5)
    with pytest.raises(ValueError, match="group"):
        keep_probability(0.5, 0)


@pytest.mark.parametrize("pass_rate", [0.1, 0.5, 0.83])
def test_keep_probability_is_the_chance_of_a_group_that_the_filter_keeps(pass_rate):
    groups = np.asarray(list(product([False, True], repeat=4)))
    kept = np.asarray(jax.vmap(keep_mixed)(groups, np.ones_like(groups)))
    chances = np.where(groups, pass_rate, 1 - pass_rate).prod(1)
    assert float(keep_probability(pass_rate, 4)) == pytest.approx(chances[kept].sum(), abs=1e-6)


def stream(text, length=16):
    return bools(*(c == "1" for c in text.ljust(length, "0")))


read = jax.jit(balanced_rollouts, static_argnames=("positives", "negatives", "cap"))
everyone = jnp.ones(16, jnp.bool_)


@pytest.mark.parametrize(("text", "used", "ok"), [("0010110", 5, True), ("", 16, False), ("1111010", 7, True)])
def test_balanced_rollouts_worked_streams(text, used, ok):
    found = read(stream(text), everyone)
    assert (int(found.used), bool(found.ok)) == (used, ok)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=16, max_size=16), st.sampled_from([(2, 2), (1, 3)]))
def test_balanced_rollouts_second_route(outcomes, quotas):
    counts, used = [0, 0], 0
    for solved, valid in outcomes[:12]:
        if counts[1] >= quotas[0] and counts[0] >= quotas[1]:
            break
        counts[solved] += valid
        used += 1
    solved, valid = (np.asarray(column) for column in zip(*outcomes, strict=True))
    found = read(solved, valid, positives=quotas[0], negatives=quotas[1], cap=12)
    assert int(found.used) == used
    assert bool(found.ok) == (counts[1] >= quotas[0] and counts[0] >= quotas[1])


def test_balanced_rollouts_of_a_short_stream_and_of_quotas_that_do_not_fit():
    found = balanced_rollouts(bools(1, 0, 1), bools(1, 1, 1))
    assert (int(found.used), bool(found.ok)) == (3, False)
    for quotas in ({"positives": 9, "negatives": 8}, {"positives": -1}, {"positives": 0, "negatives": 0}):
        with pytest.raises(ValueError, match="cap"):
            balanced_rollouts(stream(""), everyone, **quotas)


def fill(kept_per_batch, *, wanted=8, max_batches=5, on_shortfall):
    kept = batches = 0
    while True:
        decision = refill_decision(kept, wanted, batches, max_batches, on_shortfall=on_shortfall)
        if decision.action != "generate":
            return decision, kept, batches
        kept, batches = kept + kept_per_batch, batches + 1


@pytest.mark.parametrize("on_shortfall", ["train", "stop"])
def test_p53_all_groups_degenerate_stops_with_a_reason(on_shortfall):
    decision, _, batches = fill(0, on_shortfall=on_shortfall)
    assert decision.action == "stop" and batches == 5
    assert "0 of 8 groups" in decision.reason and "5 batches" in decision.reason


def test_p53_a_shortfall_trains_on_what_exists_or_stops_as_configured():
    assert fill(1, on_shortfall="train")[0].action == "train"
    assert fill(1, on_shortfall="train")[1:] == (5, 5)
    assert fill(1, on_shortfall="stop")[0].action == "stop"


def test_p53_a_batch_that_fills_trains_at_once():
    decision, kept, batches = fill(4, on_shortfall="stop")
    assert (decision.action, kept, batches) == ("train", 8, 2)
    assert refill_decision(8, 8, 5, 5, on_shortfall="stop").action == "train"


@pytest.mark.parametrize(
    ("counts", "named"),
    [((-1, 8, 0, 5), "kept"), ((0, 0, 0, 5), "wanted"), ((0, 8, -1, 5), "gener"), ((0, 8, 0, 0), "max")],
)
def test_refill_counts_out_of_range_are_named(counts, named):
    with pytest.raises(ValueError, match=named):
        refill_decision(*counts, on_shortfall="train")
    with pytest.raises(ValueError, match="on_shortfall"):
        refill_decision(0, 8, 0, 5, on_shortfall="wait")
