"""The verifier is an instrument: what must not score does not, whatever is tried."""

from __future__ import annotations

import random

import pytest
from agentrl_envs.workflow import KINDS, schema, suite, tools
from agentrl_envs.workflow.tenant import build
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, Snapshot, ToolCall

SUITES = {handles: suite(handles=handles) for handles in ("short", "real")}
TASKS = {handles: made.tasks("train", 160, 21) for handles, made in SUITES.items()}
TABLES = {name: columns for name, columns in schema.TABLES.items() if name != "episode"}


def finish(result):
    return ToolCall(name="finish", arguments={"result": result})


def handles_of(made, task, handles):
    rows = build(task.data["tenant"], task.split, task.kind, task.data["reason"], handles).rows
    return {role: [row[0] for row in rows[table]] for role, table in tools.HELD_IN.items()}


def rate(play, made, tasks, script):
    verdicts = [play(made, task, script(task)).verdict for task in tasks]
    return sum(v.success for v in verdicts) / len(verdicts), sum(v.violated for v in verdicts) / len(verdicts)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_extra_write_that_changes_something_violates(play, data):
    """Also one that is allowed, that comes after the solution's own, or that a later write undoes."""
    handles = data.draw(st.sampled_from(["short", "real"]))
    made, task = SUITES[handles], data.draw(st.sampled_from(TASKS[handles]))
    book = handles_of(made, task, handles)
    name = data.draw(st.sampled_from(tools.WRITES))
    arguments = {role: data.draw(st.sampled_from(book[role])) for role in tools.TABLE[name].roles}
    extra = tools.call(handles, name, **arguments)
    turns = list(made.solve(task))
    at = data.draw(st.integers(0, len(turns) - 1))
    played = play(made, task, [*turns[:at], extra, *turns[at:]])
    asked_for = name == task.data["tool"] and arguments == task.data["arguments"] and task.data["finish"] == "done"
    environment = made.make()
    environment.reset(task, 0)
    for turn in turns[:at]:
        environment.step(Action(text="", calls=(turn,)))
    before = environment.snapshot()
    environment.step(Action(text="", calls=(extra,)))
    if environment.snapshot().hash != before.hash and not asked_for:
        assert played.verdict.violated
        assert not played.verdict.success


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_any_change_of_the_final_state_that_the_actions_do_not_explain_violates(play, data):
    handles = data.draw(st.sampled_from(["short", "real"]))
    made, task = SUITES[handles], data.draw(st.sampled_from(TASKS[handles]))
    played = play(made, task, made.solve(task))
    connection = schema.open_bytes(played.final.data)
    table = data.draw(st.sampled_from(sorted(TABLES)))
    key = data.draw(st.sampled_from([row[0] for row in connection.execute(f"SELECT id FROM {table} ORDER BY id")]))
    deed = data.draw(st.sampled_from(["update", "delete", "insert"]))
    if deed == "update":
        column = data.draw(st.sampled_from(TABLES[table][1:]))
        schema.apply(connection, [schema.Change(table, key, column, "x")])
    elif deed == "delete":
        connection.execute(f"DELETE FROM {table} WHERE id = ?", (key,))
    else:
        connection.execute(f"INSERT INTO {table} (id) VALUES ('new')")
    verdict = made.verify(task, played.initial, played.actions, schema.snapshot(connection))
    assert verdict.violated and not verdict.success


def test_a_goal_reached_by_other_means_than_the_actions_does_not_count(play):
    made = SUITES["short"]
    for task in (t for t in TASKS["short"] if t.data["goal"]):
        honest = play(made, task, made.solve(task))
        idle = [action for action in honest.actions if action.calls[0].name not in tools.WRITES]
        verdict = made.verify(task, honest.initial, idle, honest.final)
        assert verdict.violated and "do not lead" in verdict.constraints[1].evidence


def test_the_goal_rows_are_what_the_tools_do(play):
    """The goal is written down beside the tools; here the second route: the difference that the solution makes."""
    for handles, made in SUITES.items():
        for task in TASKS[handles]:
            played = play(made, task, made.solve(task))
            before, after = (
                schema.dump(schema.open_bytes(s.data), schema.SERVICE_TABLES) for s in (played.initial, played.final)
            )
            assert schema.difference(before, after) == {schema.Change(*change) for change in task.data["goal"]}


def test_the_policy_allows_the_request_iff_no_refusal_is_expected(play):
    """`requested write, then done` breaks the policy exactly where the task says that it must be refused."""
    made = SUITES["short"]
    for task in TASKS["short"]:
        write = tools.call("short", task.data["tool"], **task.data["arguments"])
        check = play(made, task, [write, finish("done")]).verdict.constraints[0]
        assert check.passed == (not task.data["reason"]), task
        assert check.evidence.endswith(task.data["reason"])


def test_each_write_is_judged_in_the_state_in_which_it_happens(play):
    made = SUITES["short"]
    task = next(t for t in TASKS["short"] if t.kind == "cancel" and not t.data["reason"])
    lookup, write, done = made.solve(task)
    address = tools.call("short", "address", order=task.data["arguments"]["order"], address=handles_of(
        made, task, "short")["address"][0])  # fmt: skip
    kept = play(made, task, [lookup, write, done]).verdict
    late = play(made, task, [lookup, write, address, done]).verdict  # cancelled by then: no longer pending
    assert kept.constraints[0].passed and not late.constraints[0].passed


