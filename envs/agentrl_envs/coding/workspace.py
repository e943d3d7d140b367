"""The state of an episode: the files of the workspace, what was looked at, and whether it was submitted. Pure data.

Files are texts by path. Running tests happens elsewhere, on a copy: only `edit` changes a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agentrl_jax.protocol import Json, Snapshot, Status

from .mutate import once

MOST_SHOWN = 4_000  # characters of one answer
MOST_LINES = 120  # of a file shown at once
MOST_HITS = 40
MOST_FILE = 32_768  # characters of one file
MOST_FILES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    files: Mapping[str, str]
    seen: frozenset[str] = field(default_factory=frozenset)  # files read, and "tests" once they were run
    submitted: bool = False

    def snapshot(self) -> Snapshot:
        content = json.dumps(
            {"files": dict(self.files), "seen": sorted(self.seen), "submitted": self.submitted}, sort_keys=True
        ).encode()
        return Snapshot(data=content, hash=hashlib.sha256(content).hexdigest())


def load(snapshot: Snapshot) -> Workspace:
    content = json.loads(snapshot.data)
    return Workspace(files=content["files"], seen=frozenset(content["seen"]), submitted=content["submitted"])


class Reply(NamedTuple):
    """What one call led to: the state after it, the answer, and what was looked at for the first time."""

    state: Workspace
    text: str
    status: Status = Status.OK
    gain: float = 0.0


def invalid(state: Workspace, text: str) -> Reply:
    return Reply(state, f"error: {text}", Status.INVALID_ACTION)


def looked_at(state: Workspace, what: str, text: str, status: Status = Status.OK) -> Reply:
    """The first look at each file, and the first run of the tests, count as evidence."""
    gain = 0.0 if what in state.seen else 1.0
    return Reply(replace(state, seen=state.seen | {what}), text, status, gain)


def listing(state: Workspace) -> Reply:
    return Reply(state, "\n".join(f"{path} ({len(text)} characters)" for path, text in sorted(state.files.items())))


def search(state: Workspace, text: str) -> Reply:
    """Lines that hold the text as it stands: no pattern language, so no pattern can take long."""
    if not text.strip() or "\n" in text:
        return invalid(state, "text must be one line that is not blank")
    hits = [
        f"{path}:{number}: {line.strip()[:160]}"
        for path, content in sorted(state.files.items())
        for number, line in enumerate(content.splitlines(), start=1)
        if text in line
    ]
    more = [f"... and {len(hits) - MOST_HITS} more"] if len(hits) > MOST_HITS else []
    return Reply(state, bounded("\n".join([*hits[:MOST_HITS], *more])) or "nothing found")


def read(state: Workspace, path: str, start: int = 1) -> Reply:
    """The file's text from line `start` on, as it is, so that it can be quoted in an edit."""
    if path not in state.files:
        return invalid(state, f"there is no file {shown(path)}; call list")
    lines = state.files[path].splitlines(keepends=True)
    if not 1 <= start <= max(1, len(lines)):
        return invalid(state, f"start must be from 1 to {max(1, len(lines))}")
    part = lines[start - 1 : start - 1 + MOST_LINES]
    text = bounded("".join(part)) or "(empty)"
    rest = len(lines) - (start - 1) - len(part)
    return looked_at(state, path, text + (f"\n... {rest} more lines: read from {start + len(part)}" if rest else ""))


def edit(state: Workspace, path: str, old: str, new: str) -> Reply:
    """Puts `new` in the place of the one occurrence of `old`; an empty `old` makes a new file."""
    content = state.files.get(path)
    if content is None and old:
        return invalid(state, f"there is no file {shown(path)}; call list, or leave old empty to make one")
    if content is None:
        problem = _bad_path(path) or ("there are too many files" if len(state.files) >= MOST_FILES else "")
        if problem or any(path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in state.files):
            return invalid(state, problem or f"{shown(path)} is in the way of another file")
        changed = new
    else:
        if not old or not once(content, old):
            found = "" if not old else f", but {'is not there' if old not in content else 'occurs more than once'}"
            return invalid(state, f"old must occur exactly once in {path}{found}")
        changed = content.replace(old, new)
    if len(changed) > MOST_FILE:
        return invalid(state, f"the file would have {len(changed)} characters, at most {MOST_FILE} are allowed")
    if not _storable(changed):
        return invalid(state, "the text holds characters that a file cannot")
    return Reply(replace(state, files={**state.files, path: changed}), f"{path} changed" if old else f"{path} made")


def submit(state: Workspace) -> Reply:
    return Reply(replace(state, submitted=True), "submitted")


def _bad_path(path: str) -> str:
    parts = path.split("/")
    plain = all(part not in ("", ".", "..") and len(part) <= 80 for part in parts) and len(parts) <= 6
    if not plain or not path.isprintable() or not path.isascii() or "\\" in path:
        return f"{shown(path)} is no path inside the workspace"
    return ""


def _storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return "\0" not in text


def shown(text: str, most: int = 80) -> str:
    """What a policy wrote, short and printable enough to be told back."""
    return repr(text[:most].encode("ascii", "backslashreplace").decode())


def bounded(text: str, most: int = MOST_SHOWN) -> str:
    """The text, or its head and tail with the number of characters left out between."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n... {len(text) - most} characters left out ...\n{text[-(most - most // 2) :]}"


def hashes(files: Mapping[str, str], under: str) -> dict[str, str]:
    """The sha256 of every file in a folder, by path."""
    return {
        path: hashlib.sha256(text.encode()).hexdigest()
        for path, text in sorted(files.items())
        if path.startswith(f"{under}/")
    }


def arguments_problem(parameters: Mapping[str, Json], arguments: Mapping[str, Json]) -> str:
    """What is wrong with a call's arguments by the tool's schema (strings and integers), or ""."""
    properties, required = parameters["properties"], parameters["required"]
    assert isinstance(properties, Mapping) and isinstance(required, list | tuple)
    missing = [str(name) for name in required if name not in arguments]
    unknown = [shown(name) for name in arguments if name not in properties]
    if missing or unknown:
        wanted = ", ".join(properties) or "no arguments"
        return f"expected {wanted}" + (f"; missing {', '.join(missing)}" if missing else f"; {unknown[0]} is unknown")
    for name, value in arguments.items():
        rule = properties[name]
        assert isinstance(rule, Mapping)
        integer = rule["type"] == "integer"
        if isinstance(value, bool) or not isinstance(value, int if integer else str):
            return f"{name} must be {'an integer' if integer else 'a string'}"
    return ""
