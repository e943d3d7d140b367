"""The stream: many turns of talk in which facts about a few people appear, change and are to be forgotten.

A fact is (person, attribute, value). No value appears twice in a dialogue, so a note that holds it holds this fact.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

from agentrl_jax.protocol import Task

SPLITS = ("train", "validation", "heldout")
UNKNOWN = "unknown"
PEOPLE = {
    "train": ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Julia", "Kofi", "Lena"),
    "validation": ("Olga", "Pablo", "Qadir", "Rosa", "Sami", "Tara", "Ulla", "Vito"),
    "heldout": ("Wanda", "Xenia", "Yusuf", "Zora", "Arne", "Bela", "Cleo", "Dario", "Esra"),
}  # fmt: skip
_PLACES = (
    "Arden", "Borough", "Calder", "Denby", "Elmira", "Fairview", "Glenrock", "Harwick", "Ilford", "Juniper", "Kelso",
    "Lynton", "Marlow", "Norwood", "Oakham", "Penrith", "Quorn", "Redcar", "Selby", "Thirsk", "Ulverston", "Whitby",
)  # fmt: skip
_PETS = (
    "Rex", "Biscuit", "Nero", "Pepper", "Momo", "Ziggy", "Hazel", "Otis", "Juno", "Waffle", "Fudge", "Pixel", "Tango",
    "Clover", "Smokey", "Ruby", "Basil", "Comet", "Dusty", "Gizmo", "Maple", "Olive",
)  # fmt: skip
_JOBS = (
    "baker", "welder", "nurse", "pilot", "tailor", "plumber", "florist", "lawyer", "dentist", "barber", "surveyor",
    "librarian", "gardener", "chemist", "translator", "carpenter", "optician", "referee", "sculptor", "botanist",
)  # fmt: skip
_DISHES = (
    "goulash", "risotto", "ramen", "paella", "lasagna", "falafel", "pierogi", "ceviche", "moussaka", "gumbo", "tagine",
    "laksa", "poutine", "bibimbap", "schnitzel", "borscht", "empanadas", "dumplings", "ratatouille", "chowder",
)  # fmt: skip
_TOOLS = (
    "cello", "oboe", "banjo", "harp", "trumpet", "bassoon", "flute", "accordion", "mandolin", "tuba", "viola", "sitar",
    "clarinet", "marimba", "zither", "piccolo", "saxophone", "ukulele", "organ", "lute",
)  # fmt: skip
# attribute: (values, or digits of a number), how it is told, corrected, asked for and named
ATTRIBUTES: dict[str, tuple[tuple[str, ...] | int, str, str, str, str]] = {
    "town": (_PLACES, "{p} lives in {v}.", "{p} has moved and lives in {v} now.", "Where does {p} live?", "home town"),
    "pet": (_PETS, "{p} has a dog called {v}.", "I had that wrong, {p}'s dog is called {v}.",
            "What is {p}'s dog called?", "dog's name"),
    "job": (_JOBS, "{p} works as a {v}.", "{p} changed jobs and is a {v} now.", "What does {p} work as?", "job"),
    "dish": (_DISHES, "{p}'s favourite dish is {v}.", "These days {p} likes {v} best.",
             "What is {p}'s favourite dish?", "favourite dish"),
    "instrument": (_TOOLS, "{p} plays the {v}.", "{p} gave that up and plays the {v} now.",
                   "Which instrument does {p} play?", "instrument"),
    "phone": (7, "{p}'s phone number is {v}.", "{p} has a new phone number, {v}.", "What is {p}'s phone number?",
              "phone number"),
}  # fmt: skip
SECRET = (5, "Just between us and not to be kept: {p}'s door code is {v}.", "What is {p}'s door code?")
FORGET = "Please forget {p}'s {name}, {p} does not want it kept."
CHATTER = (
    "The bus was {n} minutes late.", "It rained for {n} hours.", "I read {n} pages last night.",
    "{p} sends greetings.", "I met {p} for tea at half past {n}.", "{p} asked how you are.", "The corner shop closed.",
    "The film took {n} hours.", "My train was full, {n} people stood.", "I still owe {p} a letter.",
    "The kettle broke, a new one costs {n}.", "{p} was in a good mood.", "I slept {n} hours.", "Nothing new today.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long a dialogue is, and how much happens in it."""

    turns: int = 320
    chunk: int = 32
    people: int = 4  # of whom facts are to be kept
    facts: int = 10
    changes: int = 3
    forgets: int = 2
    secrets: int = 2
    others: int = 16  # facts about people who do not matter
    questions: int = 8

    @property
    def chunks(self) -> int:
        return -(-self.turns // self.chunk)

    @property
    def operations(self) -> int:
        """Of the reference: each fact is added once, changed or deleted later."""
        return self.facts + self.changes + self.forgets


def tasks(sizes: Sizes, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` dialogues; the people of one split appear in no other."""
    if split not in SPLITS:
        raise ValueError(f"memory: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    return tuple(_task(sizes, split, f"{split}-{seed}-{index}") for index in range(count))


def _task(sizes: Sizes, split: str, name: str) -> Task:
    rng = random.Random(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))
    values = {attribute: _values(rng, spec[0]) for attribute, spec in ATTRIBUTES.items()}
    values["code"] = _values(rng, SECRET[0])
    people = rng.sample(PEOPLE[split], min(len(PEOPLE[split]), sizes.people + 3))
    kept, others = people[: sizes.people], people[sizes.people :]
    pairs = [(person, attribute) for person in kept for attribute in ATTRIBUTES]
    chosen = rng.sample(pairs, sizes.facts)
    events: list[dict[str, Any]] = []
    for person, attribute in chosen:
        events.append(_event("tell", person, attribute, values[attribute].pop()))
    touched = rng.sample(range(sizes.facts), sizes.changes + sizes.forgets)
    later = [
        _event("change", *chosen[i], values[chosen[i][1]].pop())
        if k < sizes.changes
        else _event("forget", *chosen[i], "")
        for k, i in enumerate(touched)
    ]
    early = _places(rng, sizes, 0.0, 0.4, len(events), set())
    late = _places(rng, sizes, 0.42, 0.7, len(later), set())
    secrets = [_event("secret", person, "code", values["code"].pop()) for person in rng.sample(kept, sizes.secrets)]
    used = {*early, *late}
    hushed = _places(rng, sizes, 0.1, 0.7, len(secrets), used)
    other = [
        _event("other", person, attribute, values[attribute].pop())
        for person, attribute in rng.sample([(p, a) for p in others for a in ATTRIBUTES], min(sizes.others, 3 * 6))
    ]
    placed = dict(zip((*early, *late, *hushed), (*events, *later, *secrets), strict=True))
    placed |= dict(zip(_places(rng, sizes, 0.0, 1.0, len(other), set(placed)), other, strict=True))
    for turn, event in placed.items():
        event["turn"] = turn
    lines = [
        _line(placed[turn])
        if turn in placed
        else rng.choice(CHATTER).format(p=rng.choice(people), n=rng.randrange(2, 12))
        for turn in range(sizes.turns)
    ]
    untold = rng.choice([pair for pair in pairs if pair not in chosen])
    questions = _questions(rng, sizes, [placed[turn] for turn in sorted(placed)], untold)
    data = {"people": kept, "lines": lines, "events": [placed[turn] for turn in sorted(placed)], "questions": questions}
    return Task(id=name, split=split, kind="dialogue", data=data)


def _values(rng: random.Random, spec: tuple[str, ...] | int) -> list[str]:
    if isinstance(spec, int):
        return [str(number) for number in rng.sample(range(10 ** (spec - 1), 10**spec), 40)]
    return rng.sample(spec, len(spec))


def _event(kind: str, person: str, attribute: str, value: str) -> dict[str, Any]:
    return {"kind": kind, "person": person, "attribute": attribute, "value": value}


def _places(rng: random.Random, sizes: Sizes, start: float, end: float, count: int, used: set[int]) -> list[int]:
    free = [turn for turn in range(int(start * sizes.turns), int(end * sizes.turns)) if turn not in used]
    return sorted(rng.sample(free, count))


def _line(event: dict[str, Any]) -> str:
    person, attribute, value = event["person"], event["attribute"], event["value"]
    if event["kind"] == "secret":
        return SECRET[1].format(p=person, v=value)
    _, told, changed, _, name = ATTRIBUTES[attribute]
    if event["kind"] == "forget":
        return FORGET.format(p=person, name=name)
    return (changed if event["kind"] == "change" else told).format(p=person, v=value)


def current(events: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """What is to be known after these events, of the people who matter."""
    known: dict[tuple[str, str], str] = {}
    for event in events:
        key = (event["person"], event["attribute"])
        if event["kind"] in ("tell", "change"):
            known[key] = event["value"]
        elif event["kind"] == "forget":
            known.pop(key, None)
    return known


def _questions(rng: random.Random, sizes: Sizes, events: list[dict[str, Any]], untold: tuple[str, str]) -> list[dict]:
    """Every change, forgotten fact and one secret is asked for, one thing never told, the rest about plain facts."""
    known = current(events)
    changed = [(e["person"], e["attribute"]) for e in events if e["kind"] == "change"]
    forgotten = [(e["person"], e["attribute"]) for e in events if e["kind"] == "forget"]
    secret = [(e["person"], "code") for e in events if e["kind"] == "secret"][:1]
    plain = [key for key in known if key not in changed]
    asked = [*forgotten, *secret, untold, *changed]
    asked = [*asked, *rng.sample(plain, max(1, min(len(plain), sizes.questions - len(asked))))]
    rng.shuffle(asked)
    return [
        {
            "text": (SECRET[2] if attribute == "code" else ATTRIBUTES[attribute][3]).format(p=person),
            "person": person,
            "attribute": attribute,
            "answer": known.get((person, attribute), UNKNOWN),
        }
        for person, attribute in asked
    ]
