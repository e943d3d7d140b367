"""Whether a prompt that came from outside continues what was sampled, for agents that send their history as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def continues(sampled: Sequence[int], prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Empty where `prompt` begins with `sampled`, the ids of the conversation so far; else why a new segment opens.

    `retokenized`: the same text under other ids (decoded and encoded again on its way). `rewritten`: another text:
    reasoning stripped, context compacted, a turn edited.
    """
    if tuple(prompt[: len(sampled)]) == tuple(sampled):
        return ""
    return "retokenized" if decode(prompt).startswith(decode(sampled)) else "rewritten"
