"""What ends a run whose episodes say nothing about the policy any more, with a line that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl_jax.errors import UserError
from agentrl_jax.rollout.records import Trajectory


def refuse_broken(trajectories: Sequence[Trajectory], limit: float) -> None:
    """Stop where more than `limit` of the episodes failed for reasons outside the policy: nothing was measured."""
    broken = [t for t in trajectories if t.attribution is not None and t.attribution.leaves_batch]
    if len(broken) > limit * len(trajectories):
        raise UserError(
            f"the first failure: {broken[0].attribution}; {len(broken)} of {len(trajectories)} episodes "
            f"failed for reasons outside the policy (limit rollout.max_failure_fraction={limit})"
        )


def refuse_thin(trajectories: Sequence[Trajectory], least: float) -> None:
    """Stop where too few of a batch's episodes can be learned from: what is left speaks of other tasks."""
    valid = sum(t.valid for t in trajectories)
    if valid < least * len(trajectories):
        unscored = sum(t.unscored and t.attribution is None for t in trajectories)
        raise UserError(
            f"{valid} of {len(trajectories)} episodes of the step are valid (rollout.min_valid_fraction={least}); "
            f"{unscored} were left unscored by the verifier: see why with `agentrl triage RUN_DIR`, mend it, --resume"
        )


class Drops:
    """Counts the episodes in a row that failed for reasons outside the policy, over the steps of a run."""

    def __init__(self, limit: int, directory: Path) -> None:
        self.limit, self.directory, self.count = limit, directory, 0

    def add(self, trajectory: Trajectory) -> None:
        """Raises `UserError` at the one that reaches the limit."""
        lost = trajectory.attribution
        self.count = self.count + 1 if lost is not None and lost.leaves_batch else 0
        if lost is not None and self.count >= self.limit:
            raise UserError(
                f"{self.count} episodes in a row failed for reasons outside the policy "
                f"(rollout.max_consecutive_drops={self.limit}), the last: {lost}; run one again with "
                f"`agentrl replay {self.directory}/infrastructure.jsonl:1`, mend the environment, then --resume"
            )
