"""The index: BM25 over one corpus, shared by the processes of a machine.

A corpus of a data set lies in one folder of the user's cache, made once and moved there whole: the documents in a
SQLite file opened read-only and immutable, the scores as arrays that `bm25s` maps into memory (or, without it, in the
same file as SQLite FTS5). A generated corpus is small and is kept in memory.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .corpus import Corpus, Document, terms

VERSION = "1"  # of what is kept: to be raised when the terms, the sentences or the traps of a corpus change
KINDS = ("auto", "bm25s", "fts5")
DECIMALS = 4  # scores closer than this are ties, so that the last bit of a sum never decides an order
MAPPED_BYTES = 1 << 28

DOCUMENTS = "CREATE TABLE documents (number INTEGER PRIMARY KEY, title TEXT UNIQUE, origin TEXT, sentences TEXT)"
WORDS = """
CREATE VIRTUAL TABLE words USING fts5(terms, content='', tokenize="unicode61 remove_diacritics 0");
"""


def resolve(kind: str) -> str:
    """The index that `kind` stands for here: "auto" is bm25s where it is installed. ValueError, ImportError by name."""
    if kind not in KINDS:
        raise ValueError(f"search: index={kind!r} is not known; expected one of {', '.join(KINDS)}")
    installed = find_spec("bm25s") is not None
    if kind == "bm25s" and not installed:
        raise ImportError("search: index='bm25s' needs the package bm25s: pip install 'agentrl-jax[search]'")
    return "fts5" if kind == "fts5" or not installed else "bm25s"


class Index:
    """Documents by number, title and query. Read-only: every episode of a process shares one."""

    def __init__(self, connection: sqlite3.Connection, scorer: Any | None) -> None:
        self._connection = connection
        self._scorer = scorer

    def document(self, handle: str) -> Document | None:
        number = handle.removeprefix("d")
        if not (handle.startswith("d") and number.isascii() and number.isdigit() and len(number) < 10):
            return None
        return self._one("number = ?", int(number)) if handle == f"d{int(number)}" else None

    def titled(self, title: str) -> Document | None:
        return self._one("title = ?", title)

    def search(self, query: str, limit: int) -> list[Document]:
        """The `limit` best documents, best first; documents without any word of the query are never among them."""
        asked = terms(query)
        if not asked:
            return []
        numbers = self._bm25s(asked, limit) if self._scorer is not None else self._fts5(asked, limit)
        found = (self._one("number = ?", number) for number in numbers)
        return [document for document in found if document is not None]

    def _bm25s(self, asked: list[str], limit: int) -> list[int]:
        import numpy as np

        assert self._scorer is not None
        known = [word for word in asked if word in self._scorer.vocab_dict]
        if not known:
            return []
        scores = np.round(self._scorer.get_scores(known), DECIMALS)
        best = np.argsort(-scores, kind="stable")[:limit]
        return [int(number) for number in best if scores[number] > 0]

    def _fts5(self, asked: list[str], limit: int) -> list[int]:
        rows = self._connection.execute(
            f"SELECT rowid FROM words WHERE words MATCH ? ORDER BY round(rank, {DECIMALS}), rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in asked), limit),
        )
        return [number for (number,) in rows]

    def _one(self, where: str, value: int | str) -> Document | None:
        try:
            row = self._connection.execute(f"SELECT * FROM documents WHERE {where}", (value,)).fetchone()
        except UnicodeEncodeError:  # a lone surrogate names nothing
            return None
        return None if row is None else Document(row[1], tuple(json.loads(row[3])), row[2], f"d{row[0]}")


_open: dict[tuple[int, str, str], Index] = {}  # the process first: a connection must not cross a fork


def opened(key: str, kind: str, build: Callable[[], Corpus], *, kept: bool) -> Index:
    """The index of the corpus `key`, once per process; `kept`: in the cache, where other processes find it."""
    at = (os.getpid(), key, kind)
    if at not in _open:
        _open[at] = _from_cache(key, kind, build) if kept else _in_memory(build(), kind)
        atexit.register(_open[at]._connection.close)
    return _open[at]


def _in_memory(corpus: Corpus, kind: str) -> Index:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    _fill(connection, corpus, kind)
    return Index(connection, _scorer(corpus) if kind == "bm25s" else None)


def _from_cache(key: str, kind: str, build: Callable[[], Corpus]) -> Index:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "search"
    place = cache / f"{key}-{kind}-{VERSION}"
    if not place.is_dir():
        corpus = build()
        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache))
        try:
            _write(temporary, corpus, kind)
            temporary.rename(place)
        except OSError:  # another process was faster, or the disk is full
            if not place.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    address = f"file:{quote(str(place / 'documents.sqlite3'))}?mode=ro&immutable=1"
    connection = sqlite3.connect(address, uri=True, check_same_thread=False)
    connection.execute(f"PRAGMA mmap_size={MAPPED_BYTES}")
    if kind == "fts5":
        return Index(connection, None)
    return Index(connection, _bm25s().BM25.load(place / "bm25s", mmap=True, show_progress=False))


def _write(folder: Path, corpus: Corpus, kind: str) -> None:
    connection = sqlite3.connect(folder / "documents.sqlite3")
    try:
        _fill(connection, corpus, kind)
    finally:
        connection.close()
    if kind == "bm25s":
        _scorer(corpus).save(folder / "bm25s", show_progress=False)


def _fill(connection: sqlite3.Connection, corpus: Corpus, kind: str) -> None:
    connection.execute(DOCUMENTS)
    if kind == "fts5":
        connection.execute(WORDS)
    with connection:
        for number, document in enumerate(corpus.documents):
            row = (number, document.title, document.origin, json.dumps(document.sentences))
            connection.execute("INSERT INTO documents VALUES (?, ?, ?, ?)", row)
            if kind == "fts5":
                words = " ".join(_words(document))
                connection.execute("INSERT INTO words (rowid, terms) VALUES (?, ?)", (number, words))


def _words(document: Document) -> list[str]:
    return terms(f"{document.title} {document.text}")


def _scorer(corpus: Corpus) -> Any:
    scorer = _bm25s().BM25(backend="numpy")
    scorer.index([_words(document) for document in corpus.documents], show_progress=False)
    return scorer


def _bm25s() -> Any:
    with _importing:
        if "bm25s" not in sys.modules:
            with _hidden("jax", "jax.lax", "numba", "scipy", "tqdm", "tqdm.auto"):
                importlib.import_module("bm25s")
        return sys.modules["bm25s"]


_importing = threading.Lock()


@contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Makes packages look absent: bm25s takes up JAX when imported, which a worker must never load, and others that
    cost a worker time and memory and are not used."""
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
