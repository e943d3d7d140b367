"""Tasks: a kind of page and a seed. Train and validation share kinds and no seed; heldout has kinds of its own."""

from __future__ import annotations

import hashlib
from typing import Any

from agentrl_jax.protocol import Task

from . import forms, miniwob
from .options import SPLITS, Options

RANGE = 2**28  # seeds of a page: train from 0, validation from RANGE, heldout from 2 * RANGE


def tasks(options: Options, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """`count` tasks with distinct pages, the split's kinds in turn."""
    if split not in SPLITS:
        raise ValueError(f"web: split={split!r} is not known; expected one of {', '.join(SPLITS)}")
    kinds, used, made = options.kinds_of(split), set(), []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        page = _page_seed(split, kind, seed, index)
        while (kind, page) in used:
            page = SPLITS.index(split) * RANGE + (page + 1) % RANGE
        used.add((kind, page))
        data: dict[str, Any] = {"source": options.source, "page": page}
        if options.source == "forms":
            data["goal"] = forms.make(kind, split, page).goal
        made.append(Task(id=f"{options.source}-{split}-{kind}-{page}", split=split, kind=kind, data=data))
    return tuple(made)


def document(source: str, kind: str, split: str, seed: int) -> str:
    """A task's page as one text."""
    return forms.document(forms.make(kind, split, seed)) if source == "forms" else miniwob.page(kind)


def _page_seed(split: str, kind: str, seed: int, index: int) -> int:
    name = f"{split}/{kind}/{seed}/{index}"
    drawn = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") % RANGE
    return SPLITS.index(split) * RANGE + drawn
