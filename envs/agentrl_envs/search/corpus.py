"""What is searched and what is asked: documents, questions, and the hops that lead from one to the other."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

ENCYCLOPEDIA, FORUM, MIRROR = "encyclopedia", "forum", "mirror"
STOP = frozenset(
    "a an and are as at be by did do does for from in is it its of on or s that the to was were with".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Document:
    """`origin` is shown to the policy: an encyclopedia is right where a forum says otherwise."""

    title: str
    sentences: tuple[str, ...]
    origin: str = ENCYCLOPEDIA
    id: str = ""

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@dataclass(frozen=True, slots=True)
class Hop:
    """One fact that the answer rests on: a title, and the sentences there of which one must be quoted."""

    title: str
    sentences: tuple[str, ...]
    copies: tuple[str, ...] = ()  # titles of documents that say the same, word by word


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    id: str
    text: str
    answer: str
    kind: str
    hops: tuple[Hop, ...]
    hazard: str = ""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents with distinct titles, numbered in an order that says nothing about them."""

    key: str
    documents: tuple[Document, ...]


def numbered(key: str, documents: Iterable[Document]) -> Corpus:
    """A corpus whose numbers follow a hash of the titles. ValueError if a title comes twice."""
    ordered = sorted(documents, key=lambda document: hashlib.blake2b(document.title.encode()).digest())
    titles = [document.title for document in ordered]
    if len(set(titles)) != len(titles):
        raise ValueError(f"search: corpus {key!r} has two documents of one title")
    return Corpus(key, tuple(replace(document, id=f"d{i}") for i, document in enumerate(ordered)))


def terms(text: str) -> list[str]:
    """The words that both indexes see: lower case, without accents, stop words and the plural's s."""
    plain = unicodedata.normalize("NFKD", text.lower())
    words = re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))
    kept = [word for word in words if word not in STOP]
    return [word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word for word in kept]


def split_sentences(text: str) -> tuple[str, ...]:
    """Cuts after a full stop before a capital: for display, so a wrong cut does no harm."""
    return tuple(part for part in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", text.strip()) if part)


def stable_split(identity: str, shares: Sequence[tuple[str, float]]) -> str:
    """The split that a hash of the identity falls into, by shares that sum to 1."""
    point = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=6).digest(), "big") / 2**48
    for name, share in shares:
        if point < share:
            return name
        point -= share
    return shares[-1][0]
