"""How requests are worded: a frame around a core phrase.

Each split has frames and cores of its own. Validation and heldout use no word that train does not use, but arrange
them in sentences that train never shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from .options import SPLITS

Table = Mapping[str, tuple[str, ...]]

PLAIN_FRAMES: Table = {
    "train": (
        "customer {c} : {core}",
        "customer {c} wants to {core}",
        "please {core} for customer {c}",
        "{core} please , i am customer {c}",
        "i am customer {c} and i want to {core}",
        "can you {core} for customer {c} ?",
    ),
    "validation": (
        "can customer {c} {core} ?",
        "i want you to {core} , i am customer {c}",
        "for customer {c} please {core}",
        "you can {core} for customer {c} please",
    ),
    "heldout": (
        "i am customer {c} , can you {core} ?",
        "customer {c} : please {core}",
        "customer {c} wants you to {core}",
        "please , i want to {core} for customer {c}",
    ),
}
PLAIN_CORES: Mapping[str, Table] = {
    "cancel": {
        "train": ("cancel {x}", "stop {x}", "call off {x}", "drop {x} now"),
        "validation": ("stop and cancel {x}", "call {x} off"),
        "heldout": ("cancel {x} now", "drop and cancel {x}", "stop {x} now"),
    },
    "return": {
        "train": ("return {x}", "send {x} back", "give back {x}", "bring {x} back now"),
        "validation": ("send back {x}", "bring back {x} now"),
        "heldout": ("return {x} now", "bring back {x}", "give {x} back"),
    },
    "exchange": {
        "train": (
            "exchange {x} for product {n}", "swap {x} for product {n}", "trade {x} and get product {n}",
            "replace {x} with product {n} now",
        ),
        "validation": ("swap {x} and get product {n}", "trade {x} for product {n}"),
        "heldout": (
            "exchange {x} and get product {n}", "replace {x} now with product {n}", "swap {x} with product {n}",
        ),
    },
    "address": {
        "train": (
            "send {x} to address {a}", "ship {x} to address {a}", "move {x} to address {a} now",
            "use address {a} for {x}",
        ),
        "validation": ("move {x} now to address {a}", "ship {x} now to address {a}"),
        "heldout": ("send and move {x} to address {a}", "use address {a} now for {x}", "send {x} to address {a} now"),
    },
    "payment": {
        "train": (
            "pay {x} with method {m}", "charge {x} to method {m}", "bill {x} to method {m} now",
            "use method {m} for {x}",
        ),
        "validation": ("charge {x} with method {m}", "pay for {x} with method {m}"),
        "heldout": ("bill {x} with method {m}", "use method {m} to pay {x}", "charge {x} to method {m} now"),
    },
}  # fmt: skip
PLAIN_TARGET = {"order": "order {o}", "product": "the {p}"}

FREE_FRAMES: Table = {
    "train": (
        "Hi, I'm {name}, customer {c}. Could you please {core}?",
        "Hello, this is {name} (customer {c}). I would like you to {core}.",
        "{name} here, my customer id is {c}. Please {core}, I changed my mind.",
        "Good morning! I need some help: {core}, please. My customer id is {c}. Thanks, {name}",
        "My name is {name} and my customer id is {c}. I want you to {core} as soon as you can.",
        "Please {core}. You will find me as customer {c}, {name}. Thanks!",
    ),
    "validation": (
        "Hello! Could you {core}, please? This is {name}, customer {c}.",
        "I need you to {core}. My name is {name}, customer id {c}.",
        "Good morning, {name} here. Please {core} for customer {c}.",
    ),
    "heldout": (
        "Hi! My customer id is {c}. I need help, could you {core}? Thanks, {name}",
        "I'm {name}. I would like you to {core}, please. My id is {c}.",
        "Could you please {core} as soon as you can? I'm customer {c}, {name}.",
        "Thanks for the help. Customer {c} here, {name}: please {core}.",
    ),
}
FREE_CORES: Mapping[str, Table] = {
    "cancel": {
        "train": ("cancel {x}", "call off {x}", "stop {x} before it ships", "drop {x}, I do not need it anymore"),
        "validation": ("stop {x}, I do not need it anymore", "call {x} off"),
        "heldout": ("cancel {x} before it ships", "drop {x} and cancel it", "stop {x}"),
    },
    "return": {
        "train": ("return {x}", "take {x} back", "let me send {x} back", "take back {x}, it is not what I need"),
        "validation": ("let me return {x}", "take {x} back, it is not what I need"),
        "heldout": ("return {x}, I do not need it anymore", "let me send back {x}", "take back {x}"),
    },
    "exchange": {
        "train": (
            "exchange {x} for product {n}", "swap {x} for product {n}", "replace {x} with product {n}",
            "take back {x} and send product {n} instead",
        ),
        "validation": ("let me swap {x} for product {n}", "swap {x} and send product {n}"),
        "heldout": (
            "exchange {x}, I need product {n} instead", "replace {x}, send me product {n}", "swap {x} with product {n}",
        ),
    },
    "address": {
        "train": (
            "send {x} to address {a}", "change the address of {x} to {a}", "ship {x} to my other address, {a}",
            "let {x} go to address {a} instead",
        ),
        "validation": ("ship {x} to address {a}", "change {x} to my other address, {a}"),
        "heldout": (
            "send {x} to {a}, my other address", "ship {x} to address {a} instead", "change the address: {x} to {a}",
        ),
    },
    "payment": {
        "train": (
            "pay {x} with {m}", "charge {x} to {m} instead", "change the payment method of {x} to {m}",
            "put {x} on my other method, {m}",
        ),
        "validation": ("change {x} to my other payment method, {m}", "put {x} on {m}"),
        "heldout": ("pay {x} with my other method, {m}", "charge {m} for {x} instead", "put the payment of {x} on {m}"),
    },
}  # fmt: skip
FREE_TARGET = {"order": "order {o}", "product": "the {p} I ordered"}

LOOKUP_FRAMES: Table = {
    "train": ("{t} {h}", "show {t} {h}", "find {t} {h}"),
    "validation": ("{t} {h} please", "find and show {t} {h}"),
    "heldout": ("please show {t} {h}", "please find {t} {h}"),
}


def request(rng: random.Random, wording: str, split: str, kind: str, slots: Mapping[str, object]) -> str:
    """The sentence for a request of `kind`: a frame and a core of the split, drawn from `rng`, with `slots` filled."""
    frames, cores, target = _tables(wording)
    intent = kind.removesuffix("_by_product")
    core = rng.choice(cores[intent][split]).replace("{x}", target["order" if intent == kind else "product"])
    return rng.choice(frames[split]).replace("{core}", core).format_map(slots)


def lookup(rng: random.Random, split: str, record: str, handle: object) -> str:
    """The sentence of a trivial request: show one record."""
    return rng.choice(LOOKUP_FRAMES[split]).format(t=record, h=handle)


def templates(wording: str, splits: tuple[str, ...] = SPLITS) -> Iterator[str]:
    """Every frame and core of the splits, slots unfilled."""
    frames, cores, target = _tables(wording)
    for split in splits:
        yield from frames[split]
        yield from LOOKUP_FRAMES[split]
        for table in cores.values():
            yield from table[split]
    yield from target.values()


def _tables(wording: str) -> tuple[Table, Mapping[str, Table], Mapping[str, str]]:
    if wording == "free":
        return FREE_FRAMES, FREE_CORES, FREE_TARGET
    return PLAIN_FRAMES, PLAIN_CORES, PLAIN_TARGET
