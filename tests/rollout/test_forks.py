"""Forks: verified copies in this process and in other workers; what is no copy is refused, counted and paid for."""

from __future__ import annotations

import dataclasses
import json

import fork_suites
import pytest
from agentrl_envs.conformance import case, check
from agentrl_envs.transcripts import action_of
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, EnvironmentRef, ForkRefused, Snapshot, Status, ToolCall, fork, restored
from agentrl_jax.rollout.forks import ForkReport, fork_episode
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.wire import Answer, Capture, Finish, Perform, Refused, Reset

WORKFLOW = EnvironmentRef(target="agentrl_envs.workflow:suite")
DEADLINES = Deadlines(start=60.0, reset=30.0, step=30.0, verify=30.0)
ROLL = action_of(ToolCall(name="roll"))


def _ask(pool: Pool, worker: int, command):
    pool.submit(worker, command)
    ((_, reply),) = pool.poll(None)
    assert isinstance(reply, Answer), reply
    return reply.value


def test_a_fork_is_the_same_state_and_says_what_it_cost():
    suite = WORKFLOW.load()
    (task,) = suite.tasks("train", 1, 0)
    environment = suite.make()
    environment.reset(task, 0)
    first, *rest = map(action_of, suite.solve(task))
    environment.step(first)
    made = fork(suite, environment)
    assert made.snapshot == environment.snapshot() == made.environment.snapshot()
    assert made.bytes == len(made.snapshot.data) and 0 < made.seconds < 60
    assert [made.environment.step(action) for action in rest] == [environment.step(action) for action in rest]
    made.environment.close()
    environment.close()


