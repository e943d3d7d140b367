"""Multi-hop questions over a corpus: search, open, cite, answer.

The answer counts only with evidence: for every fact that it rests on, a quote that stands in its source. What no
machine can judge is unscored and goes to a file for people. `suite(...)` is the whole interface.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import chain, islice, zip_longest

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task

from . import env, human, solve, sources, tools, verifier
from .corpus import Question
from .index import Index, opened, resolve
from .options import SOURCES, SPLITS, Options

__all__ = ["SOURCES", "suite"]
VERSION = "1"


def suite(
    source: str = "generated",
    index: str = "auto",
    results: int = 5,
    scoring: str = "exact",
    human_pool: str | None = None,
    system: bool = True,
    max_calls: int = 20,
    sloppiness: float = 0.6,
) -> Suite:
    """The search suite.

    `source`: "generated" (a seeded world, no download), "hotpotqa" (70 questions over their 700 paragraphs), "twowiki"
    (49 annotated questions among 6,225 passages) or "wiki" (both in one corpus). `index`: "bm25s" (extra `search`),
    "fts5" (SQLite alone) or "auto", which is bm25s where it is installed; the spec's version says which. `results`:
    documents a search shows. `scoring`: "exact" (outcome True or False) or "f1". `human_pool`: a file for what only a
    person can judge, and for their answers (`human`), which are read here: once, and named by their digest in the
    verifier's version. `python -m agentrl_envs.search POOL` lists what waits. `sloppiness`: how often a
    demonstration has a slip. Besides train, validation and heldout, `tasks` knows "adversarial": held-out questions
    among near-duplicates, contradictions, dead links and timeouts.

    Raises `data.DataError` if a data set is neither here nor can be fetched, ValueError for an unknown option or a line
    of the pool that cannot be read.
    """
    options = Options(
        source=source, index=resolve(index), results=results, scoring=scoring, human_pool=human_pool,
        system=system, max_calls=max_calls, sloppiness=sloppiness,
    )  # fmt: skip
    budget = Budget(steps=max_calls, tool_calls=max_calls, write_actions=0, retries=5, finishing=("answer",))
    spec = EnvironmentSpec(
        name="search", version=f"{VERSION}+{options.index}", tools=tools.TOOLS, budget=budget, fork="native",
        side_effects="none",
    )  # fmt: skip
    find = partial(_find, options)
    labels = human.labels(human_pool)
    return Suite(
        spec=spec,
        make=lambda: env.SearchEnvironment(spec, find, options.results, options.system),
        tasks=partial(_tasks, options),
        verify=partial(verifier.verify, options, labels, find),
        verifier_version=verifier.VERSION + (f"+labels:{human.digest(labels)}" if labels else ""),
        solve=solve.solve,
        demonstrate=partial(_demonstrate, options),
        attacks=partial(_attacks, find),
        hidden=("answer", "hops", "gone", "flaky"),
    )


def _find(options: Options, key: str) -> Index:
    return opened(key, options.index, partial(sources.corpus, key), kept=options.source != "generated")


def _tasks(options: Options, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` distinct tasks, the kinds in turn, in an order that depends on `seed`; ValueError if there are fewer."""
    if split not in SPLITS:
        raise ValueError(f"search: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    asked = sources.questions(options.source, split)
    if count > len(asked):
        raise ValueError(f"search: {count} tasks of {split!r} asked for, but there are {len(asked)}")
    rng = random.Random(f"{split}/{seed}")
    kinds: dict[str, list[Question]] = {}
    for question in rng.sample(asked, len(asked)):
        kinds.setdefault(question.hazard or question.kind, []).append(question)
    in_turn = chain.from_iterable(zip_longest(*(kinds[kind] for kind in sorted(kinds))))
    chosen = islice((question for question in in_turn if question is not None), count)
    return tuple(_task(options, split, question) for question in chosen)


def _task(options: Options, split: str, question: Question) -> Task:
    key = sources.key(options.source, split)
    documents = _find(options, key)
    titles = [title for hop in question.hops for title in (hop.title, *hop.copies)]
    handles = {title: document.id for title in titles if (document := documents.titled(title)) is not None}
    data = sources.task_data(question, key, handles, closed=options.source == "generated")
    name = f"{options.source}-{split}-{question.id}"
    return Task(id=name, split=split, kind=question.hazard or question.kind, data=data)


def _demonstrate(options: Options, task: Task, seed: int) -> tuple[solve.Turn, ...]:
    others = [question.hops[0].title for question in sources.questions(options.source, task.split)[:200]]
    return solve.demonstrate(options, others, task, seed)


def _attacks(find: Callable[[str], Index], task: Task) -> dict[str, tuple[solve.Turn, ...]]:
    documents = (find(task.data["corpus"]).document(f"d{number}") for number in range(6))
    return solve.attacks([(document.id, document.text) for document in documents if document is not None], task)
