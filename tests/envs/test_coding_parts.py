"""The coding environment's pure parts: defects, cases, tasks, the workspace, the review of what was written."""

from __future__ import annotations

import ast
import importlib
import re

import pytest
from agentrl_envs.coding import attacks, generated, review, workspace
from agentrl_envs.coding.cases import case, from_assert, right
from agentrl_envs.coding.cases import test_file as written_tests
from agentrl_envs.coding.inbox import Opaque, decode, encode, try_out
from agentrl_envs.coding.mutate import undo
from agentrl_envs.coding.packages import SPLITS, split_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Status

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.tuples(st.integers(), st.integers()), inner, max_size=3)
        | st.frozensets(st.integers() | st.text(max_size=2), max_size=3)
    ),
    max_leaves=6,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("tsdifcbo"), inner, max_size=2),
    max_leaves=5,
)
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LINES = st.lists(st.sampled_from(("a\n", "b\n", "    c\n", "\n")), min_size=1, max_size=8).map("".join)


@FEW
@given(PLAIN)
def test_a_value_survives_its_encoding(value):
    back = decode(encode(value))
    assert back == value
    assert isinstance(value, frozenset) or type(back) is type(value)


def test_what_is_no_plain_data_equals_nothing():
    class Yes:
        def __eq__(self, other):
            return True

    class Zero(int):
        def __eq__(self, other):
            return True

    assert isinstance(decode(encode(Yes())), Opaque)
    assert decode(encode(Yes())) != decode(encode(Yes()))
    assert encode(Zero()) == 0  # the number it is, not what it claims to equal
    deep = []
    for _ in range(200):
        deep = [deep]
    assert "too large" in str(encode(deep))


@FEW
@given(JSON)
def test_whatever_comes_out_of_a_box_is_right_or_wrong_and_never_an_exception(answer):
    wanted = case("m", "f", [1], (3, "x"))
    assert right(wanted, {"value": answer}) in (True, False)
    assert right(wanted, answer) is False
    assert right({**wanted, "tolerance": 0.1}, {"value": answer}) in (True, False)


def test_right_compares_as_the_tests_do():
    assert right(case("m", "f", [], [1, 2.0]), {"value": encode([1.0, 2])})
    assert not right(case("m", "f", [], [1]), {"value": encode((1,))})
    assert right(case("m", "f", [], [[1, 2]], loose=True), {"value": encode([(1, 2)])})
    assert right(case("m", "f", [], 1.5, tolerance=0.1), {"value": encode(1.55)})
    assert not right(case("m", "f", [], 1.5, tolerance=0.1), {"value": encode("1.5")})


def test_asserts_become_cases_where_they_are_data():
    assert from_assert("assert f([1, 2], 'a') == {3}", "m") == case("m", "f", [[1, 2], "a"], {3})
    for text in ("assert f(x) == 1", "assert f(1) < 2", "assert not f(1)", "assert f(a=1) == 2", "f(1)", "assert ("):
        assert from_assert(text, "m") is None, text


def test_the_visible_tests_are_python_and_ask_what_the_cases_say():
    cases = [case("p.m", "f", [1, "a"], (2, 3)), case("p.m", "g", [[0]], [1], collect=True)]
    cases.append(case("p.m", "h", [2], 1.5, tolerance=0.5))
    text = written_tests("m", cases)
    ast.parse(text)
    assert "from p.m import f, g, h" in text
    for line in ("assertEqual(f(1, 'a'), (2, 3))", "assertEqual(list(g([0])), [1])", "h(2), 1.5, delta=0.5"):
        assert line in text


def test_every_defect_compiles_changes_one_function_and_can_be_undone():
    assert len(generated._defects()) > 300
    for module, mutation in generated._defects()[::7]:
        source = generated._source(module)
        broken = mutation.apply(source)
        before, after = ast.parse(source).body, ast.parse(broken).body
        differing = [one.name for one, other in zip(before, after, strict=True) if ast.dump(one) != ast.dump(other)]
        assert differing == [mutation.function], (module, mutation)
        old, new = undo(source, broken)
        assert broken.count(old) == 1 and broken.replace(old, new) == source


