"""The search environment: reference, attacks, traps, snapshots, and the real sets where they are present."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from agentrl_envs import data, search
from agentrl_envs.search import human, scoring, sources, tools, world
from agentrl_envs.search import index as indexes
from agentrl_envs.search.adversarial import HAZARDS
from agentrl_envs.search.corpus import Document, numbered, terms
from agentrl_envs.sets.hotpotqa import HOTPOTQA
from agentrl_envs.sets.twowiki import TWOWIKI, records
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, Environment, EnvStatus, Status, ToolCall

SETS = {"hotpotqa": (HOTPOTQA,), "twowiki": (TWOWIKI,), "wiki": (HOTPOTQA, TWOWIKI)}
SIZES = {"hotpotqa": 70, "twowiki": 49, "wiki": 119}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Indexes of this test go to a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def needs(source):
    for entry in SETS[source]:
        if data.locate(entry) is None:
            pytest.skip(f"data set {entry.name!r} is absent: set AGENTRL_DATA to the folder that holds it")


@pytest.fixture(params=["fts5", "bm25s"])
def kind(request):
    if request.param == "bm25s":
        pytest.importorskip("bm25s", reason="bm25s is not installed: pip install 'agentrl-jax[search]'")
    return request.param


@pytest.fixture(scope="module")
def made():
    return search.suite(index="fts5")


def call(name, **arguments):
    return ToolCall(name=name, arguments=arguments)


def act(environment, *calls):
    return environment.step(Action(text="", calls=calls))


@pytest.mark.parametrize("split", search.options.SPLITS)
def test_the_reference_gets_full_marks_and_others_do_not(play, made, split):
    for task in made.tasks(split, 10, 0):
        played = play(made, task, made.solve(task))
        assert played.verdict.success, (task.id, played.verdict)
        assert sum(o.evidence_gain for o in played.observations) == pytest.approx(1.0)
        if split != "adversarial":
            assert played.verdict.quality == 1.0
        assert play(made, task, []).verdict.outcome is False
        for name, script in made.attacks(task).items():
            verdict = play(made, task, script).verdict
            assert not verdict.success and verdict.outcome is not None, (task.id, name)


def test_a_random_agent_does_not_succeed(play, made):
    rng = random.Random(0)
    for task in made.tasks("train", 20, 1):
        turns = [
            rng.choice([
                call("search", query=rng.choice(task.data["text"].split())),
                call("open", document=f"d{rng.randrange(374)}"),
                call("cite", document=f"d{rng.randrange(374)}", quote=rng.choice(task.data["text"].split())),
            ])
            for _ in range(15)
        ]  # fmt: skip
        assert not play(made, task, [*turns, call("answer", text=rng.choice(("yes", "no")))]).verdict.success


@pytest.mark.parametrize("source", ["generated", *SETS])
def test_splits_are_disjoint(source):
    if source != "generated":
        needs(source)
    asked = {split: sources.questions(source, split) for split in ("train", "validation", "heldout")}
    for one, other in itertools.combinations(asked.values(), 2):
        assert not {q.text for q in one} & {q.text for q in other}
    if source == "generated":
        titles = {split: {d.title for d in world.documents(split)} for split in search.options.SPLITS}
        assert all(not titles[a] & titles[b] for a, b in itertools.combinations(titles, 2))
    else:
        assert sum(map(len, asked.values())) == SIZES[source]
        assert {q.text for q in sources.questions(source, "adversarial")} <= {q.text for q in asked["heldout"]}


def test_tasks_are_distinct_seeded_and_bounded(made):
    tasks = made.tasks("train", 600, 3)
    assert len({task.id for task in tasks}) == 600 and tasks == made.tasks("train", 600, 3) != made.tasks(
        "train", 600, 4
    )
    assert Counter(task.kind for task in tasks[:30]) == {"bridge": 10, "chain": 10, "comparison": 10}
    with pytest.raises(ValueError, match="asked for, but there are 100"):
        made.tasks("adversarial", 101, 0)
    with pytest.raises(ValueError, match="expected one of train, validation, heldout, adversarial"):
        made.tasks("test", 1, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "web"},
        {"index": "lucene"},
        {"scoring": "bleu"},
        {"results": 0},
        {"max_calls": 3},
        {"sloppiness": 2.0},
    ],
)
def test_an_unknown_option_is_an_error_that_names_what_is_known(wrong):
    with pytest.raises(ValueError, match=r"expected|needs"):
        search.suite(**wrong)


def test_answers_in_the_generated_world_follow_from_its_relations():
    """By a second route: each answer stands in the last hop's document, or follows from the years and towns said."""
    for question in sources.questions("generated", "train")[:900]:
        last = question.hops[-1].sentences[0]
        if question.kind != "comparison":
            assert question.answer in last, question
            for before, after in itertools.pairwise(question.hops):
                assert after.title.removesuffix(" (river)") in before.sentences[0]
        elif question.answer in ("yes", "no"):
            towns = [hop.sentences[0].split(" born in ")[1].split(" in ")[0] for hop in question.hops]
            assert (towns[0] == towns[1]) == (question.answer == "yes")
        else:
            years = {hop.title: int(hop.sentences[0].split(" in ")[1].split()[0]) for hop in question.hops}
            assert question.answer == min(years, key=years.__getitem__)


