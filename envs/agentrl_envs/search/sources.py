"""Where documents and questions come from: a generated world, HotpotQA's sample, 2Wiki's passages, or both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .. import data
from ..sets.hotpotqa import HOTPOTQA
from ..sets.twowiki import TWOWIKI, records
from . import adversarial, world
from .corpus import Corpus, Document, Hop, Question, numbered, split_sentences, stable_split

SHARES = (("train", 0.6), ("validation", 0.2), ("heldout", 0.2))
SETS = {"hotpotqa": (HOTPOTQA,), "twowiki": (TWOWIKI,), "wiki": (HOTPOTQA, TWOWIKI)}
TRAPPED = 100  # questions of the generated adversarial set
ANSWER = re.compile(r"answer is:? (.*?)\.?\s*$")


def key(source: str, split: str) -> str:
    """The name of the corpus that a split is searched in. Questions of a data set share one corpus; a generated split
    has a world of its own. A data set's key holds the start of a sum of its sums: another version is another corpus."""
    if source == "generated":
        return f"generated-{split}"
    sums = "".join(file.sha256 for entry in SETS[source] for file in entry.files.values())
    trapped = "-adversarial" if split == "adversarial" else ""
    return f"{source}{trapped}-{hashlib.sha256(sums.encode()).hexdigest()[:8]}"


def corpus(name: str) -> Corpus:
    """The corpus of a key."""
    source, split = name.split("-")[:2]
    if source == "generated":
        return numbered(name, _generated(split)[0])
    return numbered(name, _trapped(source)[0] if split == "adversarial" else _read(source)[0])


@cache
def questions(source: str, split: str) -> tuple[Question, ...]:
    """All questions of a split, in one order."""
    if source == "generated":
        return _generated(split)[1]
    if split == "adversarial":
        return _trapped(source)[1]
    return tuple(question for question in _read(source)[1] if stable_split(question.id, SHARES) == split)


def _generated(split: str) -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    documents, asked = tuple(world.documents(split)), world.questions(split)
    return adversarial.adversarial(documents, asked[:TRAPPED]) if split == "adversarial" else (documents, asked)


@cache
def _trapped(source: str) -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    return adversarial.adversarial(_read(source)[0], questions(source, "heldout"))


@cache
def _read(source: str) -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    return READERS[source]()


def _hotpotqa() -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    """The paragraphs of all questions make one corpus."""
    pages: dict[str, tuple[str, ...]] = {}
    asked = []
    for row in data.load(HOTPOTQA)["distractor_sample_70.jsonl"]:
        context = {title: [sentence.strip() for sentence in sentences] for title, sentences in row["context"]}
        pages |= {title: tuple(sentences) for title, sentences in context.items()}
        facts: dict[str, list[str]] = {}
        for title, number in row["supporting_facts"]:
            facts.setdefault(title, []).append(context[title][number])
        hops = tuple(Hop(title, tuple(sentences)) for title, sentences in facts.items())
        asked.append(Question(id=row["id"], text=row["question"], answer=row["answer"], kind=row["type"], hops=hops))
    return tuple(Document(title, sentences) for title, sentences in pages.items()), tuple(asked)


def _twowiki() -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    """The passages are distractors. What supports the annotated questions is (but for two) not among them, so the
    annotation's snippets stand for those passages; MuSiQue's annotations have no snippets and are left out."""
    files = data.load(TWOWIKI)
    pages = {row["title"]: split_sentences(row["text"]) for row in files["corpus.json"]}
    asked = []
    for kind in ("2wikimultihopqa", "hotpotqa"):
        for row in records(files[f"ircot_annotations_{kind}.jsonnet"]):
            facts: dict[str, list[str]] = {}
            for step in row["reasoning_steps"]:
                for paragraph in step["paragraphs"]:
                    if paragraph["title"] is not None:
                        facts.setdefault(paragraph["title"], []).append(paragraph["supporting_snippet"].strip())
            for title, snippets in facts.items():
                known = pages.get(title, ())
                pages[title] = (*known, *(snippet for snippet in snippets if snippet not in known))
            answer = ANSWER.search(row["reasoning_steps"][-1]["cot_sent"])
            assert answer is not None, row["question_id"]
            hops = tuple(Hop(title, tuple(snippets)) for title, snippets in facts.items())
            text = row["question_text"].strip()
            asked.append(Question(id=row["question_id"], text=text, answer=answer.group(1), kind=kind, hops=hops))
    return tuple(Document(title, sentences) for title, sentences in pages.items()), tuple(asked)


def _wiki() -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    """Both sets' questions over all their documents; a title of both has the sentences of both."""
    pages: dict[str, dict[str, None]] = {}
    for source in ("hotpotqa", "twowiki"):
        for document in _read(source)[0]:
            pages.setdefault(document.title, {}).update(dict.fromkeys(document.sentences))
    documents = tuple(Document(title, tuple(sentences)) for title, sentences in pages.items())
    return documents, (*_read("hotpotqa")[1], *_read("twowiki")[1])


READERS: Mapping[str, Callable[[], tuple[tuple[Document, ...], tuple[Question, ...]]]] = {
    "hotpotqa": _hotpotqa, "twowiki": _twowiki, "wiki": _wiki,
}  # fmt: skip


def task_data(question: Question, name: str, handles: Mapping[str, str], *, closed: bool) -> dict[str, Any]:
    """A question as a task's data. `closed`: the world says nothing twice, so every quote can be judged."""
    hops = [
        {
            "title": hop.title, "sentences": list(hop.sentences), "copies": list(hop.copies),
            "documents": [handles[title] for title in (hop.title, *hop.copies)],
        }
        for hop in question.hops
    ]  # fmt: skip
    return {
        "text": question.text, "answer": question.answer, "hops": hops, "corpus": name, "closed": closed,
        "hazard": question.hazard, "calls": 3 * len(hops) + 1, **adversarial.hazards(question, handles),
    }  # fmt: skip
