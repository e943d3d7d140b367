"""From sampled ids to text that can be sent: whole characters only, and nothing from a stop text on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from agentrl_jax.runtime.serve.pump import Piece

Finish = Literal["stop", "length"]
_UNFINISHED = "�"  # what a decoder makes of the first bytes of a character


class Delta(NamedTuple):
    """What one piece adds: its tokens, the text that can be shown, and how the turn ended, or None."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish: Finish | None


class Cutter:
    """Cuts a turn where a stop text or a stop id first appears, whatever pieces it came in.

    The text ends before a stop text; the ids end with the one that completed it, or with the stop id. All deltas
    together are the text of all ids, character for character. Unless `live`, all of it comes with the last one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str] = (),
                 stop_ids: Sequence[int] = (), *, live: bool = True) -> None:  # fmt: skip
        self._decode, self._stops, self._stop_ids = decode, tuple(stop_strings), frozenset(stop_ids)
        self._live = live
        self._ids: list[int] = []
        self._sent = 0  # characters

    def take(self, piece: Piece) -> Delta:
        """The next delta. After one with `finish` set there is nothing more to take."""
        before = len(self._ids)
        self._ids += piece.ids
        finish: Finish | None = None if piece.stop is None else "stop" if piece.stop == "stop" else "length"
        for index in range(before, len(self._ids)):
            if self._ids[index] in self._stop_ids:
                del self._ids[index + 1 :]
                finish = "stop"
                break
        if not (self._live or self._stops or finish):
            return self._delta(piece, before, "", None)
        text, finish = self._cut(before, finish)
        shown = text if finish else text[: len(text) - self._held(text)] if self._live else ""
        new, self._sent = shown[self._sent :], max(self._sent, len(shown))
        return self._delta(piece, before, new, finish)

    def _cut(self, before: int, finish: Finish | None) -> tuple[str, Finish | None]:
        text = self._decode(self._ids)
        if not any(stop in text for stop in self._stops):
            return text, finish
        for count in range(before + 1, len(self._ids) + 1):
            text = self._decode(self._ids[:count])
            places = [text.find(stop) for stop in self._stops if stop in text]
            if places:
                del self._ids[count:]
                return text[: min(places)], "stop"
        return text, finish

    def _held(self, text: str) -> int:
        """How many characters at the end may yet become another character or the start of a stop text."""
        held = len(text) - len(text.rstrip(_UNFINISHED))
        for stop in self._stops:
            overlaps = (size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size]))
            held = max(held, next(overlaps, 0))
        return held

    def _delta(self, piece: Piece, before: int, text: str, finish: Finish | None) -> Delta:
        count = len(self._ids) - before
        return Delta(piece.ids[:count], piece.logprobs[:count], piece.versions[:count], text, finish)
