"""Episodes under way, as whoever drives them sees them: with their slot, their worker, and what each waits for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl_jax.protocol import Attribution
from agentrl_jax.rollout.episode import Ask, Episode, EpisodePlan
from agentrl_jax.rollout.records import Fork, Trajectory
from agentrl_jax.rollout.sampling import Cut
from agentrl_jax.rollout.wire import Command, Failure


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """An episode with its slot and its worker."""

    plan: EpisodePlan
    slot: int
    worker: int
    episode: Episode
    unit: Unit
    resetting: bool = False
    sampling: bool = False
    over: bool = False
    lost: Failure | None = None  # the failure that a replay under way is to explain
    queued: Command | None = None  # what to ask of the worker once its state is there
    doom: Failure | None = None  # the environment is lost for good while the slot still samples
    attribution: Attribution | None = None
    # As a source: those that are to branch from it later, and those that have, and wait for its state.
    branches: list[LiveEpisode] = field(default_factory=list)
    captures: list[LiveEpisode] = field(default_factory=list)
    capturing: bool = False  # the worker is asked for its state
    # As a branch:
    waiting: bool = False  # the source is not there yet
    forking: Forking | None = None  # it samples, and its worker is being brought to the state
    refused: Fork | None = None  # it is to start anew, once its slot is idle


@dataclass(slots=True, eq=False)
class Forking:
    """What is known so far of a fork under way; the times are of `time.monotonic`."""

    begun: float
    replayed: bool
    tokens: int
    bytes: int = 0
    seconds: float = 0.0
    hash: str = ""  # of the state that is to be restored

    @property
    def way(self) -> Literal["copied", "replayed"]:
        return "replayed" if self.replayed else "copied"


@dataclass(slots=True, eq=False)
class Unit:
    """Episodes of one group that start together and share their prompt."""

    plans: list[EpisodePlan]
    temperature: float
    cut: Cut
    deliver: Callable[[Trajectory], None]
    sources: frozenset[int]  # members of the group that others branch from
    kin: dict[int, LiveEpisode]  # those, by member, once they have started, in whatever unit of the group
    resetting: int = 0
    asks: dict[int, Ask] = field(default_factory=dict)  # by slot

    @property
    def branches(self) -> bool:
        """Whether some of these continue another."""
        return any(plan.branch is not None for plan in self.plans)


def units_of(plan: Sequence[EpisodePlan], block: int, temperature: float, cut: Cut,
             deliver: Callable[[Trajectory], None]) -> list[Unit]:  # fmt: skip
    """Cut the plan where the group changes, and after `block` episodes of one: more could never start together.

    Raises `ValueError` for a branch whose source is itself one, does not come before it, or is of another task or seed:
    its turn would never come.
    """
    units: list[Unit] = []
    for group, members in itertools.groupby(plan, key=lambda episode: episode.group):
        plans, kin = list(members), {}
        _check_branches(group, plans)
        sources = frozenset(plan.branch.member for plan in plans if plan.branch is not None)
        parts = [plans[start : start + block] for start in range(0, len(plans), block)]
        units += [Unit(part, temperature, cut, deliver, sources, kin) for part in parts]
    return units


def _check_branches(group: int, plans: Sequence[EpisodePlan]) -> None:
    trunks: dict[int, EpisodePlan] = {}
    for plan in plans:
        if plan.branch is None:
            trunks[plan.member] = plan
            continue
        source = trunks.get(plan.branch.member)
        if source is None or plan.branch.turn < 1 or (source.task, source.seed) != (plan.task, plan.seed):
            raise ValueError(
                f"group {group}: member {plan.member} continues member {plan.branch.member} before turn "
                f"{plan.branch.turn}: expected a turn of 1 or more, of a member that comes earlier in the plan, runs "
                "from the reset, and has the same task and seed"
            )
