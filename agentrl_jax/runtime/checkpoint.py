"""Checkpoints of the whole loop through Orbax: arrays, a JSON record of where the loop stood, waiting trajectories.

A checkpoint is atomic: Orbax writes to a temporary name and renames. A process that dies while saving
leaves the previous checkpoint the latest. Saving goes on beside the run once the arrays are on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from agentrl_jax.errors import UserError
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.runtime.held import HeldSave, parts, read


class Restored(NamedTuple):
    state: Any  # the tree that was saved, placed like the template
    record: dict[str, Any]  # the JSON record beside it


class Checkpoints:
    """Numbered checkpoints in one directory: the newest `keep`, and the `best` of highest score of those with one."""

    def __init__(self, directory: Path, *, keep: int, best: int = 0, read_only: bool = False) -> None:
        kept = None if read_only else _NewestAndBest(keep, best)
        self._directory = directory
        with _unwarned() if read_only else nullcontext():
            options = ocp.CheckpointManagerOptions(
                preservation_policy=kept, best_fn=_score, enable_async_checkpointing=not read_only,
                read_only=read_only, create=not read_only,
            )  # fmt: skip
            self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def numbers(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(
        self, number: int, state: Any, record: dict[str, Any], *, held: Sequence[Trajectory] = (),
        score: float | None = None,
    ) -> None:  # fmt: skip
        """Begin to write checkpoint `number`; returns once `state` is on the host and may change or be donated.

        `held`: trajectories of this process that wait to be trained on.

        Raises `UserError` where this save, or the one before it, cannot be written.
        """
        with jax.transfer_guard("allow"), self._told():
            arguments = ocp.args.Composite(
                state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record), held=HeldSave(tuple(held))
            )
            self._manager.save(number, args=arguments, metrics={"score": score})

    @property
    def saving(self) -> bool:
        return self._manager.is_saving_in_progress()

    def check(self) -> None:
        """Raises `UserError` where a save has failed meanwhile; never waits."""
        if not self.saving:
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is durable; raises `UserError` where it failed."""
        with self._told():
            self._manager.wait_until_finished()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{self._directory}: a checkpoint could not be saved ({reason:.300}): make room or mend the disk, then "
                "--resume from the checkpoint before it"
            ) from error

    def record(self, number: int) -> dict[str, Any]:
        return self._manager.restore(number, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

    def held(self, number: int, process: int | None = None) -> list[Trajectory]:
        """The trajectories that this process, or all of them where that is None, held at checkpoint `number`."""
        places = parts(self._directory / str(number) / "held")
        return [t for place in places if process in (None, int(place.name)) for t in read(place)]

    def restore(self, number: int, template: Any) -> Restored:
        """Read checkpoint `number` into the shapes, dtypes and placement of `template`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
        with jax.transfer_guard("allow"):
            arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), record=ocp.args.JsonRestore())
            found = self._manager.restore(number, args=arguments)
        return Restored(state=found["state"], record=found["record"])

    def restore_params(self, number: int, template: Any) -> Any:
        """The `params` of checkpoint `number` alone, placed like the template; `UserError` where shapes differ
        or a part is not there: a run with adapters keeps nothing else."""
        abstract = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, template)}
        places = ocp.checkpoint_utils.construct_restore_args(abstract)
        with jax.transfer_guard("allow"):
            wanted = ocp.args.PyTreeRestore(abstract, restore_args=places, partial_restore=True)
            found = self._manager.restore(number, args=ocp.args.Composite(state=wanted))["state"]["params"]
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(found)):  # not there: left abstract
            raise UserError(f"checkpoint {number}: it holds other params than the config's policy has")
        if jax.tree.map(jnp.shape, found) != jax.tree.map(jnp.shape, template):
            raise UserError(f"checkpoint {number}: its params have other shapes than the config's policy")
        return found

    def close(self) -> None:
        with self._told():
            self._manager.close()


def _score(metrics: Any) -> Any:  # a float, or None where nothing was measured
    return metrics["score"]


@dataclass(frozen=True)
class _NewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Of equal scores the newer is the better."""

    keep: int
    best: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        scores = [(None if c.metrics is None else _score(c.metrics), place) for place, c in enumerate(checkpoints)]
        highest = sorted((score, place) for score, place in scores if score is not None)[::-1][: self.best]
        kept = {place for _, place in (*highest, *scores[-self.keep :])}
        return [place in kept for place in range(len(checkpoints))]


@contextmanager
def _unwarned() -> Iterator[None]:
    """Without Orbax's two warnings that what is opened to be read is only read."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
