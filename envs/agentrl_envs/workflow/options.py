"""What a suite can be asked for, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

INTENTS = ("cancel", "return", "exchange", "address", "payment")
KINDS = INTENTS + tuple(f"{intent}_by_product" for intent in INTENTS)
LOOKUP = "lookup"  # trivial requests ("order 57") that teach copying a handle
SPLITS = ("train", "validation", "heldout")
POLICIES = ("owner", "status", "method", "stock")
BACKENDS = ("sqlite", "postgres")
MAX_CALLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `suite`, validated: an unknown value is a ValueError that lists the known ones."""

    handles: str = "short"
    wording: str = "plain"
    kinds: tuple[str, ...] = KINDS
    policies: tuple[str, ...] = POLICIES
    system: str = "none"
    sloppiness: float = 0.6
    max_calls: int = MAX_CALLS
    dry_run: bool = False
    backend: str = "sqlite"

    def __post_init__(self) -> None:
        _known("handles", (self.handles,), ("short", "real"))
        _known("wording", (self.wording,), ("plain", "free"))
        _known("kinds", self.kinds, (*KINDS, LOOKUP))
        _known("policies", self.policies, POLICIES)
        _known("backend", (self.backend,), BACKENDS)
        _known("system", (self.system,), ("none", "short", "full"))
        if not self.kinds:
            raise ValueError(f"workflow: kinds is empty; name at least one of {', '.join((*KINDS, LOOKUP))}")
        if not 0.0 <= self.sloppiness <= 1.0:
            raise ValueError(f"workflow: sloppiness={self.sloppiness!r}; expected a number from 0 to 1")
        if self.max_calls < 4 + self.dry_run:
            needed = 4 + self.dry_run
            raise ValueError(f"workflow: max_calls={self.max_calls!r}; the longest reference solution needs {needed}")


def _known(name: str, given: Sequence[str], known: Sequence[str]) -> None:
    for value in given:
        if value not in known:
            raise ValueError(f"workflow: {name}={value!r} is not known; expected one of {', '.join(known)}")
