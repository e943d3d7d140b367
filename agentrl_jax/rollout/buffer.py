"""Finished trajectories on their way into groups. Groups are told apart by id, never by position.

Nothing is ever dropped for its age: a slow episode would then train less often than its task is drawn. How old a
trajectory may become is settled when its episode is admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from agentrl_jax.protocol import StopReason
from agentrl_jax.rollout.records import Trajectory


class Buffer:
    """Collects trajectories until all `group_size` members of a group are there, failed ones too.

    `counts` tells what went through it: `added`, `valid`, `unscored`, `healed`, `stop/<reason>`, and
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

    def holds(self, group: int, member: int) -> bool:
        return member in self._groups.get(group, ())

    def complete(self, groups: Iterable[int]) -> bool:
        """Whether every member of each of these is there."""
        return all(len(self._groups.get(group, ())) == self.group_size for group in groups)

    def pop(self, groups: Iterable[int]) -> list[list[Trajectory]]:
        """These groups in the order named, which must be complete, members in order; they leave the buffer."""
        groups = list(groups)
        if not self.complete(groups):
            raise ValueError(f"groups {groups}: expected all {self.group_size} members of each to be there")
        taken = [self._groups.pop(group) for group in groups]
        return [[members[member] for member in range(self.group_size)] for members in taken]

    def drop(self, group: int) -> None:
        """Forget what is held of a group that is to begin anew; `counts` keep it, and as `begun_anew`."""
        self.counts["begun_anew"] += len(self._groups.pop(group, ()))

    def held(self) -> list[Trajectory]:
        """What is there, of incomplete groups too, by group and member."""
        return [self._groups[group][member] for group in sorted(self._groups) for member in sorted(self._groups[group])]

    @classmethod
    def of(cls, group_size: int, held: Iterable[Trajectory], counts: Mapping[str, int]) -> Buffer:
        """A buffer that goes on where another one was with this `held` and these `counts`."""
        buffer = cls(group_size)
        for trajectory in held:
            buffer.add(trajectory)
        buffer.counts = Counter(counts)
        return buffer
