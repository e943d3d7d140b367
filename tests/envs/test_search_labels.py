"""Answers that people wrote into the pool of search: they decide, they are named, no old verdict changes silently."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from agentrl_envs import search
from agentrl_envs.search import __main__ as command
from agentrl_envs.search import human, scoring

from agentrl_jax.protocol import EnvironmentRef, StopReason, Task, ToolCall
from agentrl_jax.rollout.play import play as play_in_process
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.replay import replay_in

sys.path.append(str(Path(__file__).parent.parent / "rollout"))

from plain_renderer import PlainRenderer


def suite(pool) -> search.Suite:
    return search.suite(index="fts5", human_pool=str(pool))


@pytest.fixture(scope="module")
def doubtful():
    """A task whose world is taken to be open, and turns that quote a sentence beside the annotated one."""
    made = search.suite(index="fts5")
    for task in made.tasks("train", 40, 0):
        *turns, last, answer = made.solve(task)
        document = search._find(search.Options(), task.data["corpus"]).document(last.arguments["document"])
        for sentence in document.sentences:
            if scoring.mentions(sentence, [document.title]) and sentence not in task.data["hops"][-1]["sentences"]:
                quote = ToolCall(name="cite", arguments={"document": document.id, "quote": sentence})
                return replace(task, data={**task.data, "closed": False}), (*turns, quote, answer)
    raise AssertionError("no task with such a sentence")


def _verdict(pool, play, doubtful):
    return play(suite(pool), *doubtful).verdict


def test_an_answer_decides_and_the_last_one_counts(tmp_path, play, doubtful):
    pool = tmp_path / "pool.jsonl"
    waits = _verdict(pool, play, doubtful)
    (name,) = waits.diagnostics["human_pool"]
    assert waits.outcome is None and _verdict(pool, play, doubtful) == waits, "asking again changes nothing"
    assert [record["id"] for record in human.waiting(str(pool))] == [name]
    human.answer(str(pool), name, True, "ann")
    yes = _verdict(pool, play, doubtful)
    assert yes.success and yes.diagnostics["vouched"] == [name] and "human_pool" not in yes.diagnostics
    assert yes.diagnostics["hops_cited"] == yes.diagnostics["hops"] and yes.quality == 1.0
    assert human.waiting(str(pool)) == []
    human.answer(str(pool), name, False, "bob")
    no = _verdict(pool, play, doubtful)
    assert no.outcome is False and "vouched" not in no.diagnostics and "human_pool" not in no.diagnostics


def test_an_answer_speaks_of_its_quote_only(tmp_path, play, doubtful):
    pool, (task, turns) = tmp_path / "pool.jsonl", doubtful
    (name,) = _verdict(pool, play, doubtful).diagnostics["human_pool"]
    human.answer(str(pool), name, True, "ann")
    other = replace(task, data={**task.data, "text": task.data["text"] + " indeed"})
    assert play(suite(pool), other, turns).verdict.outcome is None
    wrong = play(suite(pool), task, [*turns[:-1], ToolCall(name="answer", arguments={"text": "no idea"})]).verdict
    assert wrong.outcome is False and not wrong.success, "no label makes a wrong answer right"
    quote = turns[-2].arguments["quote"]
    hop, document = task.data["hops"][-1]["title"], json.loads(pool.read_text().splitlines()[0])["document"]
    assert human.identity(task.data["text"], hop, document, f"  {quote.upper()} ") == name
    assert human.identity(task.data["text"], hop, document, quote + " more") != name


def test_the_version_names_the_answers(tmp_path, play, doubtful):
    pool = tmp_path / "pool.jsonl"
    plain = suite(pool).verifier_version
    assert plain == search.suite(index="fts5").verifier_version and "labels" not in plain
    (name,) = _verdict(pool, play, doubtful).diagnostics["human_pool"]
    assert suite(pool).verifier_version == plain, "a question is no answer"
    human.answer(str(pool), name, True, "ann")
    version = suite(pool).verifier_version
    assert version == f"{plain}+labels:{human.digest({name: True})}"
    human.answer(str(pool), name, True, "bob")
    assert suite(pool).verifier_version == version, "who answered, and how often, changes no verdict"
    human.answer(str(pool), name, False, "bob")
    assert suite(pool).verifier_version not in (plain, version)


def test_a_suite_that_runs_keeps_the_answers_it_began_with(tmp_path, play, doubtful):
    pool = tmp_path / "pool.jsonl"
    made = suite(pool)
    before = play(made, *doubtful).verdict
    human.answer(str(pool), before.diagnostics["human_pool"][0], True, "ann")
    assert play(made, *doubtful).verdict == before


def test_a_replay_names_the_answers_as_the_cause(tmp_path, doubtful):
    pool, (task, turns) = tmp_path / "pool.jsonl", doubtful
    receipt = play_in_process(suite(pool), PlainRenderer(), task, turns, 0).receipt
    assert receipt.verdict is not None and receipt.verdict.outcome is None and receipt.stop is StopReason.COMPLETED
    ref = EnvironmentRef(target="agentrl_envs.search:suite", options={"index": "fts5", "human_pool": str(pool)})
    deadlines = Deadlines(start=60.0, reset=60.0, step=60.0, verify=60.0)
    with Pool(ref, 1, deadlines) as workers:
        assert replay_in(workers, receipt) is None
    human.answer(str(pool), human.waiting(str(pool))[0]["id"], True, "ann")
    with Pool(ref, 1, deadlines) as workers:
        found = replay_in(workers, receipt)
    assert found is not None and (found.where, found.cause) == ("verdict", "verifier")
    answers = human.digest(human.labels(str(pool)))
    assert f"+labels:{answers}, recorded with {receipt.verifier_version}" in found.why


def test_people_read_and_write_the_pool(tmp_path, play, doubtful, capsys):
    pool = tmp_path / "pool.jsonl"
    (name,) = _verdict(pool, play, doubtful).diagnostics["human_pool"]
    assert command.main([str(pool)]) == 0
    said = capsys.readouterr().out
    task, turns = doubtful
    assert name in said and task.data["text"] in said and turns[-2].arguments["quote"] in said and "1 wait" in said
    assert command.main([str(pool), name, "yes", "--by", "ann"]) == 0
    assert json.loads(pool.read_text().splitlines()[-1]) == {"label": name, "supports": True, "by": "ann"}
    assert command.main([str(pool)]) == 0 and "0 wait" in capsys.readouterr().out
    assert command.main([str(pool), "0" * 16, "yes", "--by", "ann"]) == 2
    assert "no question has the id" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([str(pool), name])
    assert "ID needs an answer: yes or no" in capsys.readouterr().err


def test_an_answer_may_be_written_into_the_question_by_hand(tmp_path, play, doubtful):
    pool = tmp_path / "pool.jsonl"
    (name,) = _verdict(pool, play, doubtful).diagnostics["human_pool"]
    (line,) = pool.read_text().splitlines()
    pool.write_text(json.dumps({**json.loads(line), "supports": False}))  # and no end of line, as some editors have it
    assert human.labels(str(pool)) == {name: False} and _verdict(pool, play, doubtful).outcome is False
    human.answer(str(pool), name, True, "ann")
    assert human.labels(str(pool)) == {name: True} and len(pool.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "pool.jsonl:2: not JSON"), ("[1]", "pool.jsonl:2: expected an object"),
     ('{"label": "a", "supports": "yes"}', 'pool.jsonl:2: expected "supports": true or false'),
     ('{"supports": true}', "pool.jsonl:2: expected")],
)  # fmt: skip
def test_a_line_that_is_no_answer_is_named_and_never_passed_over(tmp_path, line, words):
    pool = tmp_path / "pool.jsonl"
    pool.write_text('{"id": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"pool\.jsonl:2") as caught:
        suite(pool)
    assert words in str(caught.value)


def test_no_pool_no_answers(tmp_path):
    assert human.labels(None) == human.labels(str(tmp_path / "none")) == {} and human.digest({}) == ""
    assert isinstance(suite(tmp_path / "none").tasks("train", 1, 0)[0], Task)