def test_nothing_hidden_reaches_the_policy(play, made):
    """Neither the reset nor any answer of a tool holds what only the task's data has, before its document is opened."""
    for task in made.tasks("heldout", 9, 5):
        environment = made.make()
        assert isinstance(environment, Environment)
        said = " ".join(m.content for m in environment.reset(task, 0).content)
        assert all(hop["documents"][0] not in said for hop in task.data["hops"])
        assert task.data["answer"] not in said or task.kind == "comparison"


def test_bad_calls_are_answered_and_change_nothing(made):
    environment = made.make()
    environment.reset(made.tasks("train", 1, 0)[0], 0)
    before = environment.snapshot()
    wrong = [
        call("drop"), call("search"), call("search", query="a", limit="3"), call("search", query=5),
        call("search", query="x" * 301), call("search", query="\ud800"), call("open", document="d99999"),
        call("open", document="../etc"), call("open", document="d01"), call("open", document=""),
        call("open", document="d²"), call("cite", document="d1", quote="never opened"),
        call("cite", document="nowhere", quote="x"), call("answer", text="x" * 201), call("answer", text=None),
    ]  # fmt: skip
    for one in wrong:
        observation = act(environment, one)
        assert observation.status is Status.INVALID_ACTION and not observation.terminated, one
        assert observation.content[0].content.startswith("error"), one
    assert environment.step(Action(text="hello")).status is Status.INVALID_ACTION
    assert environment.step(Action(text="", error="not JSON")).status is Status.INVALID_ACTION
    assert environment.snapshot() == before
    environment.close()
    environment.close()
    with pytest.raises(RuntimeError, match="call reset"):
        environment.snapshot()


def test_calls_of_one_turn_are_answered_in_order_and_none_after_the_end(made):
    environment = made.make()
    task = made.tasks("train", 1, 0)[0]
    environment.reset(task, 0)
    observation = act(environment, call("open", document="d3"), call("answer", text="x"), call("search", query="y"))
    assert [m.content for m in observation.content][1:] == ["answered", "the task is over"]
    assert observation.terminated and observation.status is Status.INVALID_ACTION
    before = environment.snapshot()
    after = act(environment, call("open", document="d4"))
    assert after.terminated and after.status is Status.INVALID_ACTION and environment.snapshot() == before


def test_siblings_of_a_snapshot_never_see_each_other(made):
    task = made.tasks("validation", 1, 2)[0]
    root = made.make()
    root.reset(task, 0)
    act(root, made.solve(task)[0])
    act(root, made.solve(task)[1])
    taken = root.snapshot()
    twins = [made.make() for _ in range(3)]
    for twin in twins:
        twin.restore(taken)
        assert twin.snapshot() == taken
    act(twins[0], call("answer", text="no"))
    act(twins[1], made.solve(task)[2])
    assert twins[2].snapshot() == taken == root.snapshot()
    assert len({twin.snapshot().hash for twin in twins}) == 3


