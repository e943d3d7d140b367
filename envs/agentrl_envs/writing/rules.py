"""The default judge: counts what a brief measurably asks for. It is transparent, deterministic and no reader.

Whether a text is true, well put or kind is nothing that this file knows: a draft that meets every rule may be poor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SENTENCE_WORDS = (5, 30)  # of a sentence that may carry a required point
FEWEST_DISTINCT = 5


def judge(brief: Mapping[str, Any], first: str, second: str) -> str:
    """ "first", "second" or "tie": which text meets more of the brief's requirements."""
    one, other = (sum(measure(brief, text).values()) for text in (first, second))
    return "tie" if one == other else "first" if one > other else "second"


def measure(brief: Mapping[str, Any], text: str) -> dict[str, bool]:
    """Every requirement of the brief, by name, and whether the text meets it."""
    lines = text.strip().split("\n")
    paragraphs = [part for part in re.split(r"\n\s*\n", "\n".join(lines[1:]).strip()) if part.strip()]
    said = sentences("\n".join(lines[1:]))
    count, (least, most) = len(words(text)), brief["words"]
    return {
        "title": _has(lines[0], brief["subject"])
        and len(words(lines[0])) <= brief["title_words"]
        and len(lines) > 1
        and not lines[1].strip(),
        "length": least <= count <= most,
        "paragraphs": len(paragraphs) == brief["paragraphs"],
        "closing": bool(paragraphs) and paragraphs[-1].startswith(brief["closing"]),
        "no sentence twice": bool(said) and len({plain.casefold() for plain in said}) == len(said),
        **{f"without {word!r}": not _has(text, word) for word in brief["forbidden"]},
        **{f"says the {point['name']}": _says(said, point, brief["points"]) for point in brief["points"]},
    }


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['.:-][^\W_]+)*", text)


def sentences(text: str) -> list[str]:
    """Parts between full stops and line ends, the latter so that a list is no sentence."""
    parts = re.split(r"(?<=[.!?])\s+|\n+", text)
    return [part.strip() for part in parts if part.strip()]


def _has(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def _says(said: Sequence[str], point: Mapping[str, str], points: Sequence[Mapping[str, str]]) -> bool:
    """Whether a whole sentence says the point, and says no other: a list of key words is not what was asked for."""
    others = [other["phrase"] for other in points if other["phrase"] != point["phrase"]]
    for sentence in said:
        used = words(sentence)
        whole = sentence[-1] in ".!?" and SENTENCE_WORDS[0] <= len(used) <= SENTENCE_WORDS[1]
        varied = len({word.casefold() for word in used}) >= FEWEST_DISTINCT
        if whole and varied and _has(sentence, point["phrase"]) and not any(_has(sentence, other) for other in others):
            return True
    return False
