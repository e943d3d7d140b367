"""What no machine can judge goes to a file for people: one JSON object a line, each under an id of its content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping

from agentrl_jax.protocol import Json


def add(path: str, record: Mapping[str, Json]) -> str:
    """Appends the record in one write under a lock, so that processes may share the file. Returns its id.

    The same record has the same id, so a reader can drop what was verified twice. Raises OSError.
    """
    body = json.dumps(record, sort_keys=True, ensure_ascii=False)
    identity = hashlib.sha256(body.encode()).hexdigest()[:16]
    line = (json.dumps({"id": identity, **record}, sort_keys=True, ensure_ascii=False) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        end = os.fstat(handle).st_size
        if os.write(handle, line) != len(line):
            os.ftruncate(handle, end)
            raise OSError(f"{path}: the disk is full")
    finally:
        os.close(handle)
    return identity
