"""The host's view of a sampler's slots, and why a request cannot be served in one."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.runtime.grammars import Grammars, Matcher
from agentrl_jax.runtime.paging import PageBook


@dataclass
class Slot:
    """Its pages hold `length` tokens; `pending` come next, the last is decoded from."""

    device: int  # of those that sample, the one that its pages are on
    book: PageBook  # of that device
    length: int = 0
    pages: list[int] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)
    request: SampleRequest | None = None
    source: int | None = None  # the slot whose prompt is to be shared
    failed: tuple[int, ...] | None = None  # the ids of a fresh request that was refused
    key: tuple[int, int] = (0, 0)
    room: int = 0  # tokens the context still holds when the turn starts
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    matcher: Matcher | None = None  # where its turn stands in the request's grammar
    allowed: Any = None  # u32[ceil(V / 32)] the tokens that the matcher lets come next

    @property
    def remaining(self) -> int:
        """Tokens the turn may still draw."""
        return 0 if self.request is None else min(self.request.max_tokens, self.room) - len(self.ids)

    @property
    def waits(self) -> bool:
        """Whether tokens of its turn are still to be prefilled."""
        return self.request is not None and self.source is None and len(self.pending) > 1


def refusal(request: SampleRequest, *, vocab: int, reads_text: bool, grammars: Grammars | None) -> str | None:
    """Why an engine that `reads_text` and knows these `grammars` cannot serve this request, in one line."""
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        return f"temperature={request.temperature}: expected 0 (greedy) or more"
    if request.top_k < 0:
        return f"top_k={request.top_k}: expected 0 (off) or more"
    if not 0 < request.top_p <= 1:
        return f"top_p={request.top_p}: expected above 0, at most 1 (off)"
    if not 0 <= request.min_p <= 1:
        return f"min_p={request.min_p}: expected from 0 (off) to 1"
    if request.ids and (min(request.ids) < 0 or max(request.ids) >= vocab):
        return f"ids hold a token outside 0..{vocab - 1}: were they made by this model's tokenizer?"
    if request.stop_strings and (not reads_text or "" in request.stop_strings):
        return "stop_strings need strings that are not empty, and an engine that was given text_of"
    return None if request.grammar is None else _grammar_refusal(request.grammar, grammars)


def _grammar_refusal(grammar: str, grammars: Grammars | None) -> str | None:
    if grammars is None:
        return "grammar needs an engine that was given grammars"
    try:
        grammars.start(grammar)
    except ValueError as error:
        return str(error)
    return None
