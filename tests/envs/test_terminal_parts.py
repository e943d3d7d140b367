"""The terminal environment's pure parts: trees, assertions, generated tasks, the second tree, the rules of a call."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest
from agentrl_envs import data
from agentrl_envs.sets.nl2bash import NL2BASH
from agentrl_envs.terminal import attacks, episode, generated, nl2bash
from agentrl_envs.terminal.assertions import failure, paths, unpacked
from agentrl_envs.terminal.env import problem, shown
from agentrl_envs.terminal.episode import Episode
from agentrl_envs.terminal.machine import Ran
from agentrl_envs.terminal.tree import (
    DIRECTORY,
    Entry,
    TooLarge,
    changes,
    file,
    from_json,
    from_tar,
    to_json,
    to_tar,
    with_parents,
)
from agentrl_envs.terminal.variants import variant
from agentrl_envs.terminal.verifier import _lines
from agentrl_envs.terminal.words import SPLITS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import ToolCall

KINDS = tuple(generated.KINDS)
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..") and not name.endswith("/")
)
ENTRIES = st.one_of(
    st.builds(Entry, st.just("file"), st.integers(0, 0o777), st.binary(max_size=20)),
    st.builds(Entry, st.just("dir"), st.integers(0, 0o777), st.just(b"")),
    st.builds(Entry, st.just("link"), st.just(0o777), st.sampled_from((b"a", b"../../etc/passwd", b"/x"))),
    st.just(Entry("fifo")),
)
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), ENTRIES, max_size=5).map(with_parents)


@FEW
@given(TREES)
def test_a_tree_survives_a_tar_and_json(tree):
    assert from_tar(to_tar(tree)) == tree == from_json(to_json(tree))
    state = Episode(tree=tree, services=("a", "b"), printed=b"\xff", finished=True)
    assert episode.load(state.snapshot()) == state


@FEW
@given(TREES, TREES)
def test_hashes_are_equal_iff_the_states_are(one, other):
    same = Episode(tree=one).snapshot().hash == Episode(tree=other).snapshot().hash
    assert same == (one == other) == (not changes(one, other))


def test_a_tree_is_bounded():
    with pytest.raises(TooLarge):
        from_tar(to_tar({f"f{n}": file("") for n in range(1_001)}))
    with pytest.raises(TooLarge):
        from_tar(to_tar({"f": Entry("file", 0o644, bytes(1 << 20) + b"x")}))


def packed(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


START = Episode(tree={"a.txt": file("old\n", 0o600), "d": DIRECTORY}, services=("crawler", "mailer"))


@pytest.mark.parametrize(
    ("assertion", "entry", "said"),
    [
        ({"path": "n", "is": "file", "text": "x\n"}, file("x\n"), ""),
        ({"path": "n", "is": "file", "text": "x\n"}, file("y\n"), "another content"),
        ({"path": "n", "is": "file", "text": "x\n"}, None, "is missing"),
        ({"path": "n", "is": "file", "text": "x\n"}, Entry("link", 0o777, b"a.txt"), "is a link"),
        ({"path": "n", "is": "file", "text": "x\n"}, Entry("fifo"), "is a fifo"),
        ({"path": "n", "is": "file", "number": 7}, file("7"), ""),
        ({"path": "n", "is": "file", "number": 7}, file("07\n"), "another number"),
        ({"path": "n", "is": "file", "number": 7}, file("6\n7\n"), "another number"),
        ({"path": "n", "is": "file", "mode": 0o755}, file("", 0o755), ""),
        ({"path": "n", "is": "file", "mode": 0o755}, file("", 0o777), "has mode 777"),
        ({"path": "a.txt", "is": "file", "text": "new\n"}, file("new\n", 0o600), ""),
        ({"path": "a.txt", "is": "file", "text": "new\n"}, file("new\n"), "has mode 644"),
        ({"path": "a.txt", "is": "absent"}, None, ""),
        ({"path": "a.txt", "is": "absent"}, file(""), "is there"),
        ({"path": "n", "is": "dir"}, DIRECTORY, ""),
        ({"path": "n", "is": "link", "target": "a.txt"}, Entry("link", 0o777, b"a.txt"), ""),
        ({"path": "n", "is": "link", "target": "a.txt"}, Entry("link", 0o777, b"/a.txt"), "points elsewhere"),
        ({"path": "n", "is": "archive", "members": {"x/a": "1"}}, Entry("file", 0o644, packed({"x/a": b"1"})), ""),
        ({"path": "n", "is": "archive", "members": {"x/a": "1"}}, Entry("file", 0o644, packed({"x/a": b"1"}, "w")), ""),
        ({"path": "n", "is": "archive", "members": {"x/a": "1"}}, Entry("file", 0o644, packed({"a": b"1"})), "other"),
        ({"path": "n", "is": "archive", "members": {"x/a": "1"}}, file("no"), "no readable archive"),
        ({"service": "crawler", "running": False}, None, "runs: True"),
        ({"service": "crawler", "running": True}, None, ""),
    ],
)
def test_assertions(assertion, entry, said):
    tree = {path: old for path, old in START.tree.items() if path != assertion.get("path")}
    if entry is not None:
        tree[assertion["path"]] = entry
    found = failure(assertion, START, Episode(tree=tree, services=START.services))
    assert said in found and bool(said) == bool(found)


def test_a_small_archive_of_much_is_not_unpacked():
    with pytest.raises(ValueError, match="bytes"):
        unpacked(gzip.compress(bytes(64 << 20)))


def _header(kind: bytes, size: bytes, real: int = 0) -> bytes:
    block = bytearray(512)
    block[:1], block[124:136], block[156:157], block[257:265] = b"a", size, kind, b"ustar  \0"
    if real:  # of a sparse file
        block[386:398], block[398:410], block[483:495] = b"0" * 12, b"0" * 12, b"%011o\0" % real
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "content",
    [
        _header(b"S", b"%011o\0" % 0, real=7 << 30),
        _header(b"0", b"\x80\0\0" + b"\x7f" * 9),
        _header(b"0", b"\xff" * 11 + b"\0"),
        _header(b"x", b"%011o\0" % 10) * 3000,
    ],
    ids=["holes", "a huge size", "a negative size", "headers of headers"],
)
def test_no_header_breaks_the_verifier(content):
    with pytest.raises(ValueError, match=r"bytes|Error"):
        unpacked(content + bytes(1024))


@FEW
@given(st.binary(max_size=60), st.sampled_from((bytes, gzip.compress, b"\x1f\x8b".__add__)))
def test_no_bytes_in_the_place_of_an_archive_break_the_verifier(raw, wrapped):
    content = wrapped(raw)
    goal = {"path": "n", "is": "archive", "members": {"a": "1"}}
    assert failure(goal, START, Episode(tree={"n": Entry("file", 0o644, content)}))


def test_tasks_are_distinct_and_splits_share_no_word():
    drawn = {split: generated.tasks(KINDS, split, 26, 0) for split in SPLITS}
    ids = [task.id for tasks in drawn.values() for task in tasks]
    assert len(ids) == len(set(ids)) == 6 * len(generated.KINDS)
    assert drawn["train"] == generated.tasks(KINDS, "train", 26, 0) and drawn["train"] != generated.tasks(
        KINDS, "train", 26, 1
    )
    words = {split: {word for task in tasks for word in task.data["text"].split()} for split, tasks in drawn.items()}
    folders = {split: {row[0].split("/")[0] for task in drawn[split] for row in task.data["tree"]} for split in SPLITS}
    assert not folders["train"] & folders["heldout"] - {"run.sh"} and words["train"] != words["heldout"]
    with pytest.raises(ValueError, match="expected one of train, validation, heldout"):
        generated.tasks(KINDS, "test", 1, 0)


def test_no_generated_task_is_solved_at_the_start_and_its_answer_is_not_shown():
    for split in SPLITS:
        for task in generated.tasks(KINDS, split, 39, 3):
            start = Episode(tree=from_json(task.data["tree"]), services=tuple(task.data["services"]))
            goal = task.data["goal"]
            assert any(failure(assertion, start, start) for assertion in goal), task.id
            numbers = [str(assertion["number"]) for assertion in goal if "number" in assertion]
            assert not any(number in task.data["text"].split() for number in numbers), task.id
            assert paths(goal) or task.data["services"]


def test_a_second_tree_keeps_every_name_and_changes_every_text():
    tree = with_parents(
        {"a/x.txt": file("one two\nthree\n"), "a/empty": file(""), "b/y": file("1"), "b/c/z": file("q\n")}
    )
    other = variant(tree)
    assert set(tree) < set(other) and variant(tree) == other
    assert other["a/x.txt"].content == b"two one\none two\nthree\ntwo one\n"
    assert {"a/again_x.txt", "a/more/x.txt", "b/more/c", "more/a"} <= set(other)
    assert other["a/empty"] == tree["a/empty"]


def test_the_order_of_lines_counts_unless_a_folder_was_walked():
    assert _lines("find . -name x", b"b\na\n") == _lines("find . -name x", b"a \nb")
    assert _lines("find . | sort -r", b"b\na\n") != _lines("find . | sort -r", b"a\nb\n")
    assert _lines("cat x", b"b\na\n") != _lines("cat x", b"a\nb\n")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall(name="run", arguments={"command": "ls"}), ""),
        (ToolCall(name="finish"), ""),
        (ToolCall(name="bash"), "there is no tool 'bash'"),
        (ToolCall(name="\ud800"), "there is no tool"),
        (ToolCall(name="run"), "the argument command"),
        (ToolCall(name="run", arguments={"command": 1}), "must be a string"),
        (ToolCall(name="run", arguments={"command": "a\0b"}), "cannot take"),
        (ToolCall(name="run", arguments={"command": "\ud800"}), "cannot take"),
        (ToolCall(name="run", arguments={"command": "x" * 5_000}), "at most 4000"),
        (ToolCall(name="finish", arguments={"answer": "x"}), "no arguments"),
    ],
)
def test_calls_are_checked(call, said):
    assert said in problem(call) and bool(said) == bool(problem(call))
    problem(call).encode()


def test_what_is_shown_is_bounded_and_says_how_it_ended():
    ran = Ran(3, b"y" * 50_000, b"\xff\0oops\n", "", {}, ())
    assert len(shown(ran)) < 4_200 and "left out" in shown(ran) and shown(ran).endswith("oops\n(exit code 3)")
    assert shown(ran._replace(stdout=b"", stderr=b"", code=0)) == "(no output)"
    assert "stopped: more than 5 seconds" in shown(ran._replace(stopped="time"))


def test_attacks_aim_at_what_the_task_names():
    (task,) = generated.tasks(["count_files"], "train", 1, 0)
    assert "count.txt" in attacks.attacks(task)["links_out"][0].arguments["command"]


@pytest.mark.skipif(data.locate(NL2BASH) is None, reason="data set nl2bash is not here: set AGENTRL_DATA to its folder")
def test_nl2bash_takes_96_of_200_and_keeps_equal_commands_together():
    counts = {"train": 53, "validation": 19, "heldout": 24}
    drawn = {split: nl2bash.tasks(split, count, 0) for split, count in counts.items()}
    assert sum(counts.values()) == 96
    assert sum(len(places) for by_tree in nl2bash.DROPPED.values() for places in by_tree.values()) == 200 - 96
    golds = {split: {task.data["gold"] for task in tasks} for split, tasks in drawn.items()}
    assert not (golds["train"] & golds["heldout"] or golds["train"] & golds["validation"])
    assert not any("/testbed" in task.data["gold"] or "/system" in task.data["text"] for task in drawn["train"])
    with pytest.raises(ValueError, match="but there are 19"):
        nl2bash.tasks("validation", 20, 0)
