"""A second tree, made from a first: other contents, other sizes, more files, the same names and folders beside them."""

from __future__ import annotations

import hashlib

from .tree import DIRECTORY, Entry, Tree, with_parents

COPIES = 12  # files of each folder that are copied


def variant(tree: Tree) -> dict[str, Entry]:
    """Every text has another first and another last line, its first one turned round; files and folders are there once
    more, beside themselves under another name and in a new folder under their own."""
    made = {path: _longer(entry) for path, entry in tree.items()}
    taken: dict[str, int] = {}
    for path in sorted(tree, key=lambda path: hashlib.sha256(path.encode()).hexdigest()):
        folder, _, name = path.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        if tree[path].kind == "dir":
            made.setdefault(f"{prefix}more/{name}", DIRECTORY)
        elif tree[path].kind == "file" and taken.get(folder, 0) < COPIES:
            taken[folder] = taken.get(folder, 0) + 1
            made.setdefault(f"{prefix}again_{name}", made[path])
            made.setdefault(f"{prefix}more/{name}", made[path])
    return with_parents(made)


def _longer(entry: Entry) -> Entry:
    if entry.kind != "file" or not entry.content or b"\0" in entry.content or entry.content[:2] == b"\x1f\x8b":
        return entry
    first = entry.content.splitlines(keepends=True)[0]
    words = b" ".join(reversed(first.split())) + b"\n"
    separator = b"" if entry.content.endswith(b"\n") else b"\n"
    return entry._replace(content=words + entry.content + separator + words)
