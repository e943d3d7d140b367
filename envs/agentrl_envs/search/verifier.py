"""The verifier: the answer by exact match, and for every hop a quote that stands in its source and supports it.

    success = citations are real  and  the actions explain the final state  and  the answer matches  and  all hops cited

A quote supports a hop when it is (a part of) the annotated sentence of a document that holds it. A quote from elsewhere
may be as good if it names what the hop is about: no machine can tell, so where the answer is right and only such quotes
are in doubt, the episode is unscored and goes to the human pool. What people answer there decides from the next start
on, and the verifier's version names it. In a generated world nothing is said twice, so every quote can be judged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl_jax.protocol import Action, Check, Json, Snapshot, StopReason, Task, Verdict

from ..endings import unfinished
from . import human, scoring, tools
from .corpus import FORUM
from .index import Index
from .options import Options

VERSION = "3"


class Doubt(NamedTuple):
    """A quote that may support a hop: its id in the human pool, the hop, the document's title, the quote."""

    id: str
    hop: Mapping[str, Any]
    document: str
    quote: str


def verify(
    options: Options,
    labels: Mapping[str, bool],
    index: Callable[[str], Index],
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """Measures one episode. Outcome: a bool, or with `scoring="f1"` the answer's F1 times the share of hops cited
    (1.0 only for an exact answer); None where it hangs on a quote that only a person can judge. `labels`: what people
    have judged, by the quote's id.
    Quality: 1 - (calls beyond the reference's) / (the reference's), at least 0, times the share of quotes that support
    a hop."""
    start, end = json.loads(initial.data), json.loads(final.data)
    documents = index(start["corpus"])
    replayed, calls, invalid = _replay(documents, options.results, start, actions)
    explained = replayed == end
    fabricated = [
        f"{handle}: {quote[:80]}" for handle, quote in end["citations"] if not _real(documents, handle, quote)
    ]
    cited = [_hop_cited(hop, end["citations"]) for hop in task.data["hops"]]
    doubts = [] if task.data["closed"] else _doubts(documents, task.data, cited, end["citations"])
    vouched = [doubt for per_hop in doubts for doubt in per_hop if labels.get(doubt.id)]
    cited = [
        done or any(doubt.hop is hop for doubt in vouched) for hop, done in zip(task.data["hops"], cited, strict=True)
    ]
    good = {scoring.plain(doubt.quote) for doubt in vouched}
    supporting = sum(
        scoring.plain(given[1]) in good or any(_hop_cited(hop, [given]) for hop in task.data["hops"])
        for given in end["citations"]
    )
    precision = supporting / max(1, len(end["citations"]))
    answer, gold = end["answer"], task.data["answer"]
    matches = answer is not None and scoring.exact(answer, gold)
    f1 = 0.0 if answer is None else scoring.f1(answer, gold)
    doubtful = _undecided(doubts, cited, labels)
    outcome: bool | float | None = _outcome(options.scoring, matches, f1, cited)
    diagnostics: dict[str, Json] = {
        "calls": calls, "invalid_calls": invalid, "searches": end["searches"], "opened": len(end["opened"]),
        "answered": answer is not None, "unfinished": unfinished(answer is not None, stop),
        "exact_match": matches, "f1": round(f1, 4), "hops": len(cited), "hops_cited": sum(cited),
        "citations": len(end["citations"]),
        "support_opened": sum(not set(end["opened"]).isdisjoint(hop["documents"]) for hop in task.data["hops"]),
        "hazard": task.data["hazard"],
    }  # fmt: skip
    if vouched:
        diagnostics["vouched"] = [doubt.id for doubt in vouched]
    if matches and not all(cited) and doubtful and explained and not fabricated:
        outcome = None
        diagnostics["unscored"] = "a quote that only a person can judge"
        diagnostics |= _ask_a_person(options.human_pool, task, answer, doubtful)
    return Verdict(
        constraints=(
            Check(name="quotes_exist", passed=not fabricated, evidence="; ".join(fabricated)),
            Check(
                name="actions_explain_state",
                passed=explained,
                evidence="" if explained else "the actions do not lead to the final state",
            ),
        ),
        outcome=outcome,
        quality=max(0.0, 1.0 - max(0, calls - task.data["calls"]) / task.data["calls"]) * precision,
        diagnostics=diagnostics,
        evidence=tuple(f"{handle}: {quote}" for handle, quote in end["citations"]),
    )


def _replay(
    index: Index, results: int, start: dict[str, Any], actions: Sequence[Action]
) -> tuple[dict[str, Any], int, int]:
    """The state that the actions lead to, the calls made and how many of them were no use."""
    state, calls, invalid = json.loads(json.dumps(start)), 0, 0
    for action in actions:
        if state["answer"] is not None:
            break
        if action.error is not None or not action.calls:
            calls, invalid = calls + 1, invalid + 1
            continue
        for call in action.calls:
            if state["answer"] is None:
                reply = tools.execute(index, results, state, call)
                calls, invalid = calls + 1, invalid + (reply.status is tools.Status.INVALID_ACTION)
    return state, calls, invalid


def _outcome(how: str, matches: bool, f1: float, cited: Sequence[bool]) -> bool | float:
    if how == "exact":
        return matches and all(cited)
    share = sum(cited) / len(cited)
    return 1.0 if matches and share == 1.0 else min(f1 * share, 0.99)


def _real(index: Index, handle: str, quote: str) -> bool:
    document = index.document(handle)
    return document is not None and scoring.quoted_in(quote, document.text)


def _hop_cited(hop: Mapping[str, Any], citations: Sequence[Sequence[str]]) -> bool:
    return any(handle in hop["documents"] and scoring.supports(quote, hop["sentences"]) for handle, quote in citations)


def _doubts(
    index: Index, data: Mapping[str, Any], cited: Sequence[bool], citations: Sequence[Sequence[str]]
) -> list[list[Doubt]]:
    """What may support each hop that no annotated sentence was quoted for: at least four words, not from a forum, that
    name the hop's title or hold its answer."""
    found = []
    for hop, done in zip(data["hops"], cited, strict=True):
        names = [hop["title"], hop["title"].split(" (")[0]]
        if data["answer"] not in ("yes", "no") and scoring.mentions(" ".join(hop["sentences"]), [data["answer"]]):
            names.append(data["answer"])
        may: dict[str, Doubt] = {}
        for handle, quote in () if done else citations:
            document = index.document(handle)
            if document is None or document.origin == FORUM or len(quote.split()) < scoring.MIN_WORDS:
                continue
            if scoring.mentions(quote, names) and not any(_hop_cited(h, [(handle, quote)]) for h in data["hops"]):
                name = human.identity(data["text"], hop["title"], document.title, quote)
                may[name] = Doubt(name, hop, document.title, quote)
        found.append(list(may.values()))
    return found


def _undecided(doubts: Sequence[Sequence[Doubt]], cited: Sequence[bool], labels: Mapping[str, bool]) -> list[Doubt]:
    """The quotes that nobody has judged, of the hops that are not cited; nothing if one of these hops has none: such an
    episode does not hang on a person."""
    left = [[doubt for doubt in may if doubt.id not in labels] for may in doubts]
    left = [may for may, done in zip(left, cited, strict=False) if not done]
    return [doubt for may in left for doubt in may] if all(left) else []


def _ask_a_person(path: str | None, task: Task, answer: str | None, doubtful: Sequence[Doubt]) -> dict[str, Json]:
    if path is None:
        return {"human_pool": "no file: set human_pool"}
    try:
        for doubt in doubtful:
            human.append(
                path,
                {
                    "id": doubt.id, "task": task.id, "question": task.data["text"], "answer": answer,
                    "expected": task.data["answer"], "hop": doubt.hop["title"], "annotated": doubt.hop["sentences"],
                    "document": doubt.document, "quote": doubt.quote, "verifier": VERSION,
                },
            )  # fmt: skip
    except OSError as error:
        return {"human_pool": f"not written: {error}", "cause": "evaluator"}
    return {"human_pool": [doubt.id for doubt in doubtful]}