def test_what_is_no_copy_is_refused_and_left_closed():
    suite = WORKFLOW.load()
    environment = suite.make()
    environment.reset(suite.tasks("train", 1, 0)[0], 0)
    snapshot = environment.snapshot()
    with pytest.raises(ForkRefused, match="says fork='none'"):
        fork(dataclasses.replace(suite, spec=dataclasses.replace(suite.spec, fork="none")), environment)
    with pytest.raises(ForkRefused, match=r"has the hash .*, the snapshot 0000"):
        restored(suite, Snapshot(data=snapshot.data, hash="0" * 64))
    with pytest.raises(ForkRefused, match="restore raised DatabaseError"):
        restored(suite, Snapshot(data=snapshot.data[: len(snapshot.data) // 2] + bytes(512), hash=snapshot.hash))
    environment.close()


def test_a_replayed_environment_is_sound():
    findings = list(check(case(EnvironmentRef(target="fork_suites:dice"), 3)))
    skipped = {finding.name for finding in findings if finding.result == "skipped"}
    assert [finding for finding in findings if finding.result == "broken"] == []
    assert skipped <= {"attackers_fail", "hidden_data_stays_hidden"}


@given(st.lists(st.sampled_from(["roll", "finish", "bad", ""]), max_size=8))
@settings(max_examples=30, deadline=None)
def test_a_replayed_fork_comes_to_the_same_future(names):
    suite = fork_suites.dice()
    (task,) = suite.tasks("train", 1, 3)
    environment = suite.make()
    environment.reset(task, 7)
    for name in names:
        arguments = {"total": 9} if name == "finish" else {}
        environment.step(action_of(ToolCall(name=name, arguments=arguments)) if name else Action(text="hm"))
    made = fork(suite, environment)
    assert made.snapshot == made.environment.snapshot()
    for action in (ROLL, ROLL, action_of(ToolCall(name="finish", arguments={"total": 1}))):
        assert made.environment.step(action) == environment.step(action)
    assert made.environment.snapshot() == environment.snapshot()


@pytest.mark.parametrize(
    ("fault", "words"),
    [("observation", "another observation at turn 1 of 2"), ("measured", "the restored state has the hash")],
)
def test_a_replay_that_goes_another_way_is_refused(fault, words):
    suite = fork_suites.dice(fault)
    environment = suite.make()
    environment.reset(suite.tasks("train", 1, 0)[0], 0)
    environment.step(ROLL)
    environment.step(ROLL)
    with pytest.raises(ForkRefused, match=words):
        fork(suite, environment)


def test_a_snapshot_of_another_version_is_refused():
    suite = fork_suites.dice()
    environment = suite.make()
    environment.reset(suite.tasks("train", 1, 0)[0], 0)
    with pytest.raises(ForkRefused, match="the snapshot is of dice 1, this is dice 2"):
        restored(fork_suites.dice(version="2"), environment.snapshot())


def test_a_closed_replaying_environment_says_what_to_call_and_ends_once():
    environment = fork_suites.dice().make()
    environment.close()
    with pytest.raises(RuntimeError, match="reset"):
        environment.step(ROLL)
    environment.reset(fork_suites.dice().tasks("train", 1, 0)[0], 0)
    environment.close()
    environment.close()
    assert environment.open == 0


@pytest.mark.parametrize("target", ["agentrl_envs.workflow:suite", "fork_suites:dice"])
def test_an_episode_is_forked_into_other_workers(target):
    ref = EnvironmentRef(target=target)
    suite = ref.load()
    (task,) = suite.tasks("train", 1, 1)
    actions = list(map(action_of, suite.solve(task)))
    with Pool(ref, 4, DEADLINES) as pool:
        _ask(pool, 0, Reset(task, 5))
        _ask(pool, 0, Perform(actions[0]))
        report = fork_episode(pool, 0, task, actions[:1], [1, 2, 3])
        assert report.forked == (1, 2, 3) and report.refused == () and len(report.resume_s) == 3
        assert report.bytes > 0 and 0 < report.capture_s < report.seconds
        assert ForkReport.from_json(json.loads(json.dumps(report.to_json()))) == report
        _ask(pool, 3, Perform(actions[-1]))  # one sibling ends at once; the others and the source do not notice
        answers = {worker: [_ask(pool, worker, Perform(action)) for action in actions[1:]] for worker in (0, 1, 2)}
        assert answers[0] == answers[1] == answers[2]
        verdicts = {worker: _ask(pool, worker, Finish()) for worker in (0, 1, 2, 3)}
    assert verdicts[0] == verdicts[1] == verdicts[2] and verdicts[0].success
    assert not verdicts[3].success
    alone = suite.make()
    alone.reset(task, 5)
    assert answers[0] == [alone.step(action) for action in actions][1:]
    alone.close()


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        (EnvironmentRef(target="fake_suites:counter", options={"fork": "none"}), "says fork='none'"),
        (EnvironmentRef(target="fork_suites:large", options={"size": 40 << 20}), "is 83886080 bytes, at most"),
        (EnvironmentRef(target="fork_suites:dice", options={"fault": "measured"}), "has the hash"),
    ],
)
def test_a_refusal_is_counted_and_the_episode_goes_on(ref, words):
    suite = ref.load()
    (task,) = suite.tasks("train", 1, 0)
    step = Action(text="", error="unreadable")
    with Pool(ref, 3, DEADLINES) as pool:
        _ask(pool, 0, Reset(task, 0))
        before = _ask(pool, 0, Perform(step))
        report = fork_episode(pool, 0, task, [step], [1, 2])
        assert report.forked == () and len(report.refused) == 2 and all(words in reason for reason in report.refused)
        after = _ask(pool, 0, Perform(step))
        assert after.status == before.status and 0 in pool.pids()


def test_what_is_too_large_for_a_frame_is_refused_by_the_worker_itself():
    ref = EnvironmentRef(target="fork_suites:large", options={"size": 1 << 20})
    with Pool(ref, 2, DEADLINES) as pool:
        (task,) = ref.load().tasks("train", 1, 0)
        _ask(pool, 0, Reset(task, 0))
        assert not isinstance(_ask(pool, 0, Capture()), Refused)
        report = fork_episode(pool, 0, task, [], [1])
        assert report.forked == (1,) and report.bytes == 2 << 20
        here, there = (_ask(pool, worker, Perform(ROLL)) for worker in (0, 1))
        assert here.status is there.status is Status.OK and here.content != there.content  # two processes


def test_a_fork_needs_the_pool_to_itself():
    with Pool(WORKFLOW, 2, DEADLINES) as pool:
        (task,) = WORKFLOW.load().tasks("train", 1, 0)
        pool.submit(0, Reset(task, 0))
        with pytest.raises(RuntimeError, match="in flight"):
            fork_episode(pool, 0, task, [], [1])
        pool.poll(None)
