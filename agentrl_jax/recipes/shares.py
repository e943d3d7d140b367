"""What each of several processes does of a run, and how the parts come together. One process does all of it.

The groups of a step are dealt out in stretches: of P tasks, process k of N samples tasks k P/N to (k+1) P/N, and packs
them into the rows of the batch that lie on its devices (`dealt`), wherever these are in the mesh. Of the trajectories
of others it gets an outline, so that figures and decisions come out the same everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from agentrl_jax import sharding
from agentrl_jax.batch import TokenBatch
from agentrl_jax.errors import UserError
from agentrl_jax.rollout.episode import EpisodePlan
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.runtime.hosts import Hosts

if TYPE_CHECKING:
    from agentrl_jax.recipes.config import Place, RunConfig

HOSTS = "hosts"  # in the run's directory: what processes other than the first write


def check_hosts(config: RunConfig, hosts: Hosts) -> None:
    """Refuses settings that several processes cannot share. Raises `UserError`."""
    if hosts.count == 1:
        return
    if config.external.url is not None:
        raise UserError(f"external.url with {hosts.count} processes: an inference server serves a run of one process")
    if config.loop is not None and config.loop.tasks % hosts.count:
        above = -(-config.loop.tasks // hosts.count) * hosts.count
        raise UserError(
            f"loop.tasks={config.loop.tasks} must be a multiple of the {hosts.count} processes that share the tasks of "
            f"a step: set it to {above}"
        )


def check_rows(mesh: jax.sharding.Mesh) -> None:
    """Refuses a mesh on which the devices of one process hold rows of others. Raises `UserError`."""
    if None in sharding.row_owners(mesh.devices):
        local, across = mesh.size // jax.process_count(), mesh.shape["tensor"] * mesh.shape["expert"]
        raise UserError(
            f"mesh.tensor x mesh.expert = {across}: must divide the {local} devices of a process, so that each process "
            "holds rows of its own; give devices to mesh.fsdp"
        )


def home(directory: Path, hosts: Hosts) -> Path:
    """Where a process writes what it sampled: the run's directory, or its own in it."""
    return directory if hosts.leads else directory / HOSTS / str(hosts.index)


def store_of(store: Place, index: int) -> Place:
    """The trajectory store of a process: each has one of its own."""
    if not index:
        return store
    if isinstance(store, str):
        return f"{store.rstrip('/')}/{HOSTS}/{index}" if "://" in store else f"{HOSTS}/{index}/{store}"
    return {**store, "path": f"{str(store.get('path', '')).rstrip('/')}/{HOSTS}/{index}"}


# -- episodes --------------------------------------------------------------------------------------------------------


def own(hosts: Hosts, plans: Sequence[EpisodePlan]) -> list[EpisodePlan]:
    """The episodes of the groups that this process samples."""
    groups = sorted({plan.group for plan in plans})
    mine = {groups[place] for place in hosts.share(len(groups))}
    return [plan for plan in plans if plan.group in mine]


def together(hosts: Hosts, found: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories of all processes, in their order; those of others in outline."""
    if hosts.count == 1:
        return list(found)
    parts = hosts.exchange([outline(t).to_json() for t in found])
    others = [[Trajectory.from_json(item) for item in part] for k, part in enumerate(parts) if k != hosts.index]
    return [t for part in (*others[: hosts.index], found, *others[hosts.index :]) for t in part]


def groups_together(hosts: Hosts, groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """`together` for whole groups of one size."""
    flat, size = [t for group in groups for t in group], len(groups[0])
    found = together(hosts, flat)
    return [found[start : start + size] for start in range(0, len(found), size)]


def outline(t: Trajectory) -> Trajectory:
    """What figures and decisions read of a trajectory: nothing of its tokens, and of its receipt what was spent."""
    task = replace(t.task, data={})
    receipt = replace(t.receipt, task=task, ref=None, steps=(), limits=None, verdict=None, tools=(), tool_versions=())
    return replace(
        t, task=task, receipt=receipt, tokens=(), sources=(), action_mask=(), behavior_logprobs=(), policy_versions=(),
        turn_ids=(), kept=None,
    )  # fmt: skip


# -- batches ---------------------------------------------------------------------------------------------------------


def renumbered(batch: TokenBatch, groups: range, group_size: int, count: int) -> TokenBatch:
    """The rows of some `groups` of `count`, packed by themselves, with the trajectory ids of the whole step."""
    ids, own_size = batch.trajectory_ids, len(groups) * group_size
    ids = np.where(ids == own_size, count * group_size, ids + groups.start * group_size).astype(ids.dtype)
    return batch._replace(trajectory_ids=ids)


def dealt(rows: jax.sharding.NamedSharding, count: int) -> list[np.ndarray]:
    """Which of `count` rows each process brings, ascending: those that lie on its devices."""
    mesh: Any = rows.mesh
    owners = np.asarray(sharding.row_owners(mesh.devices))
    of_row = np.repeat(owners, count // len(owners))
    return [np.flatnonzero(of_row == process) for process in sorted(set(owners.tolist()))]


def global_batch(batch: TokenBatch, rows: jax.sharding.NamedSharding) -> TokenBatch:
    """The global batch, of which each process brings the rows that it was `dealt`."""
    if rows.is_fully_addressable:
        return jax.device_put(batch, rows)
    total = len(batch.tokens) * jax.process_count()
    mine = dealt(rows, total)[jax.process_index()]

    def whole(field: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            at = int(np.searchsorted(mine, index[0].start))
            return field[at : at + index[0].stop - index[0].start]

        return sharding.put_shards((total, *field.shape[1:]), rows, part)

    return jax.tree.map(whole, batch)


def micro_batches(used: Sequence[int], of: Sequence[np.ndarray], micro_rows: int) -> list[int]:
    """Where the micro-batches begin that hold a token; at least one. `used`: rows with one, the first of each process;
    `of`: the rows that it was `dealt`."""
    rows = sum(map(len, of))
    filled = np.zeros(rows, np.bool_)
    for count, mine in zip(used, of, strict=True):
        filled[mine[:count]] = True
    return [start for start in range(0, rows, micro_rows) if filled[start : start + micro_rows].any()] or [0]


def summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of all processes, added up by name."""
    return {name: round(sum(part[name] for part in parts), 3) for name in parts[0]}


# -- checkpoints -----------------------------------------------------------------------------------------------------


def position(hosts: Hosts, recorded: Mapping[str, Any], left: Sequence[int] = ()) -> dict[str, Any]:
    """Where a run stands, of where each process does: with what all of them hold. Process 0 has it, and writes it.

    `left`: how many trajectories lie in the stores of processes that are no more; they may come back.
    """
    if hosts.count == 1:
        return {**recorded, "stored": [recorded["stored"], *left] if left else recorded["stored"]}
    parts = hosts.gather({name: recorded[name] for name in ("buffer", "stored")})
    if parts is None:
        return dict(recorded)
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part["buffer"]["counts"])
    buffer = {**recorded["buffer"], "counts": dict(sorted(counts.items()))}
    stored = [part["stored"] for part in parts]
    return {**recorded, "buffer": buffer, "stored": None if None in stored else [*stored, *left]}


def left_of(stored: int | Sequence[int] | None, count: int) -> list[int]:
    """How many trajectories lie in the stores of processes beyond the `count` that go on."""
    return [] if stored is None or isinstance(stored, int) else list(stored[count:])


def stored_of(stored: int | Sequence[int] | None, index: int) -> int:
    """How many trajectories process `index` had in its store."""
    lengths = [stored] if isinstance(stored, int) else list(stored or ())
    return lengths[index] if index < len(lengths) else 0
