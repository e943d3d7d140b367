"""Generates one tenant from a seed, with the request's scenario planted in it.

The same seed, split, kind and reason always give the same rows, so a task carries the seed and not the database.
Within a tenant all short handles differ, so a number names one record.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from .options import INTENTS
from .schema import Handle

NOUNS = (
    "lamp", "mug", "chair", "desk", "kettle", "jacket", "boots", "watch", "tent", "puzzle",
    "camera", "skates", "blender", "helmet", "speaker", "bottle", "shirt", "mouse", "keyboard", "vacuum",
)  # fmt: skip
STATUSES = ("pending", "processed", "delivered", "cancelled")
NEEDED_STATUS = {
    "cancel": "pending", "address": "pending", "payment": "pending", "return": "delivered", "exchange": "delivered",
}  # fmt: skip
METHOD_KINDS = ("credit_card", "paypal", "gift_card")
FIRST_NAMES = (
    "Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Ivan", "Julia",
    "Kofi", "Lena", "Mei", "Noah", "Olga", "Pablo", "Rosa", "Sami", "Tara", "Yusuf",
)  # fmt: skip
LAST_NAMES = {  # a customer of one split never has a last name of another
    "train": ("Lopez", "Kim", "Silva", "Novak", "Brown", "Rossi", "Santos", "Patel", "Ito", "Muller", "Khan", "Davis"),
    "validation": ("Garcia", "Lee", "Moore", "Johansson"),
    "heldout": ("Martin", "Nguyen", "Wilson", "Kovacs", "Ahmed"),
}
STREETS = ("oak", "hill", "lake", "park", "river", "mill")
# Short customer handles: train is even; validation and heldout are odd. Orders and products use all 100 numbers.
SHORT_CUSTOMERS = {"train": range(0, 100, 2), "validation": range(1, 100, 4), "heldout": range(3, 100, 4)}
COUNTS = {"customers": 4, "products": 6, "orders": 8, "addresses": 4, "payments": 5}


class Cast(NamedTuple):
    """Who plays what in the request."""

    customer: Handle
    name: str
    order: Handle
    product: Handle
    noun: str
    new_product: Handle
    address: Handle
    method: Handle


class Tenant(NamedTuple):
    rows: dict[str, list[tuple[Any, ...]]]
    cast: Cast


def build(seed: int, split: str, kind: str, reason: str, handles: str) -> Tenant:
    """The tenant of a task. `reason` is why the request must be refused ("" if it is allowed)."""
    rng = random.Random(seed)
    names = _names(rng, split)
    book = _short_handles(rng, split) if handles == "short" else _real_handles(rng, names)
    customers, products, addresses = book["customers"], book["products"], book["addresses"]
    payments = _payments(rng, book)
    stock = {product: rng.choice((0, 0, 1, 2, 3, 5, 8)) for product in products}
    nouns = dict(zip(products, rng.sample(NOUNS, len(products)), strict=True))
    orders = _orders(rng, book, payments)

    me = customers[0]
    owner = me if reason != "owner" else rng.choice(customers[1:])
    target = rng.choice([i for i, order in enumerate(orders) if order[1] == owner])
    order = orders[target]
    intent = kind.removesuffix("_by_product")
    status = order[3]
    if intent in INTENTS:
        needed = NEEDED_STATUS[intent]
        status = rng.choice([s for s in STATUSES if s != needed]) if reason == "status" else needed
    orders[target] = order = (*order[:3], status, *order[4:])
    new_product = rng.choice([p for p in products if p != order[2]])
    stock[new_product] = 0 if reason == "stock" else rng.choice((1, 2, 3, 5, 8))
    if reason == "method":
        method = rng.choice([row[0] for row in payments if row[1] != me])
    else:
        method = rng.choice([row[0] for row in payments if row[1] == me and row[0] != order[4]])
    address = rng.choice([a for a in addresses if a != order[5]])
    cast = Cast(me, names[0], order[0], order[2], nouns[order[2]], new_product, address, method)
    rows: dict[str, list[tuple[Any, ...]]] = {
        "customers": list(zip(customers, names, strict=True)),
        "addresses": [(a, f"{rng.randrange(1, 100)} {rng.choice(STREETS)} street") for a in addresses],
        "payments": payments,
        "products": [(p, nouns[p], rng.randrange(5, 500), stock[p]) for p in products],
        "orders": orders,
    }
    return Tenant(rows, cast)


def _names(rng: random.Random, split: str) -> list[str]:
    firsts = rng.sample(FIRST_NAMES, COUNTS["customers"])
    return [f"{first} {rng.choice(LAST_NAMES[split])}" for first in firsts]


def _short_handles(rng: random.Random, split: str) -> dict[str, list[Handle]]:
    book: dict[str, list[Handle]] = {"customers": list(rng.sample(SHORT_CUSTOMERS[split], COUNTS["customers"]))}
    rest = iter([n for n in rng.sample(range(100), 31) if n not in book["customers"]])
    for table in ("products", "orders", "addresses", "payments"):
        book[table] = [next(rest) for _ in range(COUNTS[table])]
    return book


def _real_handles(rng: random.Random, names: Sequence[str]) -> dict[str, list[Handle]]:
    def numbers(table: str, digits: int) -> list[int]:
        return rng.sample(range(10 ** (digits - 1), 10**digits), COUNTS[table])

    return {
        "customers": [
            f"{name.lower().replace(' ', '_')}_{n}" for name, n in zip(names, numbers("customers", 4), strict=True)
        ],
        "products": [str(n) for n in numbers("products", 10)],
        "orders": [f"#W{n}" for n in numbers("orders", 7)],
        "addresses": [f"addr_{n}" for n in numbers("addresses", 5)],
        "payments": [f"{rng.choice(METHOD_KINDS)}_{n}" for n in numbers("payments", 7)],
    }


def _payments(rng: random.Random, book: dict[str, list[Handle]]) -> list[tuple[Any, ...]]:
    """The requesting customer (the first) has two methods, so that there is one to change to; the others have one."""
    owners = (book["customers"][0], *book["customers"])
    rows = []
    for handle, owner in zip(book["payments"], owners, strict=True):
        kind = handle.rsplit("_", 1)[0] if isinstance(handle, str) else rng.choice(METHOD_KINDS)
        rows.append((handle, owner, kind))
    return rows


def _orders(rng: random.Random, book: dict[str, list[Handle]], payments: Sequence[tuple]) -> list[tuple[Any, ...]]:
    """Two or three orders for the requesting customer, the rest spread; no customer has one product twice."""
    customers, products = book["customers"], book["products"]
    mine = rng.choice((2, 3))
    others = customers[1:]
    owners = [customers[0]] * mine + [others[i % len(others)] for i in range(COUNTS["orders"] - mine)]
    bought = {customer: iter(rng.sample(products, len(products))) for customer in customers}
    methods = {customer: [row[0] for row in payments if row[1] == customer] for customer in customers}
    return [
        (
            handle, owner, next(bought[owner]), rng.choice(STATUSES), rng.choice(methods[owner]),
            rng.choice(book["addresses"]),
        )
        for handle, owner in zip(book["orders"], owners, strict=True)
    ]  # fmt: skip
