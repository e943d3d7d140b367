"""Small databases of four domains, made from a seed. Proper names of one split appear in no other."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from typing import Any

SPLITS = ("train", "validation", "heldout")
_FIRST = (
    "Ada",
    "Bo",
    "Cem",
    "Dia",
    "Eva",
    "Finn",
    "Gus",
    "Hugo",
    "Ida",
    "Jan",
    "Kai",
    "Lou",
    "Mia",
    "Nils",
    "Ova",
    "Pia",
)
_LAST = {
    "train": ("Abel", "Berg", "Costa", "Dahl", "Engel", "Farah", "Grant", "Holm", "Ivers", "Joshi", "Keller", "Lund"),
    "validation": ("Marsh", "Noor", "Okafor", "Petit"),
    "heldout": ("Quist", "Reyes", "Sato", "Tanaka", "Urban"),
}
_PLACES = {
    "train": ("Arden", "Borough", "Calder", "Denby", "Elmira", "Fairview"),
    "validation": ("Glenrock", "Harwick", "Ilford", "Juniper"),
    "heldout": ("Kelso", "Lynton", "Marlow", "Norwood"),
}
_WORDS = {
    "train": ("Amber", "Birch", "Cedar", "Dune", "Ember", "Flint", "Grove", "Haze", "Iris", "Jade", "Kite", "Lark"),
    "validation": ("Maple", "North", "Onyx", "Pearl"),
    "heldout": ("Quartz", "Ridge", "Slate", "Thorn", "Umber"),
}


@dataclass(frozen=True, slots=True)
class Entity:
    """A table with a unique name, a category and a number, each with the words that questions use for it."""

    table: str
    noun: str  # plural
    name: str  # what the name column holds: "person", "place" or "word"
    category: tuple[str, str, tuple[str, ...]]  # column, words, values; no values: places of the split
    number: tuple[str, str, int, int]  # column, words, least, most


@dataclass(frozen=True, slots=True)
class Domain:
    """Parents and items are linked by events, each of one parent and one item."""

    name: str
    parent: Entity
    item: Entity
    event: str  # table
    events: str  # words, plural
    state: tuple[str, tuple[str, ...]]
    amount: tuple[str, str, int, int]


DOMAINS = (
    Domain(
        "shop",
        Entity("customers", "customers", "person", ("city", "city", ()), ("age", "age", 18, 80)),
        Entity(
            "products",
            "products",
            "word",
            ("kind", "kind", ("tool", "toy", "book", "lamp")),
            ("price", "price", 3, 400),
        ),
        "orders",
        "orders",
        ("status", ("open", "shipped", "returned")),
        ("quantity", "quantity", 1, 12),
    ),
    Domain(
        "clinic",
        Entity("patients", "patients", "person", ("town", "town", ()), ("birth_year", "birth year", 1935, 2015)),
        Entity(
            "doctors",
            "doctors",
            "word",
            ("field", "field", ("heart", "skin", "eye", "bone")),
            ("room", "room number", 1, 60),
        ),
        "visits",
        "visits",
        ("outcome", ("cured", "referred", "repeat")),
        ("minutes", "length in minutes", 5, 90),
    ),
    Domain(
        "library",
        Entity("members", "members", "person", ("district", "district", ()), ("joined", "year of joining", 1990, 2024)),
        Entity(
            "books",
            "books",
            "word",
            ("genre", "genre", ("crime", "poetry", "history", "travel")),
            ("pages", "page count", 60, 900),
        ),
        "loans",
        "loans",
        ("state", ("out", "back", "lost")),
        ("days", "length in days", 1, 60),
    ),
    Domain(
        "rail",
        Entity(
            "stations",
            "stations",
            "place",
            ("region", "region", ("coast", "hills", "plain")),
            ("platforms", "number of platforms", 1, 20),
        ),
        Entity(
            "lines", "lines", "word", ("class", "class", ("local", "fast", "night")), ("speed", "top speed", 60, 300)
        ),
        "stops",
        "stops",
        ("service", ("daily", "weekend", "seasonal")),
        ("wait", "wait in minutes", 1, 30),
    ),
)


def build(domain: Domain, split: str, seed: int) -> bytes:
    """The database as bytes. Some parents have no event, some amounts are missing, and some numbers are equal."""
    rng = random.Random(f"{domain.name}/{split}/{seed}")
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection.executescript(_ddl(domain))
        parents = _entity(connection, domain.parent, split, rng, rng.randrange(10, 17))
        items = _entity(connection, domain.item, split, rng, rng.randrange(8, 13))
        active = rng.sample(parents, len(parents) - rng.randrange(2, 4))
        *_, least, most = domain.amount
        rows: list[tuple[Any, ...]] = []
        for i in range(rng.randrange(30, 61)):
            amount = None if rng.random() < 0.08 else rng.randint(least, most)
            rows.append((i + 1, rng.choice(active), rng.choice(items), rng.choice(domain.state[1]), amount))
        connection.executemany(f"INSERT INTO {domain.event} VALUES (?, ?, ?, ?, ?)", rows)
        return connection.serialize()
    finally:
        connection.close()


def link(entity: Entity) -> str:
    """The column of the events that refers to the entity."""
    return f"{entity.table[:-1]}_id"


def _ddl(domain: Domain) -> str:
    entities = "".join(
        f"CREATE TABLE {e.table} (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, {e.category[0]} TEXT NOT NULL, "
        f"{e.number[0]} INTEGER NOT NULL);"
        for e in (domain.parent, domain.item)
    )
    parent, item = domain.parent, domain.item
    return entities + (
        f"CREATE TABLE {domain.event} (id INTEGER PRIMARY KEY, {link(parent)} INTEGER NOT NULL REFERENCES "
        f"{parent.table}(id), {link(item)} INTEGER NOT NULL REFERENCES {item.table}(id), "
        f"{domain.state[0]} TEXT NOT NULL, {domain.amount[0]} INTEGER);"
    )


def _entity(connection: sqlite3.Connection, entity: Entity, split: str, rng: random.Random, count: int) -> list[int]:
    pools = {
        "person": [f"{first} {last}" for last in _LAST[split] for first in _FIRST],
        "place": [
            f"{place} {end}" for place in _PLACES[split] for end in ("Bridge", "Central", "Park", "Quay", "West")
        ],
        "word": [f"{word} {end}" for word in _WORDS[split] for end in ("One", "Two", "Nova", "Prime")],
    }
    names = rng.sample(pools[entity.name], count)
    categories = entity.category[2] or _PLACES[split][:4]
    ids = sorted(rng.sample(range(100, 1000), count))
    _, _, least, most = entity.number
    numbers = [rng.randint(least, most) for _ in ids]
    rows = [(i, name, rng.choice(categories), number) for i, name, number in zip(ids, names, numbers, strict=True)]
    connection.executemany(f"INSERT INTO {entity.table} VALUES (?, ?, ?, ?)", rows)
    return ids
