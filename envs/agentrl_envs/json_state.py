"""The half of an environment that is the same wherever the whole state is one JSON object."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from agentrl_jax.protocol import Snapshot


class JsonState:
    """Snapshots, restoring and closing. `reset` sets `_state`; `step` changes what `_open` gives."""

    _state: dict[str, Any] | None = None

    def snapshot(self) -> Snapshot:
        content = json.dumps(self._open(), sort_keys=True).encode()
        return Snapshot(data=content, hash=hashlib.sha256(content).hexdigest())

    def restore(self, snapshot: Snapshot) -> None:
        self.close()
        self._state = json.loads(snapshot.data)

    def close(self) -> None:
        self._state = None

    def _open(self) -> dict[str, Any]:
        if self._state is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._state
