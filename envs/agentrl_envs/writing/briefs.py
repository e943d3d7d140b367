"""Generated briefs: a notice to write, the rough draft to start from, and the draft to be better than."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from agentrl_jax.protocol import ToolCall

from .rules import measure

SUBJECTS = {
    "train": ("the spring walk", "the book exchange", "the choir evening", "the repair morning", "the chess week",
              "the seed market", "the bicycle check", "the soup lunch"),
    "validation": ("the kite day", "the lantern tour", "the map course", "the orchard picnic"),
    "heldout": ("the boat parade", "the quiz night", "the pottery class", "the garden sale", "the film club"),
}  # fmt: skip
PLACES = ("the north gate", "hall seven", "the old mill", "the round table", "the library steps", "the red barn")
PEOPLE = ("Ada Brill", "Tom Vesey", "Nia Okoro", "Jan Maes", "Lea Funk", "Sam Ortiz")
THINGS = ("a warm coat", "a water bottle", "two pencils", "a small lamp", "an old towel", "your own cup")
MONTHS = ("March", "April", "May", "June", "September", "October")
CLOSINGS = ("With thanks", "Kind regards", "See you soon", "Until then")
TEAMS = ("the office team", "the friends of the house", "the people at the desk")
FORBIDDEN = ("very", "amazing", "simply", "exciting", "awesome", "truly")
POINTS = {
    "date": ("It takes place on {} and begins after breakfast.", "Please keep {} free in your diary for it."),
    "place": ("Everyone meets at {} a little before the start.", "We come together at {} and go on from there."),
    "contact": ("Questions are answered by {} on every working day.", "Please turn to {} if anything is unclear."),
    "cost": ("Taking part costs {} for each grown person.", "The price of {} covers food and all material."),
    "item to bring": ("It helps a lot if you bring {} along.", "Nobody should come without {} on that day."),
    "deadline": ("Names are taken down until {} at the front desk.", "The list stays open until {} for all of you."),
}  # fmt: skip
OPENING = "We would like to tell all of you about {} in good time."
GLAD = "We are glad about everyone who comes along."
SECOND = "Here is what else you should know beforehand."
FILLERS = (
    "Children are welcome and so are guests from out of town.", "There will be tea and bread for whoever is hungry.",
    "If it rains we move indoors and carry on as planned.", "Last year many of you came and stayed until dusk.",
)  # fmt: skip
SPOILERS = ("title", "point", "forbidden", "closing", "no closing")


@dataclass(slots=True)
class Draft:
    """Lines, and the calls that undo what was spoiled, last first."""

    lines: list[str]
    undo: list[ToolCall]


def brief(rng: random.Random, split: str) -> dict[str, Any]:
    """What is asked for, as data."""
    day = f"{rng.randint(8, 28)} {rng.choice(MONTHS)}"
    values = {
        "date": day, "place": rng.choice(PLACES), "contact": rng.choice(PEOPLE), "item to bring": rng.choice(THINGS),
        "cost": f"{rng.randint(2, 40)} euros", "deadline": f"the end of {rng.choice(('January', 'February', 'July'))}",
    }  # fmt: skip
    names = rng.sample(sorted(values), rng.choice((3, 4)))
    return {
        "subject": rng.choice(SUBJECTS[split]), "title_words": 9, "paragraphs": 3, "closing": rng.choice(CLOSINGS),
        "points": [{"name": name, "phrase": values[name]} for name in names],
        "forbidden": rng.sample(FORBIDDEN, 2), "team": rng.choice(TEAMS), "words": [0, 0],
    }  # fmt: skip


def wording(asked: Mapping[str, Any]) -> str:
    """What is asked for, in words: everything that the rules measure is said."""
    points = "\n".join(f"- the {point['name']}: {point['phrase']}" for point in asked["points"])
    forbidden = " and ".join(f'"{word}"' for word in asked["forbidden"])
    return (
        f"Write a notice about {asked['subject']}.\n"
        f"The first line is a title of at most {asked['title_words']} words that names {asked['subject']}; an empty "
        f"line follows. Then {asked['paragraphs']} paragraphs with an empty line between them; the last one begins "
        f'with "{asked["closing"]}".\n'
        f"In all {asked['words'][0]} to {asked['words'][1]} words. Say each of these in a sentence of its own of 5 to "
        f"30 words, written as here:\n{points}\n"
        f"Do not use the words {forbidden}. Do not say a sentence twice."
    )


def text(rng: random.Random, asked: Mapping[str, Any]) -> list[str]:
    """A notice that does all that is asked."""
    said = [rng.choice(POINTS[point["name"]]).format(point["phrase"]) for point in asked["points"]]
    half = len(said) // 2
    return [
        f"A word about {asked['subject']}", "",
        " ".join([OPENING.format(asked["subject"]), *said[:half], GLAD]), "",
        " ".join([SECOND, *said[half:], *rng.sample(FILLERS, 2)]), "",
        f"{asked['closing']}, {asked['team']}.",
    ]  # fmt: skip


def spoil(rng: random.Random, asked: Mapping[str, Any], how: str, draft: Draft) -> None:
    """Spoils the draft in one way and notes the call that undoes it."""
    now = draft.lines
    if how == "title":
        draft.undo.append(ToolCall(name="insert", arguments={"line": 1, "text": f"{now[0]}\n"}))
        del now[:2]
    elif how == "closing":
        draft.undo.append(ToolCall(name="replace_line", arguments={"line": len(now), "text": now[-1]}))
        now[-1] = "Bye."
    elif how == "no closing":
        draft.undo.append(ToolCall(name="append", arguments={"text": f"\n{now[-1]}"}))
        del now[-2:]
    elif how == "forbidden":
        word = rng.choice(asked["forbidden"])
        _change(draft, GLAD, GLAD.replace("glad", f"{word} glad"))
    else:
        point = rng.choice(asked["points"])
        sentence = next(s for line in now for s in _sentences(line) if f" {point['phrase']}" in f" {s}")
        before = next(b for line in now for b, s in _pairs(line) if s == sentence)
        _change(draft, f"{before} {sentence}", before)


def _change(draft: Draft, old: str, new: str) -> None:
    at = next(i for i, line in enumerate(draft.lines) if old in line)
    draft.lines[at] = draft.lines[at].replace(old, new)
    draft.undo.append(ToolCall(name="replace", arguments={"old": new, "new": old}))


def _sentences(line: str) -> list[str]:
    return [part if part.endswith(".") else f"{part}." for part in line.split(". ")]


def _pairs(line: str) -> list[tuple[str, str]]:
    said = _sentences(line)
    return list(pairwise(said))


def task_data(rng: random.Random, split: str) -> dict[str, Any]:
    """A brief with the rough draft (three faults), the rival and the calls that mend the former.

    The rival is drawn until it is better than the rough draft by the brief's rules and yet breaks one of them."""
    asked = brief(rng, split)
    good = text(rng, asked)
    count = len(" ".join(good).split())
    asked["words"] = [count - 12, count + 15]
    faults = [*rng.sample(SPOILERS[:3], 2), rng.choice(SPOILERS[3:])]
    rough = Draft(list(good), [])
    for how in faults:
        spoil(rng, asked, how, rough)
    start = "\n".join(rough.lines)
    rival = _rival(rng, asked, sum(measure(asked, start).values()))
    return {
        "brief": {"text": wording(asked), **asked},
        "draft": start,
        "rival": rival,
        "mends": [[call.name, dict(call.arguments)] for call in reversed(rough.undo)],
        "faults": faults,
    }


def _rival(rng: random.Random, asked: Mapping[str, Any], more_than: int) -> str:
    while True:
        rival = Draft(text(rng, asked), [])
        for how in rng.sample(SPOILERS[:4], rng.choice((1, 2))):
            spoil(rng, asked, how, rival)
        met = measure(asked, "\n".join(rival.lines)).values()
        if more_than < sum(met) < len(met):
            return "\n".join(rival.lines)
