"""Trajectories that wait to be trained on, kept for a run that goes on: in the form of the trajectory store.

As JSON in a checkpoint's record 512 of 8,000 tokens were 160 MB that the run waited for; as columns they are a tenth of
that, written beside the run. Each process writes its own, in a folder of its number.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.runtime.store import Store, Writer, committed


def write(place: Path, trajectories: Sequence[Trajectory], said: Mapping[str, Any] | None = None) -> None:
    """Keep these at `place`, with what is `said` of them, and nothing else; without any nothing is left there."""
    shutil.rmtree(place, ignore_errors=True)
    if trajectories:
        with Writer(os.fspath(place), said) as writer:
            writer.append(trajectories)


def about(place: Path) -> dict[str, Any] | None:
    """What was said of the trajectories that lie at `place`; None where there are none."""
    commit = committed(os.fspath(place)) if place.is_dir() else None
    return None if commit is None or not commit.trajectories else dict(commit.about)


def read(place: Path) -> list[Trajectory]:
    """What lies at `place`, in order."""
    return [] if about(place) is None else list(Store(os.fspath(place)))


def parts(directory: Path) -> list[Path]:
    """The folders of processes, in the order of their numbers."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((place for place in found if place.name.isdigit()), key=lambda place: int(place.name))


class HeldHandler(ocp.AsyncCheckpointHandler):
    """How Orbax has the trajectories of this process written into a checkpoint: beside the run, and all or none."""

    async def async_save(self, directory: Any, args: Any) -> Any:
        async def write_own() -> None:
            self.save(directory, args)

        return [future.CommitFutureAwaitingContractedSignals(write_own(), name="held")]

    def save(self, directory: Any, args: Any) -> None:
        write(Path(directory) / str(jax.process_index()), args.trajectories)

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> list[Trajectory]:
        return [t for place in parts(Path(directory)) for t in read(place)]


@ocp.args.register_with_handler(HeldHandler, for_save=True)
@dataclass
class HeldSave(ocp.args.CheckpointArgs):
    trajectories: Sequence[Trajectory]


@ocp.args.register_with_handler(HeldHandler, for_restore=True)
@dataclass
class HeldRestore(ocp.args.CheckpointArgs):
    """Orbax asks that there be one; `Checkpoints.held` reads the parts of some processes alone."""
