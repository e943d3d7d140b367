"""Tasks, wordings, the reference solution and the teacher."""

from __future__ import annotations

import itertools
import re

import pytest
from agentrl_envs.workflow import KINDS, LOOKUP, suite, wording
from agentrl_envs.workflow.options import SPLITS
from agentrl_envs.workflow.tenant import build

from agentrl_jax.protocol import ToolCall

COMBINATIONS = list(itertools.product(("short", "real"), ("plain", "free")))
WORD = re.compile(r"[A-Za-z]+|\d+|[^\sA-Za-z\d]")


@pytest.mark.parametrize(("handles", "words"), COMBINATIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_the_reference_solution_gets_full_marks(play, handles, words, split):
    made = suite(handles=handles, wording=words, kinds=[*KINDS, LOOKUP])
    for task in made.tasks(split, 300, 11):
        verdict = play(made, task, made.solve(task)).verdict
        assert verdict.success and verdict.quality == 1.0, (task, verdict)


def test_tasks_are_deterministic_distinct_and_a_prefix_of_longer_lists():
    made = suite()
    tasks = made.tasks("train", 500, 3)
    assert tasks == made.tasks("train", 500, 3)
    assert tasks[:40] == made.tasks("train", 40, 3)
    assert len({task.id for task in tasks}) == len({task.data["tenant"] for task in tasks}) == 500
    assert not {task.data["tenant"] for task in tasks} & {task.data["tenant"] for task in made.tasks("train", 500, 4)}


@pytest.mark.parametrize("kind", KINDS)
def test_three_of_eight_requests_of_each_kind_must_be_refused(kind):
    tasks = suite(kinds=[kind]).tasks("train", 80, 0)
    assert sum(task.data["finish"] == "refused" for task in tasks) == 30
    reasons = [task.data["reason"] for task in tasks if task.data["reason"]]
    assert min(reasons.count(r) for r in set(reasons)) >= 8


@pytest.mark.parametrize("handles", ["short", "real"])
def test_splits_share_no_customer_and_no_sentence(handles):
    made = suite(handles=handles, kinds=[*KINDS, LOOKUP])
    customers, names = {}, {}
    for split in SPLITS:
        tenants = [build(t.data["tenant"], split, t.kind, t.data["reason"], handles) for t in made.tasks(split, 300, 0)]
        customers[split] = {row[0] for tenant in tenants for row in tenant.rows["customers"]}
        names[split] = {row[1] for tenant in tenants for row in tenant.rows["customers"]}
    for one, two in itertools.combinations(SPLITS, 2):
        assert not customers[one] & customers[two]
        assert not names[one] & names[two]
        for words in ("plain", "free"):
            assert not set(sentences(words, one)) & set(sentences(words, two))


def sentences(words, split):
    frames = wording.PLAIN_FRAMES if words == "plain" else wording.FREE_FRAMES
    cores = wording.PLAIN_CORES if words == "plain" else wording.FREE_CORES
    yield from wording.LOOKUP_FRAMES[split]
    for frame, table in itertools.product(frames[split], cores.values()):
        yield from (frame.replace("{core}", core) for core in table[split])


@pytest.mark.parametrize("words", ["plain", "free"])
def test_validation_and_heldout_use_no_word_that_train_does_not(words):
    used = {
        split: {w.lower() for text in wording.templates(words, (split,)) for w in re.findall(r"\w+|[^\w\s]", text)}
        for split in SPLITS
    }
    assert used["validation"] <= used["train"]
    assert used["heldout"] <= used["train"]


def test_plain_sentences_are_short():
    lengths = [len(t.data["text"].split()) for split in SPLITS for t in suite().tasks(split, 300, 0)]
    assert min(lengths) >= 5 and max(lengths) <= 17


@pytest.mark.parametrize("words", ["plain", "free"])
def test_the_vocabulary_holds_every_word_of_every_split(play, words):
    made = suite(wording=words, kinds=[*KINDS, LOOKUP])
    known = {word for text in made.vocabulary() for word in WORD.findall(text)}
    met = set()
    for split in SPLITS:
        for task in made.tasks(split, 220, 2):
            turns = made.demonstrate(task, 0)
            said = [turn if isinstance(turn, str) else written(turn) for turn in turns]
            answers = [m.content for o in play(made, task, turns).observations for m in o.content]
            met.update(word for text in (task.data["text"], *said, *answers) for word in WORD.findall(text))
    assert not met - known


def written(call):
    return " ".join([call.name, *(f"{key}={value}" for key, value in call.arguments.items())])


def test_every_number_is_met_in_train():
    """A held-out customer's number is a token that train has shown, as an order, a product or the like."""
    made = suite(kinds=[*KINDS, LOOKUP])
    seen = {w for t in made.tasks("train", 1500, 0) for w in t.data["text"].split() if w.isdigit()}
    assert seen == {str(n) for n in range(100)}


def test_the_teacher_is_fallible_but_mostly_right(play):
    made = suite()
    tasks = made.tasks("train", 600, 9)
    shown = [made.demonstrate(task, 4) for task in tasks]
    assert shown == [made.demonstrate(task, 4) for task in tasks]
    verdicts = [play(made, task, turns).verdict for task, turns in zip(tasks, shown, strict=True)]
    success = sum(v.success for v in verdicts) / len(verdicts)
    broken = sum(v.violated for v in verdicts) / len(verdicts)
    assert 0.45 < success < 0.75
    assert 0.1 < broken < 0.35
    for expected in ("done", "refused"):  # each decision goes both ways, in either situation
        ends = [
            turns[-1].arguments["result"]
            for task, turns in zip(tasks, shown, strict=True)
            if task.data["finish"] == expected and isinstance(turns[-1], ToolCall)
        ]
        assert 0.1 < ends.count("done") / len(ends) < 0.95
        assert ends.count("refused") / len(ends) > 0.05
    assert any(isinstance(turn, str) for turns in shown for turn in turns)
    assert max(len(turns) for turns in shown) <= 8


@pytest.mark.parametrize("sloppiness", [0.0, 1.0])
def test_sloppiness_sets_how_often_a_demonstration_departs_from_the_reference(sloppiness):
    made = suite(sloppiness=sloppiness)
    tasks = made.tasks("train", 200, 0)
    same = sum(made.demonstrate(task, 0) == made.solve(task) for task in tasks) / 200
    assert same == 1.0 if sloppiness == 0.0 else same < 0.1


def test_tasks_are_cheap(calls):
    """On an idle machine, under 0.5 ms each."""
    made = suite()
    assert calls(lambda: made.tasks("train", 400, 0)) < 400 * 1200