@FEW
@given(LINES, LINES)
def test_undo_finds_the_edit_between_any_two_texts(fixed, broken):
    if fixed != broken:
        old, new = undo(fixed, broken)
        assert broken.count(old) == 1 and broken.replace(old, new) == fixed


def test_programs_that_never_end_are_stopped_at_the_same_line_everywhere():
    source = "def f(n):\n    while n:\n        n += 1\n    return n\n"
    asked = [case("m", "f", [1], 0), case("m", "f", [0], 0)]
    assert try_out(source, asked, 1_000) == [{"error": "OutOfSteps"}, {"value": 0}]
    assert try_out("import sys\nsys.exit(0)\n", asked[:1], 1_000) == [{"error": "SystemExit"}]


@pytest.fixture(scope="module")
def drawn():
    return {split: generated.tasks("function", split, 12, 0) for split in SPLITS}


def test_tasks_are_distinct_and_their_defects_belong_to_one_split(drawn):
    ids = [task.id for tasks in drawn.values() for task in tasks]
    assert len(set(ids)) == len(ids) == 36
    assert generated.tasks("function", "train", 12, 0) == drawn["train"] != generated.tasks("function", "train", 12, 1)
    places = {split: {f"{m} {d}" for m, d in generated._defects() if split_of(f"{m} {d}") == split} for split in SPLITS}
    assert all(len(found) > 40 for found in places.values())
    with pytest.raises(ValueError, match="expected one of train, validation, heldout"):
        generated.tasks("function", "test", 1, 0)


def test_expected_values_are_those_of_the_library_itself(drawn):
    """A second route: the modules as Python imports them, with the task's constants, no tracing and no text."""
    for task in drawn["train"]:
        for each in (*task.data["visible"], *task.data["hidden"]):
            module = importlib.import_module(f"agentrl_envs.coding.library.{each['module'].partition('.')[2]}")
            text = task.data["files"][each["module"].replace(".", "/") + ".py"]
            with pytest.MonkeyPatch.context() as patch:
                for name, value in re.findall(r"^([A-Z_]+) = (\d+)$", text, flags=re.M):
                    patch.setattr(module, name, int(value))
                assert getattr(module, each["function"])(*decode(each["args"])) == decode(each["expected"])


def test_the_defect_shows_in_visible_and_hidden_cases_that_share_no_arguments(drawn):
    for task in (task for tasks in drawn.values() for task in tasks):
        data = task.data
        path, module = data["edit"]["path"], data["edit"]["path"].removesuffix(".py").replace("/", ".")
        broken = data["files"][path]
        fixed = broken.replace(data["edit"]["old"], data["edit"]["new"])
        seen = []
        for kind in ("visible", "hidden"):
            mine = [each for each in data[kind] if each["module"] == module]
            seen.append({(each["function"], repr(each["args"])) for each in mine})
            marks = [right(*pair) for pair in zip(mine, try_out(broken, mine, 20_000), strict=True)]
            assert not all(marks), (task.id, kind)
            assert all(right(*pair) for pair in zip(mine, try_out(fixed, mine, 20_000), strict=True))
        assert not seen[0] & seen[1]
        shown = data["text"] + "".join(data["files"].values())
        assert "hidden" not in shown


LONG = "word " * 50 + "\n" * 200
FILES = {"p/a.py": "x = 1\ny = 2\n", "tests/test_a.py": "t", "README.md": "r"}


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("p/a.py", "x", "z", "p/a.py changed"),
        ("p/b.py", "", "n = 1\n", "p/b.py made"),
        ("p/a.py", " = ", "", "occurs more than once"),
        ("p/a.py", "", "all", "old must occur exactly once"),
        ("p/b.py", "x", "y", "there is no file"),
        ("../x", "", "y", "no path inside the workspace"),
        ("/etc/x", "", "y", "no path inside the workspace"),
        ("p/a.py/x", "", "y", "in the way"),
        ("p", "", "y", "in the way"),
        ("p/a.py", "x = 1", "x" * 40_000, "at most 32768"),
        ("p/a.py", "x = 1", "\ud800", "characters that a file cannot"),
    ],
)
def test_edit(path, old, new, said):
    state = workspace.Workspace(files=FILES)
    reply = workspace.edit(state, path, old, new)
    assert said in reply.text
    changed = dict(reply.state.files) != FILES
    assert changed == (reply.status is Status.OK)


