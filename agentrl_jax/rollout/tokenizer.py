"""A small word-level tokenizer of the project's own, for policies that are trained from nothing.

Every word of the given texts is one token while the vocabulary lasts, the most frequent first; any other printable
ASCII word falls apart into shorter words and single characters, so that nothing becomes `<unk>`. Copying a handle
from the task into a call is then a matter of repeating one or two tokens.

Space is not kept: `decode` puts one space between any two words and none inside one. A word is a run of word
characters, joined by `. - : @ '` between them, with a `#` or a minus sign before it (`12.50`, `2024-01-02`,
`ann@mail.com`, `#W12`, `don't`); every other character stands alone (`a=b` is three words). A run of more than 32
word characters is cut into several words.
"""

from __future__ import annotations

import collections
import json
import os
import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

PAD, UNKNOWN = "<pad>", "<unk>"
CONTROLS = (PAD, UNKNOWN, "<system>", "<user>", "<assistant>", "<tool>", "<end>")
_CONTINUES = "##"
_WORD = Regex(r"(?:#|-(?=\d))?\w{1,32}(?:['.\-:@]{1,2}\w{1,32}){0,4}|[^\w\s]")  # bounded: matching is quadratic
_CHARACTERS = "".join(sorted(set(string.printable) - set(string.whitespace)))


def build(texts: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly the words of `texts`, at most `vocab_size` tokens in all; equal texts give equal ids.

    Ids: the control tokens (`<pad>` is 0), then characters that start and that continue a word, then the words from
    the most frequent on. Raises `ValueError` where `vocab_size` does not even hold the characters.
    """
    base = [*CONTROLS, *_CHARACTERS, *(_CONTINUES + character for character in _CHARACTERS)]
    if vocab_size < len(base):
        raise ValueError(f"vocab_size={vocab_size}: expected at least {len(base)} (control tokens and characters)")
    splitter = _splitter()
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    words = sorted((word for word in counts if word not in set(base)), key=lambda word: (-counts[word], word))
    vocabulary = {token: index for index, token in enumerate([*base, *words[: vocab_size - len(base)]])}
    tokenizer = Tokenizer(
        models.WordPiece(
            vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=1 << 20, continuing_subword_prefix=_CONTINUES
        )
    )
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES, cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    return tokenizer


def save(tokenizer: Tokenizer, path: str | os.PathLike[str]) -> None:
    """Write `tokenizer.json`; `path` is that file or the folder to put it in."""
    target = Path(path)
    tokenizer.save(str(target / "tokenizer.json" if target.is_dir() else target))


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """Read a `tokenizer.json`, or the one in the folder `path`. Raises `ValueError` naming the file it cannot read."""
    target = Path(path)
    target = target / "tokenizer.json" if target.is_dir() else target
    try:
        return Tokenizer.from_str(target.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"tokenizer {str(target)!r}: {error.strerror}") from None
    except Exception as error:  # the bindings raise bare Exception on a malformed file
        raise ValueError(f"tokenizer {str(target)!r}: not a tokenizer.json ({error})") from None


def fingerprint(tokenizer: Tokenizer) -> str:
    """The whole tokenizer as one canonical string: equal iff the tokenizers encode alike."""
    return json.dumps(json.loads(tokenizer.to_str()), sort_keys=True)


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(_WORD, behavior="removed", invert=True)
