"""What no machine can judge goes to a file for people, and what they answer is read back from it.

The file holds one JSON object a line. A question is a quote: whether `quote`, which stands in `document`, supports what
`hop` says in answer to `question`; its `id` is a hash of these four, so that a quote is asked about once, whoever cites
it. An answer is a line `{"label": ID, "supports": true, "by": "NAME"}`, appended by `python -m
agentrl_envs.search POOL ID yes`, or a key `"supports"` written into the question's own line. The last answer counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_jax.protocol import Json

from . import scoring


def identity(question: str, hop: str, document: str, quote: str) -> str:
    """The id of a question to a person. Case and spaces of the quote do not matter, as where it is looked for."""
    claim = json.dumps([question, hop, document, scoring.plain(quote)], ensure_ascii=False)
    return hashlib.sha256(claim.encode()).hexdigest()[:16]


def append(path: str, record: Mapping[str, Json]) -> None:
    """Appends the record in one write under a lock, so that processes may share the file. Raises OSError."""
    line = (json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n").encode()
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        end = os.fstat(handle).st_size
        if end and os.pread(handle, 1, end - 1) != b"\n":  # an editor has left the last line without its end
            line = b"\n" + line
        if os.write(handle, line) != len(line):
            os.ftruncate(handle, end)
            raise OSError(f"{path}: the disk is full")
    finally:
        os.close(handle)


def labels(path: str | None) -> dict[str, bool]:
    """What people have answered, by id. Raises ValueError that names the line which is no such thing."""
    found: dict[str, bool] = {}
    for number, record in _records(path):
        if "supports" in record:
            supports, name = record["supports"], record.get("label", record.get("id"))
            if not isinstance(supports, bool) or not isinstance(name, str):
                raise ValueError(f'{path}:{number}: expected "supports": true or false, and an id, got {record!r:.120}')
            found[name] = supports
    return found


def digest(answers: Mapping[str, bool]) -> str:
    """Twelve digits of a hash over the answers, for the verifier's version; empty where there is none."""
    text = json.dumps(sorted(answers.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12] if answers else ""


def waiting(path: str) -> list[dict[str, Any]]:
    """The questions that nobody has answered, oldest first, each once."""
    answers = labels(path)
    questions = {record["id"]: record for _, record in _records(path) if "id" in record}
    return [record for name, record in questions.items() if name not in answers]


def answer(path: str, name: str, supports: bool, by: str) -> None:
    """Appends a person's answer. Raises ValueError where nobody asked."""
    if name not in {record.get("id") for _, record in _records(path)}:
        raise ValueError(
            f"{path}: no question has the id {name!r}; list them with: python -m agentrl_envs.search {path}"
        )
    append(path, {"label": name, "supports": supports, "by": by})


def _records(path: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line; none where there is no file yet."""
    if path is None or not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error}); expected an object a line") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}:{number}: expected an object, got {line.strip()[:60]!r}")
            yield number, record
