"""The sql environment: what a statement may do, what is shown, snapshots, tasks of the three sources."""

from __future__ import annotations

import contextlib
import itertools
import random
import sqlite3

import pytest
from agentrl_envs import data
from agentrl_envs.sets.chinook import CHINOOK
from agentrl_envs.sets.spider import SPIDER
from agentrl_envs.sql import suite
from agentrl_envs.sql.domains import DOMAINS, build
from agentrl_envs.sql.engine import Reader, Refused
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, Environment, EnvironmentRef, Snapshot, Status, ToolCall

SPLITS = ("train", "validation", "heldout")
SHOP = build(DOMAINS[0], "train", 1)
CHAIN = "WITH c0 AS (SELECT 1 AS x LIMIT 1)" + "".join(
    f", c{i} AS (SELECT a.x FROM c{i - 1} a, [c{i - 1}] b LIMIT 1)" for i in range(1, 30)
)


def sets(*entries):
    return pytest.mark.skipif(
        any(data.locate(entry) is None for entry in entries),
        reason=f"data set {entries[0].name!r} is absent: set AGENTRL_DATA to the folder that holds it",
    )


def query(sql):
    return ToolCall(name="query", arguments={"sql": sql})


def act(*calls):
    return Action(text="", calls=calls)


@pytest.fixture(scope="module")
def made():
    return suite()


@pytest.fixture
def reader():
    opened = Reader(SHOP)
    yield opened
    opened.close()


@pytest.mark.parametrize("split", SPLITS)
def test_the_reference_gets_full_marks_and_nothing_else_is_scored(play, made, split):
    for task in made.tasks(split, 12, 0):
        verdict = play(made, task, made.solve(task)).verdict
        assert verdict.success and verdict.quality == 1.0, (task, verdict)
        assert not play(made, task, []).verdict.success
    for name, script in made.attacks(task).items():
        verdict = play(made, task, script).verdict
        assert not verdict.success and not verdict.violated, (name, verdict)


def test_a_written_down_result_passes_on_the_database_and_not_on_a_variation(play, made):
    for task in made.tasks("train", 12, 4):
        verdict = play(made, task, made.attacks(task)["the result written down"]).verdict
        assert verdict.outcome is False and verdict.diagnostics["variation"] >= 1, (task.data, verdict)


def test_a_random_agent_does_not_succeed(play, made):
    rng = random.Random(0)
    for task in made.tasks("train", 8, 2):
        tables = ("orders", "customers", "products", "visits", "members", "stops", "nowhere")
        turns = [
            query(f"SELECT {rng.choice(('*', 'count(*)', 'max(id)'))} FROM {rng.choice(tables)}") for _ in range(5)
        ]
        turns.append(ToolCall(name="answer", arguments=turns[-1].arguments))
        assert not play(made, task, turns).verdict.success


def test_the_answer_is_not_in_what_the_policy_sees(made):
    environment = made.make()
    for task in made.tasks("train", 24, 0):
        shown = "".join(message.content for message in environment.reset(task, 0).content)
        shown += environment.step(act(ToolCall(name="schema"))).content[0].content
        assert task.data["gold"] not in shown and "SELECT count" not in shown
    environment.close()


def test_same_task_same_transcript_and_distinct_tasks(play, made):
    first, second = (made.tasks("train", 30, 7) for _ in range(2))
    assert first == second and len({task.id for task in first}) == 30
    for task in first[:4]:
        runs = [play(suite(), task, made.solve(task)) for _ in range(2)]
        assert runs[0].observations == runs[1].observations and runs[0].final == runs[1].final
    with pytest.raises(ValueError, match="heldout"):
        made.tasks("test", 1, 0)


