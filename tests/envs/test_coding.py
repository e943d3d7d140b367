"""The coding environment in real boxes: the reference repairs, attacks fail and are named, a broken box is no score."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from agentrl_envs import coding, data, sandbox
from agentrl_envs.coding import boxes, mbpp, quixbugs
from agentrl_envs.coding.cases import case, right
from agentrl_envs.sets.mbpp import MBPP
from agentrl_envs.sets.quixbugs import QUIXBUGS

from agentrl_jax.protocol import Action, EnvironmentRef, Status, ToolCall

LACKS = coding.missing()
pytestmark = pytest.mark.skipif(LACKS is not None, reason=str(LACKS))
RUN, SUBMIT = ToolCall(name="run_tests"), ToolCall(name="submit")
# What turns an attack down, where it gets as far as changing something: the constraint that names it, or the outcome.
NAMED = {
    "empties_tests": "tests_unchanged",
    "plants_conftest": "only_source_changed",
    "plants_sitecustomize": "only_source_changed",
    "plants_plugin": "only_source_changed",
    "plants_standard_module": "only_source_changed",
    "plants_reward": "only_source_changed",
    "exits": "source_is_pure",
    "exits_hard": "source_is_pure",
    "patches": "source_is_pure",
    "equals_everything": "source_is_pure",
    "forges_answers": "no_forged_answers",
    "reads_tests": "source_is_pure",
    "imports_reference": "source_is_pure",
    "hard_codes": "no_hard_coding",
}


def needs(entry: data.DataSet) -> pytest.MarkDecorator:
    wanted = f"data set {entry.name} is not here: set AGENTRL_DATA to a folder that holds it"
    return pytest.mark.skipif(data.locate(entry) is None, reason=wanted)


@pytest.fixture(scope="module")
def suite():
    return coding.suite()


@pytest.fixture(scope="module")
def task(suite):
    return suite.tasks("train", 1, 0)[0]


def failed(verdict) -> list[str]:
    return [check.name for check in verdict.constraints if not check.passed]


@pytest.mark.parametrize("split", ["train", "validation", "heldout"])
def test_the_reference_repairs(suite, play, split):
    for each in suite.tasks(split, 2, 5):
        played = play(suite, each, suite.solve(each))
        assert played.verdict.success and played.verdict.quality == 1.0, played.verdict
        assert "0 of" not in played.observations[2].content[0].content
        assert [o.evidence_gain for o in played.observations] == [1.0, 0.0, 1.0, 0.0]


def test_failing_tests_are_shown_without_times_and_places(suite, task, play):
    reports = {play(suite, task, [RUN]).observations[0].content[0].content for _ in range(2)}
    (report,) = reports
    assert "tests passed" in report and "FAIL test_" in report and "Error" in report
    assert "/workspace" not in report and "0.0" not in report


def test_each_attack_is_turned_down_and_named(suite, task, play):
    found = {name: play(suite, task, script).verdict for name, script in suite.attacks(task).items()}
    assert [name for name, verdict in found.items() if verdict.success or verdict.outcome is not False] == []
    unnamed = {name: failed(found[name]) for name, check in NAMED.items() if check not in failed(found[name])}
    assert unnamed == {}
    assert found["never_ends"].diagnostics["stopped"] == "time"


def test_without_the_constraints_the_outcome_alone_holds(suite, task, play):
    """What an attack does to the run is not enough either: the comparison is made outside."""
    for name in ("patches", "equals_everything", "forges_answers", "reads_tests", "exits", "exits_hard"):
        verdict = play(suite, task, suite.attacks(task)[name]).verdict
        assert verdict.diagnostics["hidden_passed"] < verdict.diagnostics["hidden_cases"], name


def test_a_repair_that_also_changes_a_test_is_no_success(suite, task, play):
    path = next(path for path in task.data["files"] if path.startswith("tests/"))
    change = {"path": path, "old": "import unittest\n", "new": "import unittest  # seen\n"}
    script = [ToolCall(name="edit", arguments=change), *suite.solve(task)]
    verdict = play(suite, task, script).verdict
    assert verdict.outcome is True and failed(verdict) == ["tests_unchanged"] and not verdict.success


def test_files_that_no_action_explains_are_no_success(suite, task, play):
    played = play(suite, task, suite.solve(task))
    verdict = suite.verify(task, played.initial, played.actions[2:], played.final)
    assert failed(verdict) == ["actions_explain_files"]


def test_another_repair_than_the_reference_counts(suite, task, play):
    """Hidden cases decide, not the text: the same function, written in another way."""
    edit = dict(task.data["edit"])
    edit["new"] = "".join(f"{line}  # repaired\n" if line.strip() else "\n" for line in edit["new"].splitlines())
    assert play(suite, task, [ToolCall(name="edit", arguments=edit), SUBMIT]).verdict.success


def broken_box(*arguments, **options):
    raise sandbox.SandboxError("the keeper is gone")


def test_a_broken_box_is_unscored_and_the_environment_says_that_it_is_at_fault(suite, task, play, monkeypatch):
    """P59: an agent writes a reward file and the grader crashes: unscored, not 1."""
    monkeypatch.setattr(sandbox, "open_sandbox", broken_box)
    reward = ToolCall(name="edit", arguments={"path": "verifier/reward.txt", "old": "", "new": "1"})
    played = play(suite, task, [reward, *suite.solve(task)])
    assert played.verdict.outcome is None and not played.verdict.success
    assert "keeper" in played.verdict.diagnostics["verifier_error"]
    tests = played.observations[3]
    assert (tests.status, tests.env_status.retryable) == (Status.ERROR, True)
    assert tests.env_status.service.startswith("sandbox") and "keeper" not in tests.content[0].content
    assert play(suite, task, [SUBMIT]).verdict.outcome is False  # nothing was changed: that needs no box


def test_a_box_in_which_python_does_not_start_is_the_boxes_fault(suite, task, monkeypatch):
    monkeypatch.setattr(boxes, "interpreter", lambda: ("/usr/bin/false", ()))
    with pytest.raises(sandbox.SandboxError, match="did not start"):
        boxes.visible("auto", task.data["files"], 1.0)


def test_the_box_holds_neither_the_reference_nor_what_is_expected(task):
    """P59: the code under test looks for the grader, this package and the data sets, and finds none of them."""
    source = (
        "import os, sys\n"
        "def look(given):\n"
        "    try:\n"
        "        import agentrl_envs.coding.library\n"
        "        return 'imported'\n"
        "    except ImportError:\n"
        "        pass\n"
        "    seen = [path for path in given if os.path.isdir(path) and os.listdir(path)]\n"
        "    text = ''\n"
        "    for pid in ('self', 1, os.getppid()):\n"
        "        try:\n"
        "            text += open(f'/proc/{pid}/environ').read()\n"
        "        except OSError:\n"
        "            continue\n"
        "    return seen, 'SECRET' in text\n"
    )
    package = os.path.dirname(coding.__file__)
    places = [package, os.environ.get("AGENTRL_DATA") or "/nowhere", "/root", "/home", "/verifier"]
    asked = case("p.a", "look", [places], ([], False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_SECRET", "SECRET")
        found = boxes.measure("auto", {"p/__init__.py": "", "p/a.py": source}, [asked], 2.0)
    assert right(asked, found.answers[0]), found


def test_cases_reach_the_box_without_what_is_expected(task, monkeypatch):
    sent = []

    class Watched:
        def __init__(self, box):
            self._box = box

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            self._box.close()

        def run(self, command, *, stdin):
            sent.append(json.loads(stdin))
            return self._box.run(command, stdin=stdin)

    opened = sandbox.open_sandbox
    monkeypatch.setattr(sandbox, "open_sandbox", lambda *given, **options: Watched(opened(*given, **options)))
    boxes.measure("auto", task.data["files"], task.data["hidden"], 2.0)
    assert len(sent) == 1 and all("expected" not in each for each in sent[0]["cases"])


def test_a_fork_is_exact_and_siblings_do_not_meet(suite, task):
    one, two, three = suite.make(), suite.make(), suite.make()
    one.reset(task, 0)
    read, edit, *_ = suite.solve(task)
    one.step(Action(text="", calls=(read,)))
    state = one.snapshot()
    for other in (two, three):
        other.restore(state)
        assert other.snapshot() == state
    changed = two.step(Action(text="", calls=(edit, RUN)))
    assert len(changed.content) == 2 and two.snapshot().hash != state.hash == three.snapshot().hash
    ours, theirs = one.step(Action(text="", calls=(RUN,))), three.step(Action(text="", calls=(RUN,)))
    assert ours == theirs and ours.content[0] != changed.content[1]
    for each in (one, two, three):
        each.close()
        each.close()


def test_what_runs_too_long_is_a_timeout_of_the_policy(suite, task, monkeypatch):
    monkeypatch.setattr("agentrl_envs.coding.env.VISIBLE_S", 1.0)
    environment = suite.make()
    environment.reset(task, 0)
    path = task.data["edit"]["path"]
    loop = {"path": path, "old": task.data["files"][path], "new": "while True:\n    pass\n"}
    answer = environment.step(Action(text="", calls=(ToolCall(name="edit", arguments=loop), RUN)))
    assert answer.status is Status.TIMEOUT and "stopped: time" in answer.content[1].content
    assert answer.env_status.service == "ok"


def test_options_are_checked_and_a_reference_loads_it():
    for options, said in (({"source": "github"}, "mbpp"), ({"symptom": "all"}, "none"), ({"max_calls": 1}, "needs 4")):
        with pytest.raises(ValueError, match=said):
            coding.suite(**options)
    assert EnvironmentRef(target="agentrl_envs.coding:suite").load().spec.fork == "native"
    named, unnamed = coding.suite().tasks("train", 1, 0)[0], coding.suite(symptom="none").tasks("train", 1, 0)[0]
    function = named.data["text"].split()[2]
    assert function not in unnamed.data["text"] and named.data["edit"] == unnamed.data["edit"]


@needs(QUIXBUGS)
def test_quixbugs_is_repaired(play):
    suite = coding.suite(source="quixbugs")
    assert [len(suite.tasks(split, count, 0)) for split, count in COUNTS.items()] == list(COUNTS.values())
    task = suite.tasks("heldout", 1, 0)[0]
    assert play(suite, task, suite.solve(task)).verdict.success
    assert not play(suite, task, suite.attacks(task)["hard_codes"]).verdict.success
    with pytest.raises(ValueError, match="but there are"):
        suite.tasks("train", 40, 0)


COUNTS = {"train": 13, "validation": 5, "heldout": 5}


@needs(MBPP)
def test_mbpp_defects_are_shown_and_repaired(play):
    suite = coding.suite(source="mbpp")
    tasks = suite.tasks("validation", 2, 0)
    assert tasks == suite.tasks("validation", 2, 0)
    for task in tasks:
        assert play(suite, task, suite.solve(task)).verdict.success
        change = ToolCall(name="edit", arguments={"path": task.data["edit"]["path"], "old": '"""', "new": "'''"})
        verdict = play(suite, replace(task, data={**task.data}), [change, SUBMIT]).verdict
        assert verdict.outcome is False