def test_hazards_come_from_the_task_and_can_be_overcome(made):
    seen = set()
    for task in made.tasks("adversarial", 25, 0):
        environment = made.make()
        environment.reset(task, 0)
        for turn in made.solve(task):
            observation = act(environment, turn)
            if observation.status is not Status.OK:
                seen.add((task.kind, observation.status))
                assert ("again" in observation.content[0].content) == (observation.status is not Status.DENIED)
                assert (
                    observation.env_status == EnvStatus()
                )  # an answer to the policy, not a failure to be retried for it
    assert seen == {("dead_link", Status.DENIED), ("flaky_link", Status.TIMEOUT), ("timeout", Status.TIMEOUT)}
    assert {task.kind for task in made.tasks("adversarial", 5, 0)} == set(HAZARDS)


def test_traps_lie_in_the_adversarial_corpus_alone(play, made):
    corpus = sources.corpus("generated-adversarial")
    origins = Counter(document.origin for document in corpus.documents)
    assert origins["forum"] >= 15 and origins["mirror"] >= 40
    assert sum("(namesake)" in d.title or "(other)" in d.title for d in corpus.documents) >= 10
    for split in ("train", "validation", "heldout"):
        assert {document.origin for document in sources.corpus(f"generated-{split}").documents} == {"encyclopedia"}
    posts = {d.title: d for d in corpus.documents if d.origin == "forum"}
    task, post = next(
        (task, posts[title])
        for task in made.tasks("adversarial", 50, 0)
        if task.kind == "contradiction" and (title := f"{task.data['hops'][-1]['title']}: readers write") in posts
    )
    assert task.data["answer"] not in post.sentences[0]
    believed = [
        *made.solve(task)[:-2],
        call("open", document=post.id),
        call("cite", document=post.id, quote=post.sentences[0]),
    ]
    verdict = play(made, task, [*believed, call("answer", text=task.data["answer"])]).verdict
    assert verdict.outcome is False and not verdict.violated


def test_constraints_see_invented_quotes_and_a_state_that_no_action_explains(play, made):
    task = made.tasks("train", 1, 0)[0]
    played = play(made, task, made.attacks(task)["invented quote"])
    assert [check.passed for check in played.verdict.constraints] == [False, True]
    good = play(made, task, made.solve(task))
    state = json.loads(good.final.data)
    state["opened"].append("d0" if "d0" not in state["opened"] else "d1")
    forged = type(good.final)(data=json.dumps(state, sort_keys=True).encode(), hash="")
    assert [c.passed for c in made.verify(task, good.initial, good.actions, forged).constraints] == [True, False]
    assert not made.verify(task, good.initial, good.actions[:-1], good.final).success


def test_f1_scoring_pays_in_part_but_succeeds_only_for_all(play):
    made = search.suite(index="fts5", scoring="f1")
    task = made.tasks("train", 1, 0)[0]
    *turns, answer = made.solve(task)
    assert play(made, task, [*turns, answer]).verdict.outcome == 1.0
    wordy = play(made, task, [*turns, call("answer", text=f"perhaps {task.data['answer']}")]).verdict
    assert 0.0 < wordy.outcome < 1.0 and not wordy.success
    half = play(made, task, [*turns[:3], answer]).verdict
    assert 0.0 < half.outcome < 1.0


def test_demonstrations_are_fallible_and_recover(play, made):
    tasks = made.tasks("train", 60, 0)
    outcomes = [play(made, task, made.demonstrate(task, 0)).verdict for task in tasks]
    assert 0.4 < sum(verdict.success for verdict in outcomes) / 60 < 0.9
    assert any(verdict.success and verdict.quality < 1.0 for verdict in outcomes)
    assert made.demonstrate(tasks[0], 1) == made.demonstrate(tasks[0], 1)
    flawless = search.suite(index="fts5", sloppiness=0.0)
    assert all(flawless.demonstrate(task, 0) == made.solve(task) for task in tasks)


# The index.


@functools.cache
def pages_of(corpus):
    return [terms(f"{d.title} {d.text}") for d in corpus.documents]


def bm25(corpus, query, k1=1.5, b=0.75):
    """BM25 in a loop, by the formula of Lucene."""
    pages = pages_of(corpus)
    mean = sum(map(len, pages)) / len(pages)
    scores = [0.0] * len(pages)
    for word in terms(query):
        holding = sum(word in page for page in pages)
        weight = math.log(1 + (len(pages) - holding + 0.5) / (holding + 0.5))
        for i, page in enumerate(pages):
            n = page.count(word)
            scores[i] += weight * n / (n + k1 * (1 - b + b * len(page) / mean))
    return scores