def test_names_of_one_split_appear_in_no_other():
    held = []
    for split in SPLITS:
        names = set()
        for domain, seed in itertools.product(DOMAINS, range(6)):
            connection = sqlite3.connect(":memory:")
            connection.deserialize(build(domain, split, seed))
            for entity in (domain.parent, domain.item):
                names |= {row[0] for row in connection.execute(f"SELECT name FROM {entity.table}")}
            connection.close()
        held.append(names)
    assert all(not one & other for one, other in itertools.combinations(held, 2))


@pytest.mark.parametrize(("option", "value"), [("source", "oracle"), ("rows", 0), ("characters", 3), ("max_calls", 1)])
def test_an_unknown_option_is_an_error_that_names_it(option, value):
    with pytest.raises(ValueError, match=rf"sql: .*{option}={value!r}"):
        suite(**{option: value})


@pytest.mark.parametrize(
    ("sql", "status", "said"),
    [
        ("DELETE FROM orders", Status.DENIED, "DELETE orders"),
        ("INSERT INTO orders DEFAULT VALUES RETURNING *", Status.DENIED, "INSERT"),
        ("UPDATE customers SET age = 1", Status.DENIED, "UPDATE"),
        ("CREATE TEMP TABLE t (x)", Status.DENIED, "not allowed"),
        ("DROP TABLE orders", Status.DENIED, "not allowed"),
        ("ATTACH '/etc/passwd' AS p", Status.DENIED, "ATTACH"),
        ("VACUUM INTO '/tmp/x'", Status.DENIED, "not allowed"),
        ("PRAGMA table_info(orders)", Status.DENIED, "PRAGMA"),
        ("SELECT * FROM pragma_database_list", Status.DENIED, "not allowed"),
        ("SELECT load_extension('x')", Status.DENIED, "load_extension"),
        ("SELECT random()", Status.DENIED, "random"),
        ("SELECT printf('%.*c', 2000000000, 'x')", Status.DENIED, "printf"),
        ("SELECT CURRENT_DATE", Status.DENIED, "current_date"),
        ("SELECT date('now')", Status.INVALID_ACTION, "clock"),
        ("SELECT strftime('%Y')", Status.INVALID_ACTION, "clock"),
        ("SELECT datetime(x'6e6f77')", Status.INVALID_ACTION, "clock"),
        ("SELECT date('now' || char(0))", Status.INVALID_ACTION, "clock"),
        ("SELECT date('2020-01-01', x'6c6f63616c74696d65')", Status.INVALID_ACTION, "clock"),
        ("SELECT datetime('2020-01-01', 'utc')", Status.INVALID_ACTION, "clock"),
        ("BEGIN", Status.DENIED, "transaction"),
        ("SELECT 1; SELECT 2", Status.INVALID_ACTION, "one statement"),
        ("-- nothing", Status.DENIED, "only SELECT"),
        ("   ", Status.INVALID_ACTION, "empty"),
        ("SELECT ?", Status.INVALID_ACTION, "bindings"),
        ("SELECT hex(zeroblob(1000000000))", Status.INVALID_ACTION, "too big"),
        ("SELECT '" + "x" * 5000 + "'", Status.INVALID_ACTION, "at most 4000"),
        ("SELECT nowhere FROM orders", Status.INVALID_ACTION, "no such column"),
        ("SELECT '\ud800'", Status.INVALID_ACTION, "surrogates"),
        ("SELECT 'a\0'", Status.INVALID_ACTION, "null character"),
        (CHAIN + " SELECT * FROM c29", Status.INVALID_ACTION, "multiply out"),
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n", Status.TIMEOUT,
         "5,000,000 instructions"),
        ("SELECT a.x FROM (SELECT hex(zeroblob(20000)) x FROM orders a, orders b, orders c) a ORDER BY 1",
         Status.TIMEOUT, "stopped"),
    ],
)  # fmt: skip
def test_a_statement_can_read_and_nothing_else(reader, sql, status, said):
    with pytest.raises(Refused, match=said) as caught:
        reader.run(sql)
    assert caught.value.status is status
    assert reader._connection.serialize() == SHOP
    assert reader.run("SELECT 1").rows == [(1,)]  # and the next statement runs


