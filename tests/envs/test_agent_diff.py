"""The replicas: the typed API with dry runs, assertions in a closed world, the tenant and its hash."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from agentrl_envs import data
from agentrl_envs.agent_diff import assertions, suite, suites, tenant
from agentrl_envs.agent_diff.generated import KINDS
from agentrl_envs.agent_diff.services import SERVICES
from agentrl_envs.agent_diff.solve import FINISH, both
from agentrl_envs.sets.agent_diff import AGENT_DIFF
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, Environment, EnvironmentRef, Status, ToolCall

SPLITS = ("train", "validation", "heldout")
MADE = suite()
TASKS = MADE.tasks("train", len(KINDS), 0)
needs_data = pytest.mark.skipif(
    data.locate(AGENT_DIFF) is None, reason="data set 'agent_diff' is absent: set AGENTRL_DATA to the folder with it"
)
DERIVED = {"slack": 49, "linear": 48, "calendar": 53, "box": 42}  # tests whose reference follows from the assertions


def act(*calls):
    return Action(text="", calls=calls)


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


def names(verdict):
    return [check.name for check in verdict.constraints if not check.passed]


@pytest.mark.parametrize("split", SPLITS)
def test_the_reference_gets_full_marks_and_no_attack_does(play, split):
    for task in MADE.tasks(split, len(KINDS), 0):
        played = play(MADE, task, MADE.solve(task))
        assert played.verdict.success and played.verdict.quality == 1.0, (task, played)
        assert not play(MADE, task, []).verdict.success
        for name, script in MADE.attacks(task).items():
            assert not play(MADE, task, script).verdict.success, (name, task)


def test_something_on_top_is_an_undeclared_change(play):
    task = next(task for task in TASKS if task.kind == "topic")
    extra = both("add_reaction", {"message_id": first(task, "messages"), "reaction_type": "tada"})
    verdict = play(MADE, task, [*extra, *MADE.solve(task)]).verdict
    assert verdict.outcome is True and names(verdict) == ["no_undeclared_change"] and not verdict.success
    wide = [(name, {**arguments, "purpose_text": "x"}) for name, arguments in task.data["reference"]]
    verdict = play(MADE, task, [*(c for name, arguments in wide for c in both(name, arguments)), FINISH]).verdict
    assert verdict.outcome is False and names(verdict) == ["no_undeclared_change"]


def first(task, entity):
    connection = tenant.open_bytes(template(task))
    try:
        return next(iter(tenant.dump(connection)[entity]))
    finally:
        connection.close()


def template(task):
    environment = MADE.make()
    environment.reset(task, 0)
    content = environment.snapshot().data
    environment.close()
    return content


def test_a_write_is_run_dry_first_and_each_dry_run_allows_one():
    task = next(task for task in TASKS if task.kind == "post")
    environment = MADE.make()
    assert isinstance(environment, Environment)
    environment.reset(task, 0)
    dry, real, _ = MADE.solve(task)
    denied = environment.step(act(real))
    assert denied.status is Status.DENIED and "dry_run true first" in denied.content[0].content
    rows = tenant.dump(environment._connection)
    would = environment.step(act(dry))
    assert would.status is Status.OK and would.content[0].content.startswith("would add to messages: ")
    assert tenant.dump(environment._connection) == rows
    assert environment.step(act(real)).content[0].content == would.content[0].content.removeprefix("would ")
    assert tenant.dump(environment._connection) != rows
    assert environment.step(act(real)).status is Status.DENIED
    environment.close()


def test_bad_calls_are_answered_and_change_nothing():
    environment = MADE.make()
    environment.reset(TASKS[0], 0)
    before = environment.snapshot()
    channel = first(TASKS[0], "channels")
    wrong = [
        call("drop"), call("add_message"), call("add_message", channel_id=5, message_text="x", dry_run=True),
        call("add_message", channel_id=channel, message_text="x", dry_run="yes"),
        call("add_message", channel_id="C?", message_text="x", dry_run=True),
        call("add_message", channel_id=channel, message_text="\ud800", dry_run=True),
        call("add_message", channel_id=channel, message_text="x" * 5000, dry_run=True),
        call("add_message", channel_id=channel, message_text="x", dry_run=True, user_id="U1"),
        call("change_channel", channel_id=channel, dry_run=True), call("list_messages", offset=True),
        call("remove_message", message_id="1", dry_run=True), call("change_user", user_id="U0", dry_run=True),
        call("list_messages", offset=10**12), call("finish", result="ok"),
    ]  # fmt: skip
    observation = environment.step(act(*wrong))
    assert len(observation.content) == len(wrong) and observation.status is Status.INVALID_ACTION
    assert all(message.content.startswith("error: ") for message in observation.content), observation
    for action in (Action(text="hello"), Action(text="", error="unreadable")):
        assert environment.step(action).status is Status.INVALID_ACTION
    assert environment.snapshot() == before
    environment.close()


def test_lists_are_cut_and_continue():
    environment = MADE.make()
    environment.reset(TASKS[0], 0)
    pages = [environment.step(act(call("list_messages", offset=o))).content[0].content.splitlines() for o in (0, 8, 99)]
    assert [len(page) for page in pages] == [9, 9, 1] and pages[0][-1] == "(1 to 8 of 16)"
    found = environment.step(act(call("list_channels", contains="ABOUT"))).content[0].content.splitlines()
    assert found[-1] == "(4)"
    environment.close()


def test_forks_are_isolated_and_nothing_happens_after_the_end():
    task = TASKS[0]
    one, two, three = (MADE.make() for _ in range(3))
    one.reset(task, 0)
    one.step(act(MADE.solve(task)[0]))
    fork = one.snapshot()
    two.restore(fork)
    three.restore(fork)
    two.step(act(MADE.solve(task)[1]))
    assert two.snapshot().hash != three.snapshot().hash == one.snapshot().hash == fork.hash
    done = two.step(act(FINISH, FINISH))
    assert done.terminated and done.status is Status.INVALID_ACTION
    over = two.snapshot()
    assert two.step(act(FINISH)).terminated and two.snapshot() == over
    for environment in (one, two, three):
        environment.close()


def test_a_state_that_the_actions_do_not_explain(play):
    task = TASKS[0]
    played = play(MADE, task, MADE.solve(task))
    assert "actions_explain" in names(MADE.verify(task, played.initial, played.actions[1:], played.final))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.none() | st.integers(0, 3)), max_size=12),
       st.randoms(use_true_random=False))  # fmt: skip
def test_the_hash_is_that_of_the_rows_whatever_the_way_to_them(steps, rng):
    """Second route: the same rows written in another order; and the sum over all rows."""
    one = tenant.open_bytes(tenant.create([]))
    for entity, key, value in steps:
        tenant.put(one, entity, key, None if value is None else {"value": value})
    held = [(e, k, row) for e, table in tenant.dump(one).items() for k, row in table.items()]
    rng.shuffle(held)
    two = tenant.open_bytes(tenant.create(held))
    assert tenant.snapshot(one).hash == tenant.snapshot(two).hash == tenant.audit(one)
    tenant.put(two, "d", "new", {})
    assert tenant.snapshot(two).hash != tenant.snapshot(one).hash
    one.close()
    two.close()


CHANGED = {"diff_type": "changed"}


def row(**fields):
    return {"t": {"1": fields}}


@pytest.mark.parametrize(
    ("before", "after", "assertion", "good"),
    [
        ({}, row(a=1), {"diff_type": "added", "where": {"a": 1}}, True),
        ({}, row(a=1), {"diff_type": "added", "where": {"a": {"eq": 2}}}, False),
        ({}, row(a=1), {"diff_type": "added", "expected_count": 0}, False),
        ({}, {}, {"diff_type": "added", "expected_count": 0}, True),
        ({}, {}, {"diff_type": "added", "expected_count": {"min": 0, "max": 1}}, True),
        ({}, {"t": {"1": {}, "2": {}}}, {"diff_type": "added"}, True),
        ({}, {"t": {"1": {}, "2": {}}}, {"diff_type": "added", "expected_count": 1}, False),
        (row(a="x"), {}, {"diff_type": "removed", "where": {"a": {"contains": "x"}}}, True),
        (row(a=1, b=1), row(a=2, b=1), {**CHANGED, "expected_changes": {"a": {"from": 1, "to": 2}}}, True),
        (row(a=1, b=1), row(a=2, b=1), {**CHANGED, "expected_changes": {"a": {"from": 5}}}, False),
        (row(a=1, b=1), row(a=2, b=9), {**CHANGED, "expected_changes": {"a": {"to": 2}}}, False),
        (row(a=1, b=1), row(a=2, b=9), {**CHANGED, "expected_changes": {"a": {"to": 2}}, "ignore": ["b"]}, True),
        (row(a=1, at=1), row(a=2, at=9), {**CHANGED, "expected_changes": {"a": {"to": {"ne": 1}}}}, True),
        (row(s={"d": "2018-06"}), row(s={"d": "2018-07"}),
         {**CHANGED, "where": {"s.d": {"contains": "2018-07"}},
          "expected_changes": {"s": {"to": {"contains": "07"}}}},
         True),
        (row(a=["p"]), row(a=["p", "q"]), {**CHANGED, "expected_changes": {"a": {"to": {"contains": "q"}}}}, True),
        (row(a=1), row(a=None), {**CHANGED, "expected_changes": {"a": {"to": {"exists": False}}}}, True),
        (row(a="Go"), row(a="Gone"), {**CHANGED, "expected_changes": {"a": {"to": {"regex": "^G.*e$"}}}}, True),
        (row(a=1), row(a=1), {**CHANGED, "expected_changes": {"a": {"to": 1}}}, False),
    ],
)  # fmt: skip
def test_assertions(before, after, assertion, good):
    found = assertions.differences(before, after)
    missing, undeclared = assertions.judge((), [{"entity": "t", **assertion}], ["at"], found)
    assert (not missing and not undeclared) is good


def test_splits_and_options():
    people = []
    for split in SPLITS:
        tasks = MADE.tasks(split, 36, 0)
        assert len({task.id for task in tasks}) == 36 and tasks == MADE.tasks(split, 36, 0)
        connection = [tenant.open_bytes(template(task)) for task in tasks[:12]]
        people.append({r["real_name"] for c in connection for r in tenant.dump(c)["users"].values()} - {"Assistant"})
        for each in connection:
            each.close()
    assert all(not one & other for one, other in itertools.combinations(people, 2))
    with pytest.raises(ValueError, match="heldout"):
        MADE.tasks("test", 1, 0)
    for options in ({"source": "x"}, {"services": ["mail"]}, {"services": ["box"]}, {"max_calls": 1}):
        with pytest.raises(ValueError, match="agent_diff: "):
            suite(**options)


def test_a_random_agent_does_not_succeed(play):
    rng = random.Random(0)
    for task in TASKS:
        turns = [call(rng.choice(MADE.spec.tools).name, dry_run=rng.random() < 0.5) for _ in range(12)]
        assert not play(MADE, task, [*turns, FINISH]).verdict.success


@needs_data
@pytest.mark.parametrize("service", SERVICES)
def test_the_data_set(play, service):
    made = EnvironmentRef(
        target="agentrl_envs.agent_diff:suite", options={"source": "agent_diff", "services": [service]}
    ).load()
    for split in SPLITS:
        for task in made.tasks(split, 2, 0):
            verdict = play(made, task, made.solve(task)).verdict
            assert verdict.success and verdict.quality == 1.0, (task.id, verdict)
            for name, script in made.attacks(task).items():
                assert not play(made, task, script).verdict.success, (name, task.id)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("service", SERVICES)
def test_every_derived_reference_gets_full_marks(play, service):
    made, count = suite(source="agent_diff", services=[service], max_calls=64), 0
    for split in SPLITS:
        with pytest.raises(ValueError) as caught:
            made.tasks(split, 1000, 0)
        tasks = made.tasks(split, int(str(caught.value).split()[-1]), 0)
        count += len(tasks)
        assert all(play(made, task, made.solve(task)).verdict.success for task in tasks)
        assert not any(play(made, task, [FINISH]).verdict.success for task in tasks)
    assert count == DERIVED[service]
    assert len(suites._tests(service)) > count


@pytest.mark.slow
def test_a_tenant_of_20_megabytes_is_snapshot_and_forked(capsys):
    content = tenant.create(("t", str(i), {"n": i, "text": "x" * 180}) for i in range(85_000))
    assert len(content) > 20_000_000
    one = tenant.open_bytes(content)
    times = []
    for i in range(5):
        started = time.perf_counter()
        two = tenant.open_bytes(tenant.snapshot(one).data)
        times.append(time.perf_counter() - started)
        tenant.put(two, "t", "1", {"n": i})
        assert tenant.snapshot(two).hash != tenant.snapshot(one).hash
        two.close()
    one.close()
    with capsys.disabled():
        print(f"\n{len(content) / 1e6:.1f} MB, snapshot and fork: {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f} ms")