def test_bm25s_ranks_as_the_formula_says():
    pytest.importorskip("bm25s", reason="bm25s is not installed: pip install 'agentrl-jax[search]'")
    corpus = sources.corpus("generated-validation")
    opened = indexes.opened("generated-validation", "bm25s", lambda: corpus, kept=False)
    for question in sources.questions("generated", "validation")[:6]:
        scores = [round(score, indexes.DECIMALS) for score in bm25(corpus, question.text)]
        found = opened.search(question.text, 5)
        assert sorted((scores[int(d.id[1:])] for d in found), reverse=True) == pytest.approx(
            sorted(scores, reverse=True)[:5], abs=2e-3
        )


def test_both_indexes_find_a_document_by_its_title(kind):
    corpus = sources.corpus("generated-train")
    opened = indexes.opened("generated-train", kind, lambda: corpus, kept=False)
    assert all(document in opened.search(document.title, 3) for document in corpus.documents[:80])
    assert opened.search("the of", 5) == opened.search("", 5) == opened.search("qqqqq", 5) == []
    assert opened.search('" OR * NEAR(a b) title:x', 5) is not None
    assert opened.document("d0") == corpus.documents[0] and opened.titled("\ud800") is None


def test_a_kept_index_is_made_once_and_shared(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = numbered("t", [Document("Alpha", ("Alpha flows.",)), Document("Beta", ("Beta stands.",))])
    first = indexes._from_cache("t", kind, lambda: corpus)

    def never():
        raise AssertionError("it is made already")

    second = indexes._from_cache("t", kind, never)
    assert (
        first.search("beta", 1)
        == second.search("beta", 1)
        == [corpus.documents[[d.title for d in corpus.documents].index("Beta")]]
    )
    if kind == "bm25s":
        import numpy as np

        assert isinstance(second._scorer.scores["data"], np.memmap)
    (folder,) = (tmp_path / "agentrl" / "search").iterdir()
    assert folder.name.startswith("t-")
    with pytest.raises(Exception, match="readonly"):
        second._connection.execute("DELETE FROM documents")
    for opened in (first, second):
        opened._connection.close()


def test_processes_that_make_the_same_index_at_once_share_one(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = sources.corpus("generated-heldout")
    barrier = threading.Barrier(4)

    def build():
        barrier.wait()
        return corpus

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: indexes._from_cache("once", kind, build), range(4)))
    assert len({tuple(d.id for d in one.search("founded by", 9)) for one in made}) == 1
    assert [path.name for path in (tmp_path / "agentrl" / "search").iterdir()] == [f"once-{kind}-{indexes.VERSION}"]
    for one in made:
        one._connection.close()


def test_lines_of_the_human_pool_are_whole(tmp_path):
    path = str(tmp_path / "pool.jsonl")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: human.append(path, {"n": n, "quotes": ["ü" * 5000]}), range(64)))
    lines = [json.loads(line) for line in (tmp_path / "pool.jsonl").read_text().splitlines()]
    assert sorted(line["n"] for line in lines) == list(range(64))


def test_the_version_says_which_index_it_is(monkeypatch):
    assert search.suite(index="fts5").spec.version == "1+fts5"
    monkeypatch.setattr(indexes, "find_spec", lambda name: None)
    assert search.suite().spec.version == "1+fts5"
    with pytest.raises(ImportError, match=r"pip install 'agentrl-jax\[search\]'"):
        search.suite(index="bm25s")


