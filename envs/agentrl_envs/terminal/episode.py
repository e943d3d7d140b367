"""The state of an episode as data: the tree, the services, what the last command printed, whether it is over."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass

from agentrl_jax.protocol import Snapshot

from .tree import Tree, from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    tree: Tree
    services: tuple[str, ...] = ()
    printed: bytes = b""  # standard output of the last command
    finished: bool = False

    def snapshot(self) -> Snapshot:
        content = json.dumps(
            {
                "tree": to_json(self.tree),
                "services": sorted(self.services),
                "printed": base64.b64encode(self.printed).decode(),
                "finished": self.finished,
            },
            sort_keys=True,
        ).encode()
        return Snapshot(data=content, hash=hashlib.sha256(content).hexdigest())


def load(snapshot: Snapshot) -> Episode:
    content = json.loads(snapshot.data)
    return Episode(
        tree=from_json(content["tree"]),
        services=tuple(content["services"]),
        printed=base64.b64decode(content["printed"]),
        finished=content["finished"],
    )
