"""A second tree, made from a first: other contents, other sizes, more files, the same names and folders beside them."""

from __future__ import annotations

import hashlib

from .tree import Entry, Tree, with_parents

COPIES = 4  # files of each folder that are copied


def variant(tree: Tree) -> dict[str, Entry]:
    """Every text file has its first line again at its end; some files of each folder are there once more, beside it
    under another name and in a new folder under their own."""
    made = {path: _longer(path, entry) for path, entry in tree.items()}
    files = sorted((path for path, entry in tree.items() if entry.kind == "file"), key=_order)
    taken: dict[str, int] = {}
    for path in files:
        folder, _, name = path.rpartition("/")
        taken[folder] = taken.get(folder, 0) + 1
        if taken[folder] > COPIES:
            continue
        prefix = f"{folder}/" if folder else ""
        made.setdefault(f"{prefix}again_{name}", made[path])
        made.setdefault(f"{prefix}more/{name}", made[path])
    return with_parents(made)


def _longer(path: str, entry: Entry) -> Entry:
    if entry.kind != "file" or not entry.content or b"\0" in entry.content or entry.content[:2] == b"\x1f\x8b":
        return entry
    first = entry.content.splitlines(keepends=True)[0]
    separator = b"" if entry.content.endswith(b"\n") else b"\n"
    return entry._replace(content=entry.content + separator + first)


def _order(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()