def test_bm25s_brings_no_jax_along():
    pytest.importorskip("bm25s", reason="bm25s is not installed: pip install 'agentrl-jax[search]'")
    code = (
        "import sys; from agentrl_envs import search; s = search.suite(index='bm25s'); s.tasks('train', 1, 0); "
        "assert 'bm25s' in sys.modules and not {'jax', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Scoring.


@pytest.mark.parametrize(
    ("said", "gold", "exact", "f1"),
    [
        ("The Beatles!", "beatles", True, 1.0), ("yes", "no", False, 0.0), ("yes it is", "yes", False, 0.0),
        ("New York", "New York City", False, 0.8), ("", "x", False, 0.0), ("x", "", False, 0.0),
        ("a b b c", "b b d", False, 2 * 2 / 6), ("the", "a", False, 0.0),
    ],
)  # fmt: skip
def test_exact_match_and_f1_are_those_of_squad(said, gold, exact, f1):
    assert scoring.exact(said, gold) is exact and scoring.f1(said, gold) == pytest.approx(f1)


@settings(max_examples=50)
@given(st.text(max_size=20), st.text(max_size=20))
def test_f1_is_symmetric_and_one_only_for_the_same_words(one, other):
    value = scoring.f1(one, other)
    assert 0.0 <= value <= 1.0 and value == pytest.approx(scoring.f1(other, one))
    if scoring.exact(one, other):
        assert value == 1.0


SENTENCE = "VIVA Media GmbH is a music network from Germany."


@pytest.mark.parametrize(
    ("quote", "good"),
    [
        (SENTENCE, True), ("is a  MUSIC network", True), ("music network", False), ("is", False),
        ("IVA Media GmbH is a music", False), (f"{SENTENCE} And more.", True),
        (f"{SENTENCE} {'more words ' * 9}", False),
        ("is a network from Germany", False), ("", False),
    ],
)  # fmt: skip
def test_what_supports(quote, good):
    assert scoring.supports(quote, [SENTENCE]) is good


@settings(max_examples=50)
@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_a_quote_of_whole_words_is_found_again(before, quote, after):
    if scoring.plain(quote):
        assert scoring.quoted_in(quote, f"{before} {quote} {after}") or not quote.isascii()


# Real sets.


@pytest.mark.parametrize(
    ("source", "split"),
    [("hotpotqa", "heldout"), ("hotpotqa", "adversarial"), ("twowiki", "train"), ("wiki", "heldout")],
)
def test_the_reference_solves_the_real_sets(play, source, split):
    needs(source)
    made = search.suite(source=source, index="fts5")
    for task in made.tasks(split, 4, 0):
        trapped = ("adversarial" in task.data["corpus"], bool(task.data["hazard"]))
        assert trapped == (split == "adversarial",) * 2
        assert play(made, task, made.solve(task)).verdict.success, task.id
        for name, script in made.attacks(task).items():
            assert not play(made, task, script).verdict.success, (task.id, name)


def test_what_no_machine_can_judge_goes_to_people(play, tmp_path):
    """A quote that names the bridge and is not the annotated sentence: unscored, and one line in the pool."""
    needs("hotpotqa")
    pool = tmp_path / "pool.jsonl"
    made = search.suite(source="hotpotqa", index="fts5", human_pool=str(pool))
    task, turns = next(filter(None, (_otherwise_cited(made, task) for task in made.tasks("train", 40, 0))))
    for _ in range(2):
        verdict = play(made, task, turns).verdict
        assert verdict.outcome is None and not verdict.success and not verdict.violated
    lines = [json.loads(line) for line in pool.read_text().splitlines()]
    assert len(lines) == 2 and lines[0] == lines[1] and [lines[0]["id"]] == verdict.diagnostics["human_pool"]
    assert lines[0]["question"] == task.data["text"] and lines[0]["quote"]
    wrong = play(made, task, [*turns[:-1], call("answer", text="something else")]).verdict
    assert wrong.outcome is False  # a wrong answer is wrong whatever is quoted: no way out through the pool
    nowhere = search.suite(source="hotpotqa", index="fts5", human_pool=str(tmp_path / "no" / "pool"))
    assert "not written" in play(nowhere, task, turns).verdict.diagnostics["human_pool"]


def _otherwise_cited(made, task):
    """The reference with its last quote exchanged for another sentence of that document which names the title."""
    *turns, last, answer = made.solve(task)
    document = search._find(search.Options(source="hotpotqa"), task.data["corpus"]).document(last.arguments["document"])
    for sentence in document.sentences:
        named = (
            scoring.mentions(sentence, [document.title])
            and len(sentence.split()) >= 4
            and len(sentence) <= tools.MAX_QUOTE
        )
        if named and sentence not in task.data["hops"][-1]["sentences"]:
            return task, [*turns, call("cite", document=document.id, quote=sentence), answer]
    return None


def test_annotations_are_read_without_being_run():
    assert records("[\n # 1\n {'a': null, \"b\": 'null'},\n]") == [{"a": None, "b": "null"}]
    with pytest.raises(ValueError, match="malformed"):
        records("[print(1)]")
