"""Answers and quotes, compared. Normalised as in SQuAD: lower case, no punctuation, no articles, single spaces."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable

MIN_WORDS = 4  # a shorter quote shows nothing, unless it is the whole sentence
MOST_AROUND = 2  # a quote of more than so many times the sentence's words points at nothing


def normalise(text: str) -> str:
    lowered = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def exact(answer: str, gold: str) -> bool:
    return bool(normalise(gold)) and normalise(answer) == normalise(gold)


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of words; yes, no and an empty text match only themselves."""
    said, right = normalise(answer).split(), normalise(gold).split()
    if not said or not right or (said != right and {"yes", "no", "noanswer"} & {" ".join(said), " ".join(right)}):
        return float(said == right and bool(right))
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right))


def plain(text: str) -> str:
    """The form in which a quote is looked for: compatibility forms, case and spaces do not matter; words do."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def quoted_in(quote: str, text: str) -> bool:
    """Whether the quote stands in the text, from a word's start to a word's end."""
    wanted = plain(quote)
    return bool(wanted) and re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", plain(text)) is not None


def supports(quote: str, sentences: Iterable[str]) -> bool:
    """Whether the quote is one of the sentences, holds one and not much more, or is a part of one of four words."""
    words = len(plain(quote).split())
    for sentence in sentences:
        if quoted_in(sentence, quote) and words <= MOST_AROUND * len(plain(sentence).split()):
            return True
        if quoted_in(quote, sentence) and words >= MIN_WORDS:
            return True
    return False


def mentions(quote: str, names: Iterable[str]) -> bool:
    said = f" {normalise(quote)} "
    return any(f" {normalise(name)} " in said for name in names if normalise(name))