def test_what_reads_is_answered(reader):
    for sql in (
        "SELECT name FROM sqlite_master ORDER BY 1", "VALUES (1), (2)", "SELECT date('2024-01-31', '+1 day')",
        "WITH a AS (SELECT id FROM orders), b AS (SELECT * FROM a) SELECT count(*) FROM b, a",
        "SELECT sum(quantity) OVER (PARTITION BY status) FROM orders",
    ):  # fmt: skip
        assert reader.run(sql).rows
    assert reader.run("SELECT 1 FROM orders o JOIN customers USING (id)").tables == {"orders", "customers"}


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60) | st.sampled_from(["SELECT ", "WITH x AS (", "DELETE FROM orders", "orders"]).flatmap(
    lambda head: st.text("abcs*(),'\"=<1 \0", max_size=30).map(lambda tail: head + tail)))  # fmt: skip
def test_any_text_is_answered_or_refused_and_changes_nothing(sql):
    with contextlib.closing(Reader(SHOP)) as opened:
        with contextlib.suppress(Refused):
            opened.run(sql)
        assert opened._connection.serialize() == SHOP


def test_bad_calls_are_answered_one_by_one_and_change_nothing(made):
    environment = made.make()
    assert isinstance(environment, Environment)
    environment.reset(made.tasks("train", 1, 0)[0], 0)
    before = environment.snapshot()
    wrong = [
        ToolCall(name="drop"), ToolCall(name="query"), ToolCall(name="query", arguments={"sql": 5}),
        ToolCall(name="schema", arguments={"name": "x"}), ToolCall(name="schema", arguments={"table": "no\ud800"}),
        ToolCall(name="answer", arguments={"sql": "", "sure": True}), ToolCall(name="answer", arguments={"sql": ""}),
    ]  # fmt: skip
    observation = environment.step(act(*wrong))
    assert len(observation.content) == len(wrong)
    assert all(message.content.startswith("error: ") for message in observation.content)
    for action in (*map(act, wrong), Action(text="hello"), Action(text="", error="unreadable")):
        assert environment.step(action).status is Status.INVALID_ACTION
    assert environment.snapshot() == before
    environment.close()
    with pytest.raises(RuntimeError, match="reset"):
        environment.step(act(query("SELECT 1")))


def test_results_are_cut_and_say_so(made):
    environment = suite(rows=5, characters=300).make()
    environment.reset(made.tasks("train", 1, 0)[0], 0)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 50)"
    many = environment.step(act(query(f"{numbers} SELECT i FROM n")))
    assert many.status is Status.TRUNCATED and "the first 5 rows; there are more" in many.content[0].content
    wide = environment.step(act(query(f"{numbers} SELECT i, hex(zeroblob(200)) FROM n")))
    assert wide.status is Status.TRUNCATED and len(wide.content[0].content) <= 300
    few = environment.step(act(query("SELECT NULL AS a, 1.5 AS b, x'ff' AS c, 'd\ne' AS d")))
    assert few.status is Status.OK and few.content[0].content == "a | b | c | d\nNULL | 1.5 | x'ff' | d\\ne\n(1 row)"
    environment.close()


def test_evidence_is_a_needed_table_seen_for_the_first_time(made):
    task = next(task for task in made.tasks("train", 12, 0) if len(task.data["tables"]) == 2)
    one, other = task.data["tables"]
    environment = made.make()
    environment.reset(task, 0)
    calls = [query(f"SELECT {i} FROM {one}") for i in (1, 2)]
    calls.append(ToolCall(name="schema", arguments={"table": other}))
    assert [environment.step(act(call)).evidence_gain for call in calls] == [0.5, 0.0, 0.5]
    environment.close()


