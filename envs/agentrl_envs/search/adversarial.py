"""The adversarial set: questions of a held-out set in a corpus with traps. It is no split that training may use.

| hazard | what is there |
| --- | --- |
| near_duplicate | a document of nearly the same title about something else |
| contradiction | a forum post that says a fact with another answer, or another year |
| dead_link | the document is gone; a copy under another title is not |
| flaky_link | the document cannot be reached the first time |
| timeout | the search times out, the first time and every fourth |

A trap is a part of the world and an answer to the policy, which has to cope: the service itself is healthy, so no trap
is reported as one that is down, and none is met on the policy's behalf by asking again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .corpus import FORUM, MIRROR, Document, Hop, Question

HAZARDS = ("near_duplicate", "contradiction", "dead_link", "flaky_link", "timeout")
TIMEOUT_EVERY = 4
YEAR = re.compile(r"\b1[0-9]{3}\b")


def adversarial(
    documents: Sequence[Document], questions: Sequence[Question]
) -> tuple[tuple[Document, ...], tuple[Question, ...]]:
    """The corpus with traps added, and each question with the one that it meets, in turn."""
    by_title = {document.title: document for document in documents}
    answers = sorted({question.answer for question in questions})
    added: dict[str, Document] = {}
    changed = []
    for number, question in enumerate(questions):
        rng = random.Random(f"hazard/{question.id}")
        hazard = HAZARDS[number % len(HAZARDS)]
        trapped = rng.choice(question.hops)
        if hazard == "contradiction":
            post = _forum_post(rng, question, answers)
            hazard, made = ("contradiction", [post]) if post is not None else ("near_duplicate", [])
        else:
            made = []
        if hazard == "near_duplicate":
            made = [_near_duplicate(rng, by_title[trapped.title], documents)]
        if hazard == "dead_link":
            made = [replace(by_title[hop.title], title=_copy(hop.title), origin=MIRROR) for hop in question.hops]
            hops = tuple(replace(hop, copies=(_copy(hop.title),)) for hop in question.hops)
            question = replace(question, hops=hops)
        added.update((document.title, document) for document in made if document.title not in by_title)
        changed.append(replace(question, hazard=hazard))
    return (*documents, *added.values()), tuple(changed)


def hazards(question: Question, handles: Mapping[str, str]) -> dict[str, Any]:
    """What the environment does to an episode: documents that are gone or flaky, searches that time out."""
    rng = random.Random(f"hazard/{question.id}")
    trapped: Hop = rng.choice(question.hops)
    return {
        "gone": [handles[trapped.title]] if question.hazard == "dead_link" else [],
        "flaky": [handles[trapped.title]] if question.hazard == "flaky_link" else [],
        "timeouts": question.hazard == "timeout",
    }


def _copy(title: str) -> str:
    return f"{title} - copy"


def _near_duplicate(rng: random.Random, document: Document, documents: Sequence[Document]) -> Document:
    """Another document's text under this one's name, and a word in brackets that tells them apart."""
    other = rng.choice([candidate for candidate in documents if candidate.title != document.title])
    said = tuple(sentence.replace(other.title, document.title) for sentence in other.sentences)
    first = f"This page is about a namesake, not about {document.title} itself."
    return Document(f"{document.title} ({rng.choice(('namesake', 'disambiguation', 'other'))})", (first, *said))


def _forum_post(rng: random.Random, question: Question, answers: Sequence[str]) -> Document | None:
    """The sentence that holds the answer, with another in its place, or else one with another year; None without."""
    others = [answer for answer in answers if answer != question.answer and answer not in ("yes", "no")]
    for hop in reversed(question.hops):
        for sentence in hop.sentences:
            if question.answer in sentence and hop.title != question.answer and others:
                said = sentence.replace(question.answer, rng.choice(others))
                return _post(hop, said)
    for hop in question.hops:
        for sentence in hop.sentences:
            if (year := YEAR.search(sentence)) is not None:
                return _post(hop, sentence.replace(year.group(), str(int(year.group()) + rng.choice((-60, 60)))))
    return None


def _post(hop: Hop, said: str) -> Document:
    return Document(f"{hop.title}: readers write", (said, "Everyone knows this."), FORUM)
