"""A small seeded world of linked people, books, companies, towns, regions and rivers, and questions across it.

Each split has a world with names of its own, so no name, document or question of one split occurs in another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations, zip_longest

from .corpus import Document, Hop, Question

ONSETS = {
    "train": ("Ba", "Do", "Fe", "Gi", "Lu"), "validation": ("Ka", "Mo", "Ne"),
    "heldout": ("Pa", "Ro", "Se", "Ti"), "adversarial": ("Va", "Zo", "We", "Hu"),
}  # fmt: skip
MIDDLES = ("la", "ri", "no", "ve", "tu", "sha", "dre", "mi", "go", "ba")
ENDS = ("n", "rd", "sk", "ll", "m", "nt", "x", "th", "ck", "s")
TRADES = ("printer", "surveyor", "engraver", "botanist", "pilot", "mason")
HOBBIES = ("keeps bees", "collects maps", "plays the flute", "grows roses", "repairs clocks", "rows on the lake")
FIRMS = ("Works", "Mills", "Press", "Lines", "Foundry")
FORMS = ("The Song of", "The Map of", "Letters from", "A History of", "Winter in")
SIZES = {"region": 6, "river": 12, "town": 36, "company": 60, "person": 150, "book": 110}


@dataclass(frozen=True, slots=True)
class World:
    """Every relation by name. `person[p] = (town, year, company)`, `company[c] = (town, year, founder)`,
    `book[b] = (author, year)`, `town[t] = (region, river, inhabitants)`, `region[r] = capital`, `river[v] = region`."""

    person: dict[str, tuple[str, int, str]]
    company: dict[str, tuple[str, int, str]]
    book: dict[str, tuple[str, int]]
    town: dict[str, tuple[str, str, int]]
    region: dict[str, str]
    river: dict[str, str]


@cache
def world(split: str) -> World:
    rng = random.Random(f"world/{split}")
    names = _names(rng, split)
    regions, rivers, towns = ([next(names) for _ in range(SIZES[kind])] for kind in ("region", "river", "town"))
    companies = [f"{next(names)} {rng.choice(FIRMS)}" for _ in range(SIZES["company"])]
    people = [f"{next(names)} {next(names)}" for _ in range(SIZES["person"])]
    books = [f"{rng.choice(FORMS)} {next(names)}" for _ in range(SIZES["book"])]
    return World(
        person={p: (rng.choice(towns), rng.randint(1890, 1980), rng.choice(companies)) for p in people},
        company={c: (rng.choice(towns), rng.randint(1820, 1989), rng.choice(people)) for c in companies},
        book={b: (rng.choice(people), rng.randint(1910, 1999)) for b in books},
        town={t: (rng.choice(regions), rng.choice(rivers), 100 * rng.randint(12, 900)) for t in towns},
        region={r: rng.choice(towns) for r in regions},
        river={v: rng.choice(regions) for v in rivers},
    )


def _names(rng: random.Random, split: str) -> Iterator[str]:
    """Distinct names, in an order drawn once."""
    made = [f"{a}{b}{c}{d}" for a in ONSETS[split] for b in MIDDLES for c in MIDDLES for d in ENDS]
    return iter(rng.sample(made, len(made)))


def documents(split: str) -> list[Document]:
    """One document an entity, its name as the title, each fact in one sentence."""
    made, rng = world(split), random.Random(f"text/{split}")
    pages: dict[str, tuple[str, ...]] = {}
    for name in made.person:
        pages[name] = (born(split, name), employed(split, name), f"{name} {rng.choice(HOBBIES)}.")
    for name, (town, _, _) in made.company.items():
        pages[name] = (f"{name} is a company based in {town}.", founded(split, name))
    for name, (_, year) in made.book.items():
        pages[name] = (written(split, name), f"It was first printed in {year}.")
    for name, (_, _, inhabitants) in made.town.items():
        pages[name] = (in_region(split, name), on_river(split, name), f"It has {inhabitants} inhabitants.")
    for name, capital in made.region.items():
        pages[name] = (f"{name} is a region whose capital is {capital}.",)
    for name, region in made.river.items():
        pages[f"{name} (river)"] = (f"The {name} is a river that rises in {region}.",)
    return [Document(title, sentences) for title, sentences in pages.items()]


def born(split: str, name: str) -> str:
    town, year, _ = world(split).person[name]
    return f"{name} is a {TRADES[(year + len(name)) % len(TRADES)]} who was born in {town} in {year}."


def employed(split: str, name: str) -> str:
    return f"{name} works for {world(split).person[name][2]}."


def founded(split: str, name: str) -> str:
    _, year, founder = world(split).company[name]
    return f"{name} was founded in {year} by {founder}."


def written(split: str, name: str) -> str:
    return f"{name} is a novel written by {world(split).book[name][0]}."


def in_region(split: str, name: str) -> str:
    return f"{name} is a town in the region of {world(split).town[name][0]}."


def on_river(split: str, name: str) -> str:
    return f"The river {world(split).town[name][1]} flows through {name}."


Said = Callable[[str, str], str]


def _question(split: str, kind: str, text: str, answer: str, *facts: tuple[str, Said]) -> Question:
    hops = tuple(Hop(title, (said(split, title),)) for title, said in facts)
    return Question(id=f"{kind}/{text}", text=text, answer=answer, kind=kind, hops=hops)


def _bridges(split: str) -> Iterator[Question]:
    made = world(split)
    for book, (author, _) in made.book.items():
        town = made.person[author][0]
        yield _question(
            split, "bridge", f"In which town was the author of {book} born?", town, (book, written), (author, born)
        )
    for person, (_, _, company) in made.person.items():
        text = f"Who founded the company that {person} works for?"
        founder = made.company[company][2]
        if founder != person:
            yield _question(split, "bridge", text, founder, (person, employed), (company, founded))
    for company, (_, _, founder) in made.company.items():
        text = f"In which town was the founder of {company} born?"
        yield _question(split, "bridge", text, made.person[founder][0], (company, founded), (founder, born))


def _chains(split: str) -> Iterator[Question]:
    made = world(split)
    for book, (author, _) in made.book.items():
        town = made.person[author][0]
        text = f"Which river flows through the town where the author of {book} was born?"
        facts = ((book, written), (author, born), (town, on_river))
        yield _question(split, "chain", text, made.town[town][1], *facts)
    for company, (_, _, founder) in made.company.items():
        town = made.person[founder][0]
        text = f"In which region lies the town where the founder of {company} was born?"
        facts = ((company, founded), (founder, born), (town, in_region))
        yield _question(split, "chain", text, made.town[town][0], *facts)


def _comparisons(split: str) -> Iterator[Question]:
    made = world(split)
    for one, other in combinations(made.company, 2):
        years = made.company[one][1], made.company[other][1]
        if years[0] != years[1]:
            text = f"Which company was founded earlier, {one} or {other}?"
            earlier = one if years[0] < years[1] else other
            yield _question(split, "comparison", text, earlier, (one, founded), (other, founded))
    rng = random.Random(f"pairs/{split}")
    for one, other in combinations(made.person, 2):
        same = made.person[one][0] == made.person[other][0]
        if same or rng.random() < 1 / SIZES["town"]:  # about as many no as yes
            text = f"Were {one} and {other} born in the same town?"
            yield _question(split, "comparison", text, "yes" if same else "no", (one, born), (other, born))


@cache
def questions(split: str) -> tuple[Question, ...]:
    """All questions of a world: bridges, chains and comparisons in turn while there are any."""
    kinds = [list(made(split)) for made in (_bridges, _chains, _comparisons)]
    for kind in kinds:
        random.Random(f"questions/{split}").shuffle(kind)
    return tuple(question for question in chain.from_iterable(zip_longest(*kinds)) if question is not None)
