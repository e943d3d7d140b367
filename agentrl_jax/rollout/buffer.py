"""Finished trajectories on their way into groups. Groups are told apart by id, never by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentrl_jax.protocol import StopReason
from agentrl_jax.rollout.records import Trajectory


class Buffer:
    """Collects trajectories until all `group_size` members of a group are there, failed ones too.

    `counts` tells what went through it: `added`, `valid`, `unscored`, `stale`, `healed`, `stop/<reason>`, and
    `cause/<cause>` for the attributed ones. Timeouts are told apart: `policy_timeout` (it stays a failure) and
    `infra_timeout` (the machine did, and the episode left the batch).
    """

    def __init__(self, group_size: int) -> None:
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: expected at least 1")
        self.group_size = group_size
        self.counts: Counter[str] = Counter()
        self._groups: dict[int, dict[int, Trajectory]] = {}

    def __len__(self) -> int:
        """Trajectories held."""
        return sum(len(members) for members in self._groups.values())

    def add(self, trajectory: Trajectory) -> None:
        """Raises `ValueError` for a member that is out of range or already there."""
        members = self._groups.setdefault(trajectory.group, {})
        if not 0 <= trajectory.member < self.group_size or trajectory.member in members:
            raise ValueError(
                f"group {trajectory.group}: member {trajectory.member} "
                f"is outside 0..{self.group_size - 1} or there twice"
            )
        members[trajectory.member] = trajectory
        self.counts["added"] += 1
        self.counts["valid"] += trajectory.valid
        self.counts["unscored"] += trajectory.unscored
        self.counts["healed"] += trajectory.receipt.healed
        self.counts[f"stop/{trajectory.stop}"] += 1
        if trajectory.attribution is not None:
            self.counts[f"cause/{trajectory.attribution.cause}"] += 1
        if trajectory.stop is StopReason.TIMEOUT:
            left = trajectory.attribution is not None and trajectory.attribution.leaves_batch
            self.counts["infra_timeout" if left else "policy_timeout"] += 1

    def ready(self) -> list[int]:
        """Ids of the complete groups, in ascending order."""
        return sorted(group for group, members in self._groups.items() if len(members) == self.group_size)

    def pop(self, n: int, version: int, max_lag: int) -> list[list[Trajectory]]:
        """At most `n` complete groups by ascending id, members in order; they leave the buffer.

        A group whose oldest sampled token is more than `max_lag` versions behind `version` is dropped and its
        members are counted as `stale`.
        """
        taken: list[list[Trajectory]] = []
        for group in self.ready():
            if len(taken) == n:
                break
            members = self._groups.pop(group)
            oldest = min((t.oldest_version for t in members.values() if t.oldest_version is not None), default=version)
            if version - oldest > max_lag:
                self.counts["stale"] += len(members)
            else:
                taken.append([members[member] for member in sorted(members)])
        return taken

    def to_json(self) -> dict[str, Any]:
        """The whole state: what is held, incomplete groups too, and the counts."""
        held = [self._groups[group][member] for group in sorted(self._groups) for member in sorted(self._groups[group])]
        return {
            "group_size": self.group_size,
            "counts": dict(self.counts),
            "trajectories": [trajectory.to_json() for trajectory in held],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Buffer:
        buffer = cls(data["group_size"])
        for item in data["trajectories"]:
            buffer.add(Trajectory.from_json(item))
        buffer.counts = Counter(data["counts"])
        return buffer
