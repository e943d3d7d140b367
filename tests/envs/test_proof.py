"""The proof environment: what the policy sees, what counts as proved, and what does not."""

import dataclasses
import json

import pytest
from agentrl_envs import data
from agentrl_envs.proof import suite
from agentrl_envs.proof.tasks import SPLITS, problem_from, said, theorems
from agentrl_envs.sets.metamath import METAMATH

from agentrl_jax.protocol import Action, Snapshot, Status, ToolCall

CALCULUS = suite()


def apply(step, *uses, **values):
    return ToolCall(name="apply", arguments={"step": step, "uses": list(uses), "values": values})


SUBMIT = ToolCall(name="submit")


@pytest.fixture(scope="module")
def task():
    return next(task for task in CALCULUS.tasks("train", 40, 1) if task.kind == "infer" and len(task.data["proof"]) > 4)


def sources():
    return ["calculus", *(["hol", "ql"] if data.locate(METAMATH) else [])]


@pytest.mark.parametrize("source", sources())
def test_the_reference_succeeds_and_attacks_do_not(play, source):
    chosen = suite(source=source)
    for task in chosen.tasks("train", 4, 0):
        played = play(chosen, task, chosen.solve(task))
        assert played.verdict.success and played.verdict.quality == 1.0
        assert [seen.status for seen in played.observations] == [Status.OK] * len(played.observations)
        assert sum(seen.evidence_gain or 0 for seen in played.observations) == len(task.data["proof"])
        for name, script in chosen.attacks(task).items():
            assert not play(chosen, task, script).verdict.success, name
        assert not play(chosen, task, []).verdict.success


@pytest.mark.parametrize("source", sources())
def test_splits_share_nothing_up_to_names(source):
    chosen = suite(source=source)
    count = 40 if source == "calculus" else 7
    content = {split: {said(problem_from(t.data)) for t in chosen.tasks(split, count, 3)} for split in SPLITS}
    assert [len(found) for found in content.values()] == [count] * 3
    assert len(set.union(*content.values())) == 3 * count
    assert chosen.tasks("heldout", 5, 0) == chosen.tasks("heldout", 5, 0)
    assert chosen.tasks("heldout", 5, 0) != chosen.tasks("heldout", 5, 1)


def test_many_theorems_of_the_databases_are_tasks():
    if data.locate(METAMATH) is None:
        pytest.skip("the metamath set is not here: set AGENTRL_DATA")
    assert len(theorems("ql", 24)) > 800 and len(theorems("hol", 24)) > 100


def test_errors_say_what_to_do(task):
    environment = CALCULUS.make()
    opening = environment.reset(task, 0).content[0].content
    assert task.data["goal"] in opening and "chain: |- ( p -> q ) & |- ( q -> r ) => |- ( p -> r )" in opening
    for call, words in [
        (apply("nothing"), "nothing is called 'nothing' here"),
        (apply("detach"), "uses 2 facts, 0 are named"),
        (apply("detach", 1, 2), "there are no facts yet"),
        (apply("self"), "say what p stands for"),
        (apply("self", p="( p -> )"), "is not a wff"),
        (apply("self", p="0"), "is not a wff"),
        (apply("self", z="p"), "has no variable 'z'"),
        (apply("imp"), "builds expressions"),
        (apply("wp"), "is a hypothesis of a type"),
        (apply("self", p="p " * 900), "at most"),
    ]:
        seen = environment.step(Action(text="", calls=(call,)))
        assert seen.status is Status.DENIED and words in seen.content[0].content, seen
    wrong = ToolCall(name="apply", arguments={"step": "self", "values": {"p": 1}})
    assert environment.step(Action(text="", calls=(wrong,))).status is Status.INVALID_ACTION
    seen = environment.step(Action(text="", calls=(apply("self", p="~ q"), apply("weaken", p="q", q="r"))))
    assert [m.content for m in seen.content] == ["1: |- ( ~ q -> ~ q )", "2: |- ( q -> ( r -> q ) )"]
    found = environment.step(Action(text="", calls=(ToolCall(name="find", arguments={"text": "a + 0"}),)))
    assert found.content[0].content == "1 found, the latest 1:\nplus-zero: |- ( a + 0 ) = a"


def test_facts_can_be_taken_back_and_are_bounded(task):
    chosen = suite(facts=24)
    environment = chosen.make()
    environment.reset(task, 0)
    start = environment.snapshot().hash
    for _ in range(24):
        environment.step(Action(text="", calls=(apply("self", p="p"),)))
    assert environment.step(Action(text="", calls=(apply("self", p="p"),))).status is Status.DENIED
    environment.step(Action(text="", calls=(ToolCall(name="undo", arguments={"count": 99}),)))
    assert environment.snapshot().hash == start


def test_a_state_that_no_action_explains_is_a_violation(play, task):
    solved = play(CALCULUS, task, CALCULUS.solve(task))
    verdict = CALCULUS.verify(task, solved.initial, [], solved.final)
    assert verdict.outcome and verdict.violated and not verdict.success
    state = json.loads(solved.final.data)
    state["moves"] = state["moves"][:-1]
    forged = Snapshot(data=json.dumps(state).encode(), hash="")
    assert not CALCULUS.verify(task, solved.initial, solved.actions, forged).success


@pytest.mark.parametrize("value", [[1], {"a": {}}, 1, None])
def test_a_refused_step_of_any_form_is_judged(play, task, value):
    refused = ToolCall(name="apply", arguments={"step": "self", "values": {"p": value}})
    played = play(CALCULUS, task, [refused, *CALCULUS.solve(task)])
    assert played.observations[0].status is Status.INVALID_ACTION and played.verdict.success


def test_a_harder_theorem_does_not_follow_from_the_proof_of_another(play, task):
    other = dataclasses.replace(task, data={**task.data, "goal": "|- ( p -> ~ p )"})
    played = play(CALCULUS, task, CALCULUS.solve(task))
    assert not CALCULUS.verify(other, played.initial, played.actions, played.final).success


def test_siblings_of_one_snapshot_are_alone(task):
    moves = list(CALCULUS.solve(task))
    origin, one, two = (CALCULUS.make() for _ in range(3))
    origin.reset(task, 0)
    origin.step(Action(text="", calls=tuple(moves[:2])))
    kept = origin.snapshot()
    one.restore(kept)
    two.restore(kept)
    assert one.step(Action(text="", calls=tuple(moves[2:]))).terminated
    assert two.snapshot().hash == origin.snapshot().hash == kept.hash
    two.step(Action(text="", calls=tuple(moves[2:])))
    assert two.snapshot() == one.snapshot()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"source": "set"}, "expected one of calculus, hol, ql"),
        ({"kinds": ("hard",)}, "expected some of infer, evaluate"),
        ({"most_steps": 99}, "must be from 2 to facts=64"),
    ],
)
def test_unknown_options_name_the_known_ones(options, words):
    with pytest.raises(ValueError, match=words):
        suite(**options)


def test_unknown_splits_and_too_many_tasks_are_errors():
    with pytest.raises(ValueError, match="train, validation, heldout"):
        CALCULUS.tasks("test", 1, 0)
    with pytest.raises(ValueError, match="only"):
        suite(kinds=("evaluate",), most_steps=2).tasks("heldout", 60, 0)
