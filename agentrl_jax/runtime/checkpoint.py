"""Checkpoints of the whole loop through Orbax: arrays, and a JSON record of where the loop stood.

A checkpoint is atomic: Orbax writes to a temporary name and renames. A process that dies while saving
leaves the previous checkpoint the latest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from agentrl_jax.errors import UserError


class Restored(NamedTuple):
    state: Any  # the tree that was saved, placed like the template
    record: dict[str, Any]  # the JSON record beside it


class Checkpoints:
    """Numbered checkpoints in one directory; keeps the newest `keep`."""

    def __init__(self, directory: Path, *, keep: int, read_only: bool = False) -> None:
        kept = None if read_only else keep
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept, enable_async_checkpointing=False, read_only=read_only, create=not read_only
        )
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, number: int, state: Any, record: dict[str, Any]) -> None:
        """Write checkpoint `number`; returns when it is durable. A failure to save raises here, in the run."""
        with jax.transfer_guard("allow"):
            arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
            self._manager.save(number, args=arguments)
            self._manager.wait_until_finished()

    def record(self, number: int) -> dict[str, Any]:
        return self._manager.restore(number, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

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
        self._manager.close()
