"""What a suite can be asked for, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from . import forms, miniwob

SPLITS = ("train", "validation", "heldout")
SOURCES = ("forms", "miniwob")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `suite`, validated: an unknown value is a ValueError that lists the known ones."""

    source: str = "forms"
    kinds: tuple[str, ...] | None = None
    max_calls: int = 24

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"web: source={self.source!r} is not known; expected one of {', '.join(SOURCES)}")
        known = (*self.learned, *self.unseen)
        for kind in self.kinds or ():
            if kind not in known:
                raise ValueError(f"web: kinds={kind!r} is not known; expected one of {', '.join(known)}")
        if self.kinds is not None and not self.kinds:
            raise ValueError(f"web: kinds is empty; name at least one of {', '.join(known)}")
        if self.max_calls < 20:
            raise ValueError(f"web: max_calls={self.max_calls!r}; the longest reference solution needs 20")

    @property
    def learned(self) -> tuple[str, ...]:
        """The kinds of train and validation."""
        return forms.KINDS if self.source == "forms" else miniwob.KINDS

    @property
    def unseen(self) -> tuple[str, ...]:
        """The kinds of heldout: no page of theirs is in another split."""
        return forms.UNSEEN if self.source == "forms" else miniwob.UNSEEN

    def kinds_of(self, split: str) -> tuple[str, ...]:
        offered = self.unseen if split == "heldout" else self.learned
        chosen = offered if self.kinds is None else tuple(kind for kind in self.kinds if kind in offered)
        if not chosen:
            raise ValueError(f"web: none of kinds={', '.join(self.kinds or ())} is in {split!r}: {', '.join(offered)}")
        return chosen
