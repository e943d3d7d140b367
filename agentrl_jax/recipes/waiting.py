"""What was sampled and waits to be trained on, kept over the end of the process that sampled it.

A checkpoint holds it as it was then. A run that is stopped by a signal leaves more beside its checkpoints: the episodes
that were over when it stopped, for the steps that follow the newest one. With `max_lag=0` they are what would be
sampled again, to the bit.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentrl_jax.recipes.pacing import take_in
from agentrl_jax.recipes.shares import HOSTS
from agentrl_jax.rollout.buffer import Buffer
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.runtime import held

if TYPE_CHECKING:
    from agentrl_jax.recipes.run import Run

SINCE = "waiting"  # in the home of each process


def stop(run: Run) -> None:
    """Keep all that a run which goes on can use: the last recorded step, and the episodes that are over since.

    Where the params have gone on meanwhile there is no step for these.
    """
    with suppress(Exception):  # whatever comes of what arrives at last: it is the signal that ends the run
        take_in(run, run.finished)
    # The signal may have been sent to environment workers as well: what they broke is tried again.
    sound = [t for t in run.buffer.held() if t.attribution is None or not t.attribution.leaves_batch]
    run.buffer = Buffer.of(run.buffer.group_size, sound, run.buffer.counts)
    run.keep()
    if run.recorded is None or run.recorded["at"] == run.at:
        about = {"at": run.at, "processes": run.hosts.count, "counts": dict(run.buffer.counts)}
        held.write(run.home / SINCE, run.waiting, about)


def buffer_of(run: Run, record: dict[str, Any]) -> Buffer:
    """What this process goes on with at a checkpoint, however many there were when it was written."""
    tasks, data = 1 if run.config.loop is None else run.config.loop.tasks, record["buffer"]
    counts = Counter(data["counts"] if run.hosts.leads else {})
    left = _since(run)
    if left:
        trajectories = [t for _, found in left for t in found]
        counts = sum((Counter(about["counts"]) for about, _ in left if run.hosts.leads or len(left) == 1), Counter())
    elif "trajectories" in data:  # as the first checkpoints had them
        trajectories = [Trajectory.from_json(item) for item in data["trajectories"]]
    else:
        same = record["processes"] == run.hosts.count
        trajectories = run.checkpoints.held(run.at, run.hosts.index if same else None)
    mine = run.hosts.share(tasks)
    return Buffer.of(data["group_size"], [t for t in trajectories if t.group % tasks in mine], counts)


def _since(run: Run) -> list[tuple[dict[str, Any], list[Trajectory]]]:
    """What this process left at this step; what all of them left, where they were not as many as now."""
    places = [run.directory / SINCE, *sorted((run.directory / HOSTS).glob(f"[0-9]*/{SINCE}"))]
    found = {place: about for place in places if (about := held.about(place)) is not None and about["at"] == run.at}
    own = run.home / SINCE
    if own in found and found[own]["processes"] == run.hosts.count:
        return [(found[own], held.read(own))]
    return [(about, held.read(p)) for p, about in found.items() if about["processes"] != run.hosts.count]
