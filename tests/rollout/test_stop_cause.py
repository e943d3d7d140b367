"""P22: the verifier is told why an episode stopped, in rollouts, in replays and in plays; older ones need not know."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import fake_suites
import pytest
import scripted
from agentrl_envs import math
from plain_renderer import PlainRenderer

from agentrl_jax.protocol import EnvironmentRef, Snapshot, StopReason, Task, ToolCall, Verdict
from agentrl_jax.report import triage
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.replay import replay_in

LOOK, FINISH = ToolCall(name="look"), ToolCall(name="finish")
WITNESS = Task(id="t", split="train", data={"goal": 5, "fault": "witness"})
SCRIPTS = {
    StopReason.COMPLETED: [LOOK, FINISH],
    StopReason.EARLY_STOP: [LOOK, ""],
    StopReason.TOKEN_CAP: [LOOK, "please " * 40],
    StopReason.BUDGET: [LOOK] * 12,
}
STATE = Snapshot(data=b"", hash="")


@pytest.fixture(scope="module")
def pool():
    ref = EnvironmentRef(target="fake_suites:counter", options={"steps": 3})
    with Pool(ref, 4, Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def done(pool, renderer):
    plan = [EpisodePlan(group=0, member=i, task=WITNESS, seed=9, key=(0, i)) for i in range(len(SCRIPTS))]
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn(dict(enumerate(SCRIPTS.values()))), slots=4)
    found = collect(plan, sampler, pool, renderer, max_turn_tokens=16, temperature=1.0)
    return dict(zip(SCRIPTS, sorted(found, key=lambda t: t.member), strict=True))


@pytest.mark.parametrize("stop", SCRIPTS)
def test_p22_the_verifier_is_told_why_the_episode_stopped(done, stop):
    found = done[stop]
    assert found.stop is found.receipt.stop is stop and found.attribution is None
    assert found.verdict.diagnostics["stop"] == str(stop)
    assert found.valid and found.verdict.outcome is False, "whatever ended it, it stays in the batch"


def test_a_replay_tells_it_the_recorded_cause_again(pool, done):
    assert [replay_in(pool, trajectory.receipt) for trajectory in done.values()] == [None] * len(SCRIPTS)
    other = replace(done[StopReason.BUDGET].receipt, stop=StopReason.EARLY_STOP)
    diverged = replay_in(pool, other)
    assert diverged is not None and (diverged.where, diverged.cause) == ("verdict", "verifier")


def test_a_state_that_a_replay_rebuilt_is_judged_with_the_cause_as_well(renderer, tmp_path):
    """The worker dies while the turn that meets the limit is sampled."""
    crash = [LOOK, ToolCall(name="break", arguments={"how": "once_crash"}), "please " * 40]
    ref = EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn({0: crash}), slots=1)
    plan = [EpisodePlan(group=0, member=0, task=WITNESS, seed=9, key=(0, 0))]
    with Pool(ref, 1, Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)) as one:
        (healed,) = collect(plan, sampler, one, renderer, max_turn_tokens=16, temperature=1.0)
    assert healed.receipt.healed == 1 and healed.verdict.diagnostics["stop"] == "token_cap"


def test_what_is_played_in_process_is_judged_with_its_cause(renderer):
    suite = fake_suites.counter()
    for script, stop in (([LOOK, FINISH], "completed"), ([LOOK], "early_stop")):
        assert play(suite, renderer, WITNESS, script, 9).verdict.diagnostics["stop"] == stop


class Unhashable(list):
    def __call__(self, task, initial, actions, final):
        return Verdict(outcome=True)


def _four(task, initial, actions, final):
    return Verdict(outcome=True)


def _told(task, initial, actions, final, *, stop):
    return Verdict(outcome=True, diagnostics={"stop": str(stop)})


@pytest.mark.parametrize(
    ("verify", "told"),
    [
        (_four, False),
        (lambda *episode: _four(*episode), False),
        (lambda *episode, **more: _four(*episode, **more), False),
        (Unhashable(), False),
        (_told, True),
        (partial(lambda options, *episode, stop=None: _told(*episode, stop=stop), "options"), True),
        (lambda task, initial, actions, final, stop=None: _told(task, initial, actions, final, stop=stop), True),
    ],
)
def test_a_verifier_without_the_parameter_is_asked_as_ever(verify, told):
    suite = replace(fake_suites.counter(), verify=verify)
    assert suite.takes_stop is told
    verdict = suite.judge(WITNESS, STATE, (), STATE, StopReason.BUDGET)
    assert verdict.outcome is True and verdict.diagnostics == ({"stop": "budget"} if told else {})


def test_an_answer_never_given_is_told_from_a_wrong_one():
    suite = math.suite()
    (task,) = suite.tasks("train", 1, 0)
    world = suite.make()
    world.reset(task, 0)
    state = world.snapshot()
    by_stop = {stop: suite.judge(task, state, (), state, stop) for stop in (*SCRIPTS, None)}
    assert all(verdict.outcome is False and not verdict.violated for verdict in by_stop.values())
    assert by_stop[StopReason.BUDGET].evidence == ("no answer: cut by a limit (budget)",)
    assert by_stop[StopReason.EARLY_STOP].evidence == ("no answer: the policy stopped before",)
    assert by_stop[None].diagnostics["unfinished"] == "unknown" and by_stop[None].evidence == ("no answer",)
    assert suite.verify(task, state, (), state) == by_stop[None]
    answered = play(suite, PlainRenderer(), task, suite.solve(task)[-1:], 0).verdict
    assert answered.diagnostics["unfinished"] == ""


def test_triage_blames_no_verifier_that_heard_two_causes(done):
    rows = [done[stop].receipt.to_json() for stop in (StopReason.EARLY_STOP, StopReason.BUDGET)]
    cut, stopped = ({**row, "replay_id": "same", "steps": []} for row in rows)
    stopped = {**stopped, "verdict": {**stopped["verdict"], "outcome": 0.5}}
    assert triage._doubted([cut, stopped]) == {}
    again = {**stopped, "verdict": {**stopped["verdict"], "outcome": 0.25}}
    (doubt,) = triage._doubted([cut, stopped, again]).values()
    assert doubt[0] == "evaluator"
