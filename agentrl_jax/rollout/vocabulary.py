"""A tokenizer that no text can command: `Vocabulary`.

Control tokens are the added tokens that are special or that look like markup (`<tool_call>` in Qwen3 is not special and
frames a call all the same), but for the HTML that Gemma 3 lists (`<b>`, `</table>`): no template frames turns by it,
and web pages are full of it. Control tokens get into token ids by name only; text that spells one becomes the
characters that it is made of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

_MARKUP = frozenset("<>[]{}|")
_HTML = re.compile(
    "</?(?:a|b|blockquote|body|caption|code|div|em|footer|h[1-6]|html|i|iframe|img|li|s|span|strong|su[bp]|t[dhr]|table"
    "|tbody|tfoot|thead|u|ul)>"
)


class Rendered(NamedTuple):
    """Token ids and who produced each (`Source`), of equal length."""

    ids: tuple[int, ...]
    sources: tuple[int, ...]


class Span(NamedTuple):
    """A stretch of text and its source. Only where it is `trusted` does a control token's name stand for the token."""

    text: str
    source: int
    trusted: bool = False


class Vocabulary:
    """A private copy of a tokenizer, in which every control token is special and special tokens are off.

    `controls` maps the name of each control token to its id. `also` names further tokens to be treated as such.
    """

    def __init__(self, tokenizer: Tokenizer, also: Iterable[str] = ()) -> None:
        raw: dict[str, Any] = json.loads(tokenizer.to_str())
        added = raw.get("added_tokens") or []
        self.special = frozenset(token["id"] for token in added if token["special"])
        self.controls: dict[str, int] = {}
        for token in added:
            if token["special"] or _is_markup(token["content"]) or token["content"] in also:
                token["special"] = True  # or the copy would go on reading it out of text
                self.controls[token["content"]] = token["id"]
        raw["padding"] = raw["truncation"] = None
        self.tokenizer = Tokenizer.from_str(json.dumps(raw))
        self.tokenizer.encode_special_tokens = True
        for name in also:
            if (index := self.tokenizer.token_to_id(name)) is not None:
                self.controls[name] = index
        unknown = raw["model"].get("unk_token")  # stands for characters that the vocabulary lacks; commands nothing
        self._guarded = frozenset(index for name, index in self.controls.items() if name != unknown or name in also)
        self._names = re.compile(f"({any_of(self.controls)})") if self.controls else None

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text; never a control token's.

        Where the model beneath still yields one (a whole-word vocabulary that lists it), the text is encoded character
        by character, and what is a control token even then is left out.
        """
        ids = self._encoding(text).ids if text else []
        if not self._guarded.isdisjoint(ids):
            ids = [index for index, _ in self._encode(text)]
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens, for reading; it is never encoded again."""
        return self.tokenizer.decode([index for index in ids if index not in self.special], skip_special_tokens=False)

    def parts(self, ids: Sequence[int]) -> list[str | int]:
        """Text and control tokens (by id) of sampled ids, in order: a control token is one where it was sampled as one,
        and no text is."""
        found: list[str | int] = []
        run: list[int] = []
        controls = set(self.controls.values())
        for index in (*ids, -1):
            if index >= 0 and index not in controls:
                run.append(index)
                continue
            if run:
                found.append(self.tokenizer.decode(run, skip_special_tokens=False))
                run = []
            if index >= 0:
                found.append(index)
        return found

    def split(self, text: str) -> list[str]:
        """Trusted text, cut at the names of control tokens, which stay as parts of their own."""
        return [text] if self._names is None else [part for part in self._names.split(text) if part]

    def render(self, spans: Iterable[Span]) -> Rendered:
        """Ids of spans put together. Text between two control tokens is encoded in one go, whatever spans it comes
        from, since a tokenizer's words may cross their borders; a token has the source of its first character."""
        ids: list[int] = []
        sources: list[int] = []
        run: list[Span] = []
        for span in spans:
            for part in self.split(span.text) if span.trusted else (span.text,):
                index = self.controls.get(part) if span.trusted else None
                if index is None:
                    run.append(span._replace(text=part))
                    continue
                self._flush(run, ids, sources)
                ids.append(index)
                sources.append(span.source)
        self._flush(run, ids, sources)
        return Rendered(tuple(ids), tuple(sources))

    def _flush(self, run: list[Span], ids: list[int], sources: list[int]) -> None:
        owners = [span.source for span in run for _ in span.text]
        for index, start in self._encode("".join(span.text for span in run)):
            ids.append(index)
            sources.append(owners[min(start, len(owners) - 1)])
        run.clear()

    def _encode(self, text: str) -> list[tuple[int, int]]:
        """(id, index of its first character) of plain text."""
        found = self._raw(text)
        if self._guarded.isdisjoint(index for index, _ in found):
            return found
        single = [(index, place) for place, character in enumerate(text) for index, _ in self._raw(character)]
        return [(index, place) for index, place in single if index not in self._guarded]

    def _encoding(self, text: str) -> Encoding:
        try:
            return self.tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError):  # lone surrogates, which no tokenizer takes; one character stays one
            clean = text.encode("utf-8", "replace").decode("utf-8")
            return self.tokenizer.encode(clean, add_special_tokens=False)

    def _raw(self, text: str) -> list[tuple[int, int]]:
        if not text:
            return []
        encoded = self._encoding(text)
        return [(index, start) for index, (start, _) in zip(encoded.ids, encoded.offsets, strict=True)]


def any_of(names: Iterable[str]) -> str:
    """A pattern that matches the longest of `names`. Beginnings that they share are tried once: Gemma 3 has 6,000 names
    of control tokens, and a list of them all is 60 times as slow."""
    rests: dict[str, list[str]] = {}
    for name in names:
        rests.setdefault(name[:1], []).append(name[1:])
    found = "|".join(re.escape(head) + any_of(rests[head]) for head in sorted(rests) if head)
    return f"(?:{found}){'?' if '' in rests else ''}" if found else ""


def _is_markup(name: str) -> bool:
    return len(name) > 1 and not _MARKUP.isdisjoint(name) and not _HTML.fullmatch(name)