@FEW
@given(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6))
def test_no_words_of_a_policy_break_the_workspace(path, old, new):
    state = workspace.Workspace(files=FILES)
    for reply in (workspace.edit(state, path, old, new), workspace.read(state, path), workspace.search(state, old)):
        snapshot = reply.state.snapshot()
        assert workspace.load(snapshot) == reply.state
        assert (snapshot.hash == state.snapshot().hash) == (reply.state == state)
        reply.text.encode()


def test_answers_are_bounded():
    state = workspace.Workspace(files={f"p/f{n}.py": LONG for n in range(39)} | {"p/z.py": "w" * 30_000})
    assert len(workspace.read(state, "p/z.py").text) < 5_000
    assert "characters left out" in workspace.read(state, "p/z.py").text
    assert "read from 121" in workspace.read(state, "p/f0.py").text
    assert len(workspace.search(state, "word").text) < 12_000
    assert workspace.read(state, "p/f0.py", 999).status is Status.INVALID_ACTION
    full = workspace.edit(workspace.edit(state, "p/new0.py", "", "").state, "p/new1.py", "", "")
    assert full.status is Status.INVALID_ACTION


def test_only_the_first_look_is_evidence():
    first = workspace.read(workspace.Workspace(files=FILES), "p/a.py")
    assert (first.gain, workspace.read(first.state, "p/a.py").gain) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\n", ["import os"]),
        ("from subprocess import run\n", ["import subprocess"]),
        ("import math\nfrom .b import f\nfrom p.b import g\n", []),
        ("open('x')\n", ["open"]),
        ("def f():\n    return f.__globals__\n", [".__globals__"]),
        ("class A:\n    def __eq__(self, other):\n        return True\n", ["__eq__"]),
        ("class A:\n    def __init__(self):\n        pass\n", []),
        ("getattr(f, 'x')\neval('1')\n", ["eval", "getattr"]),
        ("this is no python", []),
    ],
)
def test_what_a_repair_must_not_reach_for(text, found):
    assert review.reaches("x = 1\n", text, frozenset({"p"})) == found
    assert review.reaches(text, text, frozenset()) == []


def test_spelled_out_cases_are_found_and_one_changed_number_is_not():
    visible = [case("p.a", "f", [100, "abcd"], 7), case("p.a", "f", [2, "x"], 3), case("p.a", "f", [9, "y"], 4)]
    before = {"p/a.py": "def f(n, s):\n    return n + 1\n"}
    hard = {"p/a.py": "def f(n, s):\n    return {(100, 'abcd'): 7, (2, 'x'): 3}[n, s]\n"}
    assert len(review.spelled_out(before, hard, visible)) == 2
    honest = {"p/a.py": "def f(n, s):\n    return n + 2\n"}
    assert review.spelled_out(before, honest, visible) == []
    assert review.outside(["p/a.py", "p/conftest.py", "tests/x.py", "sitecustomize.py", "p/data.txt"], "p") == [
        "p/conftest.py", "tests/x.py", "sitecustomize.py", "p/data.txt",
    ]  # fmt: skip


def test_attacks_are_python_where_they_claim_to_be(drawn):
    scripts = attacks.attacks(drawn["train"][0])
    texts = [
        turn.arguments["new"] for turns in scripts.values() for turn in turns if getattr(turn, "name", "") == "edit"
    ]
    assert sum(len(text) > 300 for text in texts) > 8
    for text in texts:
        if len(text) > 300 and "import" in text:
            ast.parse(text)
