"""The staleness law and the admission rule: a controller worked by hand, and what the law promises."""

import warnings
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.rl.staleness import admission_capacity, bias_bound, check_stable, crossover_lag, learning_rate_cap

RADII = {"batch_radius": 0.02, "critical_radius": 0.5}
cap = partial(learning_rate_cap, horizon=200, update_norm=10.0, **RADII)
stable = partial(check_stable, horizon=200, update_norm=10.0, **RADII)


def test_worked_controller():
    # The horizon allows 0.5 / (200 * 10); a lag of S allows 0.02 / (10 S): the same at S = 8.
    assert [cap(lag) for lag in (0, 1, 4, 8, 16, 64)] == pytest.approx(
        [2.5e-4, 2.5e-4, 2.5e-4, 2.5e-4, 1.25e-4, 3.125e-5]
    )
    assert crossover_lag(200, **RADII) == pytest.approx(8.0)


def test_bias_grows_with_lag_times_learning_rate():
    assert bias_bound(16, 1e-4, 10.0) / bias_bound(4, 1e-4, 10.0) == pytest.approx(4.0)
    assert bias_bound(16, 1e-4, 10.0) == pytest.approx(bias_bound(4, 4e-4, 10.0))
    assert bias_bound(0, 1e-4, 10.0) == 0
    assert bias_bound(4, 1e-4, 10.0, smoothness=3.0) == pytest.approx(0.012)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.integers(1, 5000), st.floats(1e-3, 1), st.floats(1e-3, 10), st.floats(0.1, 100))
def test_at_the_cap_one_of_the_two_radii_is_reached_exactly(lag, horizon, batch, critical, norm):
    rate = learning_rate_cap(lag, horizon, batch_radius=batch, critical_radius=critical, update_norm=norm)
    shares = bias_bound(lag, rate, norm) / batch, bias_bound(horizon, rate, norm) / critical
    assert max(shares) == pytest.approx(1.0)
    assert (shares[0] >= shares[1]) == (
        lag >= crossover_lag(horizon, batch_radius=batch, critical_radius=critical)
    ) or (shares[0] == pytest.approx(shares[1]))


def test_inside_the_stable_region_nothing_is_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stable(4, 2.5e-4)
        assert stable(16, 1.2e-4)
        assert stable(0, 0.0)


@pytest.mark.parametrize(
    ("lag", "rate", "said"),
    [
        (16, 2e-4, r"lag 16 .* 0.0002 .* at most 0.000125 or a lag of at most 10$"),
        (1, 1e-3, r"at most 0.00025 or a run of at most 50 steps$"),
        (16, 1e-3, r"at most 0.000125 or a lag of at most 2 and a run of at most 50 steps$"),
    ],
)
def test_outside_it_the_warning_says_what_to_change(lag, rate, said):
    with pytest.warns(UserWarning, match=said):
        assert not stable(lag, rate)


def test_what_the_warning_advises_is_stable():
    assert stable(10, 2e-4) and check_stable(2, 1e-3, 50, update_norm=10.0, **RADII)


def test_a_margin_narrows_the_region():
    assert stable(16, 1.2e-4)
    with pytest.warns(UserWarning, match=r"at most 6\.25e-05 or a lag of at most 8"):
        assert not stable(16, 1.2e-4, margin=0.5)


def admitted(**changes):
    rule = {"max_concurrent": 64, "running": 10, "max_lag": 4, "version": 0, "batch": 32, "accepted": 120}
    return admission_capacity(**{**rule, **changes})


def test_admission_worked_numbers():
    assert admitted() == 30  # min(54, 5 * 32 - 130)
    assert admitted(version=1) == 54  # min(54, 6 * 32 - 130)
    assert admitted(accepted=150) == 0  # min(54, 5 * 32 - 160)
    assert admitted(accepted=170) == 0  # below nothing, still nothing


def test_on_policy_admission_is_one_batch_per_version():
    assert admitted(max_lag=0, running=0, accepted=0) == 32
    assert admitted(max_lag=0, running=32, accepted=0) == 0
    assert admitted(max_lag=0, running=0, accepted=32, version=1) == 32


def test_after_a_restart_counting_from_zero_would_admit_a_burst():
    resumed = partial(admitted, version=100, running=0, max_concurrent=10_000)
    assert resumed(accepted=100 * 32) == 5 * 32
    assert resumed(accepted=0) == 105 * 32


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=30, max_size=30))
def test_no_sample_is_older_than_the_bound_when_it_trains(max_lag, batch, finishing):
    version, running, finished = 0, [], []
    for count in finishing:
        free = admission_capacity(
            max_concurrent=8, running=len(running), max_lag=max_lag, version=version, batch=batch,
            accepted=version * batch + len(finished),
        )  # fmt: skip
        running += [version] * free
        finished, running = finished + running[:count], running[count:]
        if len(finished) >= batch:
            assert all(version - sampled <= max_lag for sampled in finished[:batch])
            version, finished = version + 1, finished[batch:]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: bias_bound(-1, 1e-4, 1.0), "bias_bound: lag"),
        (lambda: cap(-1), "max_lag"),
        (lambda: learning_rate_cap(1, 0, update_norm=1.0, **RADII), "horizon"),
        (lambda: learning_rate_cap(1, 1, update_norm=0.0, **RADII), "update_norm"),
        (lambda: crossover_lag(1, batch_radius=float("nan"), critical_radius=1.0), "batch_radius"),
        (lambda: stable(1, -1e-4), "learning_rate"),
        (lambda: stable(1, 1e-4, margin=0.0), "margin"),
        (lambda: admitted(batch=0), "batch"),
        (lambda: admitted(accepted=-1), "accepted"),
    ],
)
def test_bad_numbers_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
