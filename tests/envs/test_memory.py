"""The memory environment: the stream, the store, what is answered long after it was said."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from agentrl_envs.memory import suite
from agentrl_envs.memory.machine import NOTE
from agentrl_envs.memory.solve import NOOP, add, answer
from agentrl_envs.memory.stream import UNKNOWN, current
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, Environment, EnvironmentRef, Status, ToolCall
from agentrl_jax.rollout.budgets import Meter

SPLITS = ("train", "validation", "heldout")
MADE = suite()
TASK = MADE.tasks("train", 1, 0)[0]


def act(*calls):
    return Action(text="", calls=calls)


def names(verdict):
    return [check.name for check in verdict.constraints if not check.passed]


@pytest.mark.parametrize("split", SPLITS)
def test_the_reference_gets_full_marks_within_the_budget(play, split):
    for task in MADE.tasks(split, 5, 0):
        turns = MADE.solve(task)
        verdict = play(MADE, task, turns).verdict
        assert verdict.success and verdict.quality == 1.0 and verdict.outcome == 1.0, verdict
        assert len(turns) <= MADE.spec.budget.steps
        assert sum(turn.name in ("add", "update", "delete") for turn in turns) <= MADE.spec.budget.write_actions


@pytest.mark.parametrize("name", MADE.attacks(TASK))
def test_no_attack_succeeds(play, name):
    for split in SPLITS:
        task = MADE.tasks(split, 1, 3)[0]
        assert not play(MADE, task, MADE.attacks(task)[name]).verdict.success


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("keep the old beside the new", ["no_stale_fact"]),
        ("ignore corrections", ["no_stale_fact"]),
        ("ignore requests to forget", ["no_private_fact"]),
        ("keep secrets", ["no_private_fact"]),
    ],
)
def test_stale_and_private_notes_break_a_constraint(play, name, broken):
    assert names(play(MADE, TASK, MADE.attacks(TASK)[name]).verdict) == broken


def test_neither_guessing_nor_silence_scores(play):
    silent = play(MADE, TASK, MADE.attacks(TASK)["never answer"]).verdict
    assert silent.outcome == 0 and silent.diagnostics["right_unknown"] == silent.diagnostics["unknown"]
    sure = [a if a.arguments.get("text") != UNKNOWN else answer("Rex", 1) for a in MADE.solve(TASK)]
    guessing = play(MADE, TASK, sure).verdict
    assert guessing.outcome == 0 and guessing.diagnostics["right_known"] == guessing.diagnostics["known"]


def test_an_answer_counts_only_with_the_note_that_holds_it(play):
    turns = list(MADE.solve(TASK))
    place = next(i for i, t in enumerate(turns) if t.name == "answer" and t.arguments["note"])
    for number in (0, 99, turns[place].arguments["note"] + 1):
        turns[place] = answer(turns[place].arguments["text"], number)
        assert play(MADE, TASK, turns).verdict.outcome < 1


def test_questions_come_long_after_what_they_are_about_and_have_the_current_answer():
    for task in MADE.tasks("train", 10, 1):
        data = task.data
        known = current(data["events"])
        kinds = set()
        for question in data["questions"]:
            key = (question["person"], question["attribute"])
            assert question["answer"] == known.get(key, UNKNOWN)
            told = [e for e in data["events"] if (e["person"], e["attribute"]) == key]
            kinds.add(told[-1]["kind"] if told else "never")
            assert not told or len(data["lines"]) - told[0]["turn"] >= 96
        assert {"tell", "change", "forget", "secret", "never"} <= kinds
        assert max(len(data["lines"]) - e["turn"] for e in data["events"]) > 200
        values = [e["value"] for e in data["events"] if e["value"]]
        assert len(values) == len(set(values))


def test_a_window_shows_the_store_and_nothing_of_earlier_turns():
    environment = MADE.make()
    assert isinstance(environment, Environment)
    opening = environment.reset(TASK, 0)
    lines = TASK.data["lines"]
    assert lines[0] in opening.content[1].content and str(len(lines)) in opening.content[1].content
    told = environment.step(act(add("Ana likes tea"), NOOP)).content[1].content
    assert "1: Ana likes tea" in told and "turns 33 to 64" in told
    assert [line in told.splitlines() for line in lines[32:64]] == [True] * 32
    assert len(told.splitlines()) == 2 + 2 + 32
    answers = " ".join(q["answer"] for q in TASK.data["questions"])
    assert "question" not in told and answers not in told
    environment.close()


def test_splits_share_no_person_and_tasks_are_distinct():
    people = []
    for split in SPLITS:
        tasks = MADE.tasks(split, 20, 0)
        assert len({task.id for task in tasks}) == len({str(task.data["lines"]) for task in tasks}) == 20
        people.append({e["person"] for task in tasks for e in task.data["events"]})
        assert tasks == MADE.tasks(split, 20, 0) != MADE.tasks(split, 20, 1)
    assert all(not one & other for one, other in itertools.combinations(people, 2))
    with pytest.raises(ValueError, match="heldout"):
        MADE.tasks("test", 1, 0)


@pytest.mark.parametrize(
    ("option", "value"), [("turns", 10), ("chunk", 0), ("facts", 30), ("changes", 0), ("forgets", 9)]
)
def test_options_that_do_not_fit_are_an_error(option, value):
    with pytest.raises(ValueError, match=f"memory: .*{option}={value}"):
        suite(**{option: value})


def test_a_long_dialogue(play):
    made = EnvironmentRef(target="agentrl_envs.memory:suite", options={"turns": 1500, "chunk": 50, "facts": 16}).load()
    task = made.tasks("heldout", 1, 0)[0]
    assert len(task.data["lines"]) == 1500
    assert play(made, task, made.solve(task)).verdict.success


def test_bad_calls_are_answered_and_change_nothing():
    environment = MADE.make()
    environment.reset(TASK, 0)
    environment.step(act(add("Ana pet Rex")))
    before = environment.snapshot()
    wrong = [
        ToolCall(name="add"), ToolCall(name="add", arguments={"text": 5}), add(""), add("\ud800"),
        ToolCall(name="recall"),
        add("x" * (NOTE + 1)), ToolCall(name="update", arguments={"note": 1}), answer("Rex", 1),
        ToolCall(name="update", arguments={"note": 7, "text": "x"}), ToolCall(name="delete", arguments={"note": True}),
        ToolCall(name="delete", arguments={"note": 10**30}), ToolCall(name="noop", arguments={"force": True}),
    ]  # fmt: skip
    observation = environment.step(act(*wrong))
    assert len(observation.content) == len(wrong) and observation.status is Status.INVALID_ACTION
    assert all(m.content.startswith("error: ") and len(m.content) < 120 for m in observation.content)
    for action in (Action(text="hello"), Action(text="", error="unreadable")):
        assert environment.step(action).status is Status.INVALID_ACTION
    assert environment.snapshot() == before
    environment.close()
    with pytest.raises(RuntimeError, match="reset"):
        environment.snapshot()


@pytest.mark.parametrize("chunk", [1, 32])
def test_the_reserve_is_what_the_end_takes(chunk):
    """Whoever writes until writing is refused can still read to the end and answer; the reference is never refused."""
    made = suite(turns=120, chunk=chunk)
    task = made.tasks("train", 1, 2)[0]
    meter = Meter(made.spec.budget, made.spec.tools)
    for turn in made.solve(task):
        assert meter.admit(act(turn)) is None
        meter.perform(act(turn))
    meter = Meter(replace(made.spec.budget, write_actions=10_000), made.spec.tools)
    environment = made.make()
    environment.reset(task, 0)
    while meter.admit(act(add("x"))) is None:
        meter.perform(act(add("x")))
    left = [NOOP] * -(-120 // chunk) + [answer(UNKNOWN, 0)] * len(task.data["questions"])
    for turn in left:
        assert meter.admit(act(turn)) is None
        meter.perform(act(turn))
        over = environment.step(act(turn)).terminated
    assert over and meter.budget.steps - meter.ledger().steps == 0


def test_the_storage_budget_denies_and_the_store_closes_with_the_dialogue():
    environment = MADE.make()
    environment.reset(TASK, 0)
    filled = [environment.step(act(add(f"{i} " + "x" * 80))).status for i in range(8)]
    assert filled[:5] == [Status.OK] * 5 and filled[-1] is Status.DENIED
    assert environment.step(act(ToolCall(name="update", arguments={"note": 1, "text": "short"}))).status is Status.OK
    for _ in range(10):
        assert environment.step(act(NOOP)).status is Status.OK
    late = environment.step(act(add("late"), NOOP))
    assert late.status is Status.INVALID_ACTION and "closed" in late.content[0].content
    environment.close()


def test_evidence_is_a_wanted_value_written_down():
    environment = MADE.make()
    environment.reset(TASK, 0)
    value = next(q["answer"] for q in TASK.data["questions"] if q["answer"] != UNKNOWN)
    gains = [environment.step(act(add(text))).evidence_gain for text in ("nothing", f"x {value}", f"again {value}")]
    assert gains[0] == gains[2] == 0 < gains[1] < 1
    environment.close()


def test_nothing_happens_after_the_end(play):
    environment = MADE.make()
    environment.reset(TASK, 0)
    *_, last = [environment.step(act(turn)) for turn in MADE.solve(TASK)]
    assert last.terminated and last.content[0].content == "the end"
    over = environment.snapshot()
    after = environment.step(act(NOOP))
    assert after.terminated and after.status is Status.INVALID_ACTION and environment.snapshot() == over
    environment.close()


OPERATIONS = st.one_of(
    st.just(NOOP),
    st.sampled_from(TASK.data["lines"][:40]).map(add),
    st.builds(
        lambda n, t: ToolCall(name="update", arguments={"note": n, "text": t}), st.integers(0, 5), st.text(max_size=9)
    ),
    st.builds(lambda n: ToolCall(name="delete", arguments={"note": n}), st.integers(0, 5)),
    st.builds(answer, st.text(max_size=5), st.integers(-1, 5)),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(OPERATIONS, max_size=30), st.integers(0, 30))
def test_any_operations_leave_a_state_that_they_explain_and_that_restores(turns, cut):
    """A random agent: never an exception, never success; a fork at any place goes on alike."""
    one, two, three = (MADE.make() for _ in range(3))
    one.reset(TASK, 0)
    initial, actions = one.snapshot(), []
    for i, turn in enumerate(turns):
        if i == cut:
            two.restore(one.snapshot())
            three.restore(one.snapshot())
            three.step(act(NOOP, add("a sibling")))
        actions.append(act(turn))
        seen = one.step(actions[-1])
        if i >= cut:
            assert two.step(actions[-1]) == seen and two.snapshot() == one.snapshot()
    verdict = MADE.verify(TASK, initial, actions, one.snapshot())
    assert not verdict.success and verdict.constraints[3].passed and verdict.constraints[2].passed


def test_a_forged_final_state_is_not_explained(play):
    played = play(MADE, TASK, MADE.solve(TASK))
    assert names(MADE.verify(TASK, played.initial, played.actions[:-1], played.final)) == ["actions_explain"]
    idle = play(MADE, TASK, [])
    assert names(MADE.verify(TASK, idle.initial, [], played.final)) == ["actions_explain"]


def test_a_random_agent_does_not_succeed(play):
    rng = random.Random(0)
    for task in MADE.tasks("train", 3, 5):
        words = " ".join(task.data["lines"]).split()
        turns = [rng.choice((NOOP, add(" ".join(rng.sample(words, 4))))) for _ in range(40)]
        turns += [answer(rng.choice(words).strip("."), rng.randrange(6)) for _ in range(10)]
        assert not play(MADE, task, turns).verdict.success
