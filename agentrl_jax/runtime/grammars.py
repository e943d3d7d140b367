"""Masks of the tokens that may come next, from a grammar: `llguidance` on the host, one matcher a turn."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agentrl_jax.errors import UserError

INSTALL = "pip install 'agentrl-jax[constrained]'"


def available() -> bool:
    """Whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


class Grammars:
    """Grammars over one tokenizer, which keeps its bytes (byte-level or byte-fallback BPE).

    `vocab_size` is the model's, which may exceed the tokenizer's: what no text stands for is never allowed. Where a
    grammar is fulfilled one of `stop_ids` may come. `tokenizer` knows control tokens as special ones: they are what
    `<[id]>` names in a grammar.

    Raises `UserError` without llguidance, and `ValueError` for a tokenizer that it cannot read.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, stop_ids: Sequence[int]) -> None:
        if not available():
            raise UserError(f"constrained sampling needs llguidance: {INSTALL}")
        import llguidance  # pyright: ignore[reportMissingImports] (an extra)

        self._library: Any = llguidance
        self._compiled = functools.lru_cache(maxsize=64)(self._compile)
        self._words = -(-vocab_size // 32)
        try:
            text = _within(tokenizer, vocab_size)
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(stop_ids))
        except ValueError as error:
            raise ValueError(f"llguidance cannot read the tokenizer: {_line(error)}") from None

    def start(self, grammar: str) -> Matcher:
        """At the beginning of a text of the grammar.

        Raises `ValueError`, in one line, for a grammar that has no meaning or asks for what is not supported.
        """
        return Matcher(self._compiled(grammar).deep_copy(), self._words)

    def _compile(self, grammar: str) -> Any:
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {_line(matcher.get_error())}")
        return matcher


class Matcher:
    """Where one turn stands in its grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    def allowed(self) -> np.ndarray:
        """u32[ceil(V / 32)]: the tokens that may come next, as bits. No bit: the grammar has come to a dead end."""
        # The library's own row is a word longer where 32 divides V.
        bits = np.frombuffer(self._matcher.compute_bitmask(), "<u4")[: self._words]
        return np.zeros_like(bits) if self._matcher.is_error() else bits

    def accept(self, token: int) -> None:
        """Go on past a token that was allowed."""
        self._matcher.consume_token(token)


def _within(tokenizer: Tokenizer, vocab_size: int) -> str:
    """The tokenizer's JSON without added tokens that the model has no row for (Gemma 3's image token)."""
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw.get("added_tokens") or [] if token["id"] < vocab_size]
    return json.dumps(raw)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]
