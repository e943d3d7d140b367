"""Assertions on the end state, as data, evaluated outside of the box on what was read out of it.

{"path": p, "is": "file", "text": t, "number": n, "mode": m} (what is left out is free; a file that was there keeps its
mode), {"path": p, "is": "absent" | "dir"}, {"path": p, "is": "link", "target": t}, {"path": p, "is": "archive",
"members": {path: text}} (tar, or tar.gz), {"service": name, "running": bool}.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Mapping
from typing import Any

from .episode import Episode
from .tree import Entry

MOST_UNPACKED = 4 << 20


def failure(assertion: Mapping[str, Any], start: Episode, end: Episode) -> str:
    """How the end state breaks the assertion, or ""."""
    if "service" in assertion:
        running = assertion["service"] in end.services
        return "" if running == assertion["running"] else f"{assertion['service']} runs: {running}"
    path, kind = assertion["path"], assertion["is"]
    entry = end.tree.get(path)
    if kind == "absent":
        return f"{path} is there" if entry is not None else ""
    if entry is None:
        return f"{path} is missing"
    if entry.kind != ("file" if kind == "archive" else kind):
        return f"{path} is a {entry.kind}"
    if kind == "link":
        return "" if entry.content == assertion["target"].encode() else f"{path} points elsewhere"
    if kind == "archive":
        return _archive_failure(path, entry.content, assertion["members"])
    return _file_failure(assertion, path, entry, start.tree.get(path)) if kind == "file" else ""


def _file_failure(assertion: Mapping[str, Any], path: str, entry: Entry, before: Entry | None) -> str:
    mode = assertion.get("mode", before.mode if before is not None else entry.mode)
    if entry.mode != mode:
        return f"{path} has mode {entry.mode:o}"
    if "text" in assertion and entry.content != assertion["text"].encode():
        return f"{path} has another content"
    if "number" in assertion and entry.content.strip() != str(assertion["number"]).encode():
        return f"{path} holds another number"
    return ""


def _archive_failure(path: str, content: bytes, members: Mapping[str, str]) -> str:
    try:
        found = unpacked(content)
    except ValueError as error:
        return f"{path} is no readable archive: {error}"[:200]
    wanted = {name: text.encode() for name, text in members.items()}
    return "" if found == wanted else f"{path} holds other members"


def unpacked(content: bytes) -> dict[str, bytes]:
    """The regular files of a tar or tar.gz by name. ValueError for whatever a policy wrote that is none, and for more
    than MOST_UNPACKED bytes: a header may claim any size."""
    try:
        return _members(content)
    except (tarfile.TarError, zlib.error, EOFError, OSError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _members(content: bytes) -> dict[str, bytes]:
    if content[:2] == b"\x1f\x8b":
        inflate = zlib.decompressobj(wbits=31)
        content = inflate.decompress(content, MOST_UNPACKED)
        if inflate.unconsumed_tail:
            raise ValueError(f"more than {MOST_UNPACKED} bytes")
    found: dict[str, bytes] = {}
    left = MOST_UNPACKED
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for info in archive:
            left -= info.size
            if info.size < 0 or left < 0:
                raise ValueError(f"more than {MOST_UNPACKED} bytes")
            held = archive.extractfile(info) if info.isreg() else None
            if held is not None:
                found[info.name.removeprefix("./")] = held.read()
    return found


def paths(goal: list[Mapping[str, Any]]) -> set[str]:
    """The paths that a goal speaks of: only they may change."""
    return {assertion["path"] for assertion in goal if "path" in assertion}
