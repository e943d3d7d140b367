"""The retail data set as an environment; skipped where the data set is absent."""

from __future__ import annotations

import itertools
import json

import pytest
from agentrl_envs import data, retail
from agentrl_envs.sets.retail import RETAIL

from agentrl_jax.protocol import Action, Environment, Status, ToolCall

needs_data = pytest.mark.skipif(
    data.locate(RETAIL) is None, reason="data set 'retail' is absent: set AGENTRL_DATA to the folder that holds it"
)
SIZES = {"train": 495, "validation": 19, "heldout": 107}


@pytest.fixture(scope="module")
def made():
    return retail.suite()


@needs_data
@pytest.mark.parametrize("split", SIZES)
def test_the_annotated_actions_get_full_marks(play, made, split):
    for task in made.tasks(split, SIZES[split], 0):
        verdict = play(made, task, made.solve(task)).verdict
        assert verdict.success and verdict.quality == 1.0, (task.id, verdict)


@needs_data
@pytest.mark.parametrize("split", SIZES)
def test_null_agents_solve_nothing(play, made, split):
    for task in made.tasks(split, SIZES[split], 0):
        assert not play(made, task, []).verdict.success
        idle = play(made, task, [ToolCall(name="finish")]).verdict
        assert not idle.success and not idle.violated


@needs_data
def test_what_is_left_out_asks_for_nothing_or_is_there_twice(play, made):
    rows = {row["id"]: (row, split) for split, file in retail.FILES.items() for row in retail._files()[file]}
    asked = {row["instruction"] for name, (row, _) in rows.items() if name not in retail.LEFT_OUT}
    for name in sorted(retail.LEFT_OUT):
        task = retail._task(*rows[name])
        idle = play(made, task, [ToolCall(name="finish")]).verdict
        assert idle.success or task.data["instruction"] in asked


@needs_data
def test_an_answer_names_its_outputs_as_whole_words_and_lists_no_candidates(play, made):
    task = next(t for t in made.tasks("train", 495, 0) + made.tasks("heldout", 107, 0) if "10" in t.data["outputs"])
    rest = made.solve(task)[:-1]
    right = ", ".join(task.data["outputs"])
    for answer, success in (
        (f"There are {right}.", True), (right.replace("10", "110"), False), (right.replace("10", "10.5"), False),
        (f"{right} {' '.join(map(str, range(99)))}", False), (f"{right} {'x' * 1000}", False),
    ):  # fmt: skip
        finish = ToolCall(name="finish", arguments={"answer": answer})
        assert play(made, task, [*rest, finish]).verdict.success is success, answer


@needs_data
def test_an_undeclared_change_and_a_denied_write_violate(play, made):
    tasks = made.tasks("train", 495, 0)
    task = next(t for t in tasks if [a["name"] for a in t.data["actions"]] == ["cancel_pending_order"])
    cancel, finish = made.solve(task)
    home = dict.fromkeys(("address1", "address2", "city", "country", "state", "zip"), "x")
    move = ToolCall(name="modify_user_address", arguments={"user_id": task.data["user_id"], **home})
    moved = play(made, task, [cancel, move, finish]).verdict
    assert [check.passed for check in moved.constraints] == [True, False]
    twice = play(made, task, [cancel, cancel, finish])
    assert twice.observations[1].status is Status.DENIED
    assert [check.passed for check in twice.verdict.constraints] == [False, True]
    assert twice.verdict.outcome is True and not twice.verdict.success


@needs_data
def test_a_tenant_holds_only_the_rows_of_the_user_concerned(made):
    environment = made.make()
    assert isinstance(environment, Environment)
    for task in made.tasks("train", 50, 1):
        environment.reset(task, 0)
        state = json.loads(environment.snapshot().data)
        assert set(state["users"]) == {task.data["user_id"]}
        assert {order["user_id"] for order in state["orders"].values()} == {task.data["user_id"]}


