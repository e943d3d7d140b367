"""Trees of files as data: what a workspace holds, without times and owners, which are not compared.

An entry is (kind, mode, content): kind "file", "dir", "link" or "fifo"; the content is a file's bytes or a link's
target. Trees go into boxes and come out of them as tar archives.
"""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KINDS = {tarfile.REGTYPE: "file", tarfile.DIRTYPE: "dir", tarfile.SYMTYPE: "link", tarfile.FIFOTYPE: "fifo"}
TYPES = {kind: type_ for type_, kind in KINDS.items()}
MOST_BYTES = 1 << 20  # of all files together, as a state holds them
MOST_ENTRIES = 1_000


class Entry(NamedTuple):
    kind: str
    mode: int = 0o644
    content: bytes = b""


Tree = Mapping[str, Entry]


class TooLarge(ValueError):
    """The workspace holds more than a state may."""


def file(text: str, mode: int = 0o644) -> Entry:
    return Entry("file", mode, text.encode())


DIRECTORY = Entry("dir", 0o755)


def with_parents(tree: Tree) -> dict[str, Entry]:
    """The tree, sorted, with the directories that its paths need."""
    found = dict(tree)
    for path in tree:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            found.setdefault("/".join(parts[:depth]), DIRECTORY)
    return dict(sorted(found.items()))


def to_tar(tree: Tree) -> bytes:
    """The tree as a tar, parents first; equal trees give equal bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, entry in sorted(tree.items()):
            info = tarfile.TarInfo(path)
            info.type, info.mode = TYPES[entry.kind], entry.mode
            if entry.kind == "link":
                info.linkname = entry.content.decode(errors="surrogateescape")
            info.size = len(entry.content) if entry.kind == "file" else 0
            archive.addfile(info, io.BytesIO(entry.content) if entry.kind == "file" else None)
    return out.getvalue()


def from_tar(archive: bytes) -> dict[str, Entry]:
    """The tree of a box's archive. TooLarge beyond MOST_ENTRIES or MOST_BYTES."""
    found: dict[str, Entry] = {}
    total = 0
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        for info in opened:
            total += info.size
            if total > MOST_BYTES or len(found) >= MOST_ENTRIES:
                raise TooLarge(f"the workspace holds more than {MOST_ENTRIES} entries or {MOST_BYTES} bytes")
            kind = KINDS.get(info.type, "file")
            content = b""
            if kind == "file":
                held = opened.extractfile(info)
                content = held.read() if held is not None else b""
            elif kind == "link":
                content = info.linkname.encode(errors="surrogateescape")
            found[info.name.removeprefix("./").rstrip("/")] = Entry(kind, info.mode & 0o7777, content)
    return dict(sorted(found.items()))


def to_json(tree: Tree) -> list[list[Any]]:
    return [
        [path, entry.kind, entry.mode, base64.b64encode(entry.content).decode()] for path, entry in sorted(tree.items())
    ]


def from_json(rows: Sequence[Sequence[Any]]) -> dict[str, Entry]:
    return {path: Entry(kind, mode, base64.b64decode(content)) for path, kind, mode, content in rows}


def changes(before: Tree, after: Tree) -> list[str]:
    """Paths made, changed or removed. A directory's mode counts, its times do not."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def under(tree: Tree, folder: str) -> dict[str, Entry]:
    """The entries inside a folder."""
    return {path: entry for path, entry in tree.items() if path.startswith(f"{folder}/")}
