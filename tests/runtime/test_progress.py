"""The progress display: plain lines off a terminal, speed and time left from recent steps."""

from __future__ import annotations

import io

import pytest

from agentrl_jax.runtime.progress import Progress, duration, number, sparkline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines_say_the_step_the_numbers_and_the_time_left():
    clock, out = Clock(), io.StringIO()
    with Progress("trial", file=out, clock=clock) as progress:
        progress.stage("rl", total=10)
        for step in range(1, 11):
            clock.now += 2.0
            progress.update(step, success=step / 10, tokens_per_s=2000.0 + step, reward=None)
        progress.note("held-out success 91.0 % [of 256]")
    lines = out.getvalue().splitlines()
    assert lines[0].split() == ["rl", "step", "1/10", "success", "10.0", "%", "tokens/s", "2,001", "0:18", "left"]
    assert lines[-2].split() == ["rl", "step", "10/10", "success", "100.0", "%", "tokens/s", "2,010"]
    assert lines[-1].split() == ["rl", "held-out", "success", "91.0", "%", "[of", "256]"]
    assert len(lines) == 5, "one line at most every five seconds, the first and the last step always"


def test_a_resumed_stage_counts_from_where_it_was():
    clock, out = Clock(), io.StringIO()
    with Progress("trial", file=out, clock=clock) as progress:
        progress.stage("rl", total=10, done=6)
        clock.now = 3.0
        progress.update(7)
    assert out.getvalue().split() == ["rl", "step", "7/10", "0:09", "left"]


def test_quiet_shows_nothing():
    out = io.StringIO()
    with Progress("trial", quiet=True, file=out) as progress:
        progress.stage("rl", total=1)
        progress.update(1, reward=1.0)
        progress.note("x")
    assert out.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3600, "1:00:00"), (-1, "0:00")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_numbers_and_sparklines_of_odd_values():
    assert number("success", float("nan")) == "nan" and number("violation_rate", 0.015) == "1.5 %"
    assert sparkline([0.0, 1.0, float("nan"), 0.5]) == "▁█▅"
    assert sparkline([1.0, 1.0]) == "" and sparkline([]) == ""