def test_siblings_of_a_snapshot_go_their_own_ways_and_nothing_happens_after_the_end(made):
    task = made.tasks("train", 1, 0)[0]
    one, two, three = (made.make() for _ in range(3))
    one.reset(task, 0)
    one.step(act(query(f"SELECT * FROM {task.data['tables'][0]}")))
    fork = one.snapshot()
    two.restore(fork)
    three.restore(Snapshot(data=bytes(fork.data), hash=fork.hash))
    assert two.snapshot() == three.snapshot() == fork
    done = two.step(act(made.solve(task)[-1], query("SELECT 1")))
    assert done.terminated and done.status is Status.INVALID_ACTION
    assert done.content[1].content == "the task is over"
    over = two.snapshot()
    assert two.step(act(query("SELECT 1"))).terminated and two.snapshot() == over != fork
    assert three.snapshot() == one.snapshot() == fork
    for environment in (one, two, three):
        environment.close()
        environment.close()


def test_a_forged_final_state_is_a_broken_constraint(play, made):
    task = made.tasks("train", 1, 0)[0]
    played = play(made, task, made.solve(task))
    forged = made.verify(task, played.initial, played.actions[:1], played.final)
    assert [check.passed for check in forged.constraints] == [True, False] and not forged.success
    other = play(made, made.tasks("train", 1, 9)[0], [])
    swapped = made.verify(task, other.initial, played.actions, played.final)
    assert not swapped.constraints[0].passed and not swapped.success


def test_a_gold_query_that_does_not_run_is_unscored(play, made):
    task = made.tasks("train", 1, 0)[0]
    broken = type(task)(id="x", split="train", data={**task.data, "gold": "SELECT nothing FROM nowhere"})
    verdict = made.verify(broken, *(lambda p: (p.initial, p.actions, p.final))(play(made, task, made.solve(task))))
    assert verdict.outcome is None and not verdict.success
    constant = type(task)(id="x", split="train", data={**task.data, "gold": "SELECT 1"})
    assert made.verify(constant, *(lambda p: (p.initial, p.actions, p.final))(play(made, task, []))).outcome is None


@sets(CHINOOK)
@pytest.mark.parametrize("split", SPLITS)
def test_chinook(play, split):
    made = EnvironmentRef(target="agentrl_envs.sql:suite", options={"source": "chinook"}).load()
    (task,) = made.tasks(split, 1, 0)
    assert play(made, task, made.solve(task)).verdict.success
    for name in ("the result written down", "everything", "change the data"):
        assert not play(made, task, made.attacks(task)[name]).verdict.success


@sets(SPIDER)
@pytest.mark.parametrize("split", SPLITS)
def test_spider(play, split):
    made = suite(source="spider")
    tasks = made.tasks(split, 3, 0)
    assert len({task.id for task in tasks}) == 3
    for task in tasks:
        assert play(made, task, made.solve(task)).verdict.success, task
        assert not play(made, task, made.attacks(task)["the result written down"]).verdict.success
    with pytest.raises(ValueError, match="asked for, but there are"):
        made.tasks("validation", 10_000, 0)


@pytest.mark.slow
@sets(SPIDER, CHINOOK)
@pytest.mark.parametrize("source", ["spider", "chinook"])
def test_every_question_that_is_kept_is_solved_by_its_gold_query_alone(play, source):
    made, found = suite(source=source), []
    for split in SPLITS:
        with pytest.raises(ValueError) as caught:
            made.tasks(split, 10_000, 0)
        tasks = made.tasks(split, int(str(caught.value).split()[-1]), 0)
        for task in tasks:
            assert play(made, task, made.solve(task)).verdict.success, task
            assert not play(made, task, made.attacks(task)["the result written down"]).verdict.success, task
        found.append(tasks)
    names = [{task.data["question"] for task in tasks} for tasks in found]
    assert all(not one & other for one, other in itertools.combinations(names, 2))
    print(source, [len(tasks) for tasks in found])