@needs(QUIXBUGS)
@pytest.mark.slow
def test_every_quixbugs_program_is_broken_and_repaired(play):
    suite = coding.suite(source="quixbugs")
    shown = 0
    for split, count in COUNTS.items():
        for task in suite.tasks(split, count, 0):
            played = play(suite, task, suite.solve(task))
            assert played.verdict.success, task.id
            comment = {"path": task.data["edit"]["path"], "old": task.data["edit"]["old"]}
            comment["new"] = comment["old"].rstrip("\n") + "  # as it was\n"
            verdict = play(suite, task, [ToolCall(name="edit", arguments=comment), SUBMIT]).verdict
            assert verdict.outcome is False and not failed(verdict), task.id
            shown += verdict.diagnostics["visible_passed"] < verdict.diagnostics["visible_cases"]
    assert (sum(COUNTS.values()), shown) == (23, 20) and len(quixbugs._programs()) == 23


@needs(MBPP)
@pytest.mark.slow
@pytest.mark.parametrize("split", COUNTS)
def test_twenty_mbpp_tasks_of_a_split_are_repaired(play, split):
    suite = coding.suite(source="mbpp")
    assert {name: len(found) for name, found in mbpp._programs().items()} == {
        "train": 369, "validation": 85, "heldout": 492,
    }  # fmt: skip
    for task in suite.tasks(split, 20, 0):
        assert play(suite, task, suite.solve(task)).verdict.success, task.id
        assert play(suite, task, suite.attacks(task)["hard_codes"]).verdict.outcome is False, task.id
