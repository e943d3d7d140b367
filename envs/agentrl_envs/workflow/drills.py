"""Drills: requests whose only right answer is to repeat values that stand beside given words.

They teach the mechanics of copying (find the word, take the number after it) many times a row. Reward does not
teach that, and demonstrations show it once or twice an episode.
"""

from __future__ import annotations

import random

from .options import Options
from .vocabulary import vocabulary

ASKED = 4  # words asked for, at most
SEPARATORS = (" ", " = ", " id = ")


def drills(options: Options, count: int, seed: int) -> tuple[tuple[str, str], ...]:
    """`count` pairs (request, answer): `lamp 7 order 41 kettle 3 : order lamp` -> `order = 41 lamp = 7`."""
    words = sorted({w for text in vocabulary(options) for w in text.split() if w.isalpha() and len(w) > 2})
    rng = random.Random(f"drills/{seed}")
    return tuple(_drill(rng, words) for _ in range(count))


def _drill(rng: random.Random, words: list[str]) -> tuple[str, str]:
    keys = rng.sample(words, rng.randint(3, 8))
    values = {key: rng.randrange(100) for key in keys}
    asked = rng.sample(keys, min(ASKED, len(keys)))
    separator = rng.choice(SEPARATORS)
    shown = " ".join(f"{key} {value}" for key, value in values.items())
    return f"{shown} : {' '.join(asked)}", " ".join(f"{key}{separator}{values[key]}" for key in asked)