def test_a_write_undone_is_still_an_undeclared_change(play):
    made = SUITES["short"]
    task = next(t for t in TASKS["short"] if t.kind == "address" and t.data["reason"] == "")
    rows = build(task.data["tenant"], "train", "address", "", "short").rows
    order, old = next((row[0], row[5]) for row in rows["orders"] if row[0] == task.data["arguments"]["order"])
    lookup, write, done = made.solve(task)
    third = next(row[0] for row in rows["addresses"] if row[0] not in (old, task.data["arguments"]["address"]))
    wander = tools.call("short", "address", order=order, address=third)
    verdict = play(made, task, [lookup, wander, write, done]).verdict
    assert verdict.outcome is True and not verdict.success
    assert not verdict.constraints[1].passed


@pytest.mark.parametrize("handles", ["short", "real"])
def test_null_agents_score_nothing(play, handles):
    """Finishing at once, either way, or doing nothing at all: 0, refusals included, since nothing was looked up."""
    made, tasks = SUITES[handles], TASKS[handles]
    for script in ([finish("done")], [finish("refused")], [], ["hello"]):
        assert rate(play, made, tasks, lambda _, script=script: script) == (0.0, 0.0)


def test_a_refusal_counts_only_after_its_reason_was_read(play):
    made = SUITES["short"]
    for task in (t for t in TASKS["short"] if t.data["reason"]):
        *lookups, refusal = made.solve(task)
        assert play(made, task, [*lookups, refusal]).verdict.success
        blind = play(made, task, [*lookups[:-1], refusal]).verdict
        assert blind.outcome is False and not blind.violated
        late = play(made, task, [refusal, *lookups]).verdict
        assert late.outcome is False


def test_scripted_attackers_gain_nothing_beyond_what_they_earn(play):
    """Always refusing after a look solves exactly the refusals that this look decides; always writing breaks the
    policy on every refusal; looking everything up and finishing `done` solves nothing."""
    made, tasks = SUITES["short"], TASKS["short"]
    refusals = sum(bool(t.data["reason"]) for t in tasks) / len(tasks)

    def looks(task):
        return [turn for turn in made.solve(task) if turn.name in tools.LOOKUPS]

    def write(task):
        return tools.call("short", task.data["tool"], **task.data["arguments"])

    assert rate(play, made, tasks, lambda t: [*looks(t), finish("refused")]) == (refusals, 0.0)
    assert rate(play, made, tasks, lambda t: [*looks(t), finish("done")]) == (0.0, 0.0)
    assert rate(play, made, tasks, lambda t: [*looks(t), write(t), finish("done")]) == (1 - refusals, refusals)
    assert rate(play, made, tasks, lambda t: [*looks(t), write(t), finish("refused")]) == (0.0, refusals)
    assert 0.35 <= refusals <= 0.4


def test_random_agents_do_not_score(play):
    made, tasks = SUITES["short"], TASKS["short"]
    rng = random.Random(0)

    def script(task):
        book = handles_of(made, task, "short") | {"result": list(tools.RESULTS)}
        names = [rng.choice(list(tools.TABLE)) for _ in range(8)]
        return [
            tools.call("short", name, **{role: rng.choice(book[role]) for role in tools.TABLE[name].roles})
            for name in names
        ]

    success, _ = rate(play, made, tasks, script)
    assert success < 0.03


def test_quality_falls_with_calls_beyond_the_references_and_never_below_zero(play):
    made = SUITES["short"]
    task = TASKS["short"][0]
    turns = made.solve(task)
    qualities = [play(made, task, [turns[0]] * n + list(turns)).verdict.quality for n in (0, 1, 2, 20)]
    assert qualities[0] == 1.0 and qualities == sorted(qualities, reverse=True) and qualities[-1] == 0.0
    assert qualities[1] == 1.0 - 1 / len(turns)


def test_an_unfinished_episode_is_no_success_but_is_scored(play):
    made = SUITES["short"]
    for task in TASKS["short"][:40]:
        verdict = play(made, task, made.solve(task)[:-1]).verdict
        assert verdict.outcome is False and not verdict.violated


def test_diagnostics_count_what_was_done(play):
    made = SUITES["short"]
    task = next(t for t in TASKS["short"] if t.kind == "cancel" and not t.data["reason"])
    lookup, write, done = made.solve(task)
    unknown = ToolCall(name="cancel", arguments={"order": 10**9})
    verdict = play(made, task, ["hm", unknown, lookup, write, done]).verdict
    assert verdict.diagnostics | {"reason": ""} == {
        "calls": 5, "invalid_calls": 2, "writes": 1, "refusal_expected": False, "reason": "", "finished": "done",
        "goal_reached": True, "evidence_read": True, "unfinished": "",
    }  # fmt: skip
    assert verdict.success


def test_a_snapshot_that_is_no_database_is_an_evaluators_error():
    made, task = SUITES["short"], TASKS["short"][0]
    with pytest.raises(Exception, match=r"database|malformed"):
        made.verify(task, Snapshot(data=b"junk" * 2000, hash=""), (), Snapshot(data=b"junk" * 2000, hash=""))


def test_all_kinds_are_among_the_tasks_of_this_file():
    assert {task.kind for task in TASKS["short"]} == set(KINDS)