@needs_data
def test_half_a_character_is_answered_with_text_that_a_tokenizer_reads(made):
    environment = made.make()
    environment.reset(made.tasks("train", 1, 0)[0], 0)
    seen = environment.step(Action(text="", calls=(ToolCall(name="\ud800"),)))
    assert seen.status is Status.INVALID_ACTION and seen.content[0].content.encode()


@needs_data
def test_bad_calls_are_answered_and_change_nothing(made):
    environment = made.make()
    task = made.tasks("train", 1, 0)[0]
    environment.reset(task, 0)
    before = environment.snapshot()
    wrong = [
        ToolCall(name="drop"),
        ToolCall(name="cancel_pending_order", arguments={"order_id": "#W0", "reason": "no longer needed"}),
        ToolCall(name="cancel_pending_order", arguments={"order_id": 5, "reason": "no longer needed"}),
        ToolCall(name="calculate", arguments={"expression": "9**9**9"}),
        ToolCall(name="calculate", arguments={"expression": "__import__('os')"}),
        ToolCall(name="calculate", arguments={"expression": "1/0"}),
        ToolCall(name="calculate", arguments={"expression": "(2"}),
        ToolCall(name="get_user_details", arguments={"user_id": ["x"]}),
    ]
    for call in wrong:
        assert environment.step(Action(text="", calls=(call,))).status is Status.INVALID_ACTION, call
    assert environment.step(Action(text="hello")).status is Status.INVALID_ACTION
    assert environment.snapshot() == before
    sums = ToolCall(name="calculate", arguments={"expression": "(3131.1 + 4777.75) * 2 - .5"})
    assert environment.step(Action(text="", calls=(sums,))).content[0].content == "15817.20"


@needs_data
def test_splits_are_disjoint_and_lists_are_seeded(made):
    ids = {split: {t.id for t in made.tasks(split, size, 0)} for split, size in SIZES.items()}
    assert all(not ids[a] & ids[b] for a, b in itertools.combinations(ids, 2))
    assert made.tasks("train", 10, 3) == made.tasks("train", 10, 3) != made.tasks("train", 10, 4)
    with pytest.raises(ValueError, match="there are 19"):
        made.tasks("validation", 20, 0)


def test_a_missing_data_set_is_an_error_that_names_the_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def offline(url):
        raise OSError("no route")

    with pytest.raises(data.DataError, match="set AGENTRL_DATA to a folder that holds retail/"):
        data._download(RETAIL, offline)
    assert not list((tmp_path / "agentrl" / "data").iterdir())


def test_a_download_that_is_not_what_it_should_be_is_refused(monkeypatch, tmp_path):
    monkeypatch.delenv("AGENTRL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(data.DataError, match=r"users.json.gz is not the file of sierra-research/tau-bench"):
        data._download(RETAIL, lambda url: b"{}")
    assert data.locate(RETAIL) is None


@needs_data
def test_a_download_in_the_form_of_the_origin_ends_up_in_the_cache(monkeypatch, tmp_path):
    files = data.load(RETAIL)
    monkeypatch.delenv("AGENTRL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = RETAIL

    def origin(url):
        name = next(name for name in files if entry.url(name) == url)
        if ".jsonl" not in name:
            return (files[name] if name == "policy.md" else json.dumps(files[name], indent=4)).encode()
        return python_source(files[name]).encode()

    data._download(entry, origin)
    assert data.locate(RETAIL) == tmp_path / "agentrl" / "data" / "retail"
    assert data.load(RETAIL) == files


def python_source(tasks):
    """Tasks as the origin writes them: a list of calls in Python."""
    lines = ["TASKS = ["]
    for task in tasks:
        actions = ", ".join(f"Action(name={a['name']!r}, kwargs={a['kwargs']!r})" for a in task["actions"])
        rest = ", ".join(f"{key}={value!r}" for key, value in task.items() if key not in ("id", "actions"))
        lines.append(f"    Task({rest}, actions=[{actions}]),")
    return "\n".join([*lines, "]"])
