"""Checkpoints: onto other meshes bit for bit, beside a run that donates, the newest and the best; failures are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.runtime.checkpoint import Checkpoints

HOST = {
    "a": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32),
    "b": np.arange(24, dtype=np.int32).reshape(8, 3),
    "step": np.int32(7),
}
SPECS = {"a": PartitionSpec("fsdp", "tensor"), "b": PartitionSpec("fsdp"), "step": PartitionSpec()}


def placed(devices: int, **axes: int) -> Any:
    mesh = sharding.make_mesh(data=1, **axes, devices=jax.devices()[:devices])
    return {name: jax.device_put(value, NamedSharding(mesh, SPECS[name])) for name, value in HOST.items()}


def numbers(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.parametrize(("devices", "axes"), [(8, {"fsdp": 4, "tensor": 2}), (4, {"fsdp": 4}), (1, {"fsdp": 1})])
def test_it_is_restored_onto_another_mesh_bit_for_bit(directory: Path, devices: int, axes: dict[str, int]) -> None:
    checkpoints = Checkpoints(directory, keep=1)
    checkpoints.save(3, placed(8, fsdp=8), {"at": 3})
    checkpoints.close()
    template = jax.tree.map(jnp.zeros_like, placed(devices, **axes))
    again = Checkpoints(directory, keep=1)
    found = again.restore(3, template)
    assert found.record == {"at": 3}
    for name, value in HOST.items():
        assert found.state[name].sharding == template[name].sharding and found.state[name].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(found.state[name]), value)
    again.close()


def test_what_is_saved_may_be_donated_at_once(directory: Path) -> None:
    """The updates that follow a save do not reach into it."""
    checkpoints = Checkpoints(directory, keep=8)
    state = placed(8, fsdp=8)
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    for number in range(4):
        checkpoints.save(number, state, {})
        for _ in range(3):
            state = advance(state)
    checkpoints.wait()
    for number in range(4):
        found = checkpoints.restore(number, state).state
        for name, value in HOST.items():
            np.testing.assert_array_equal(np.asarray(found[name]), value * np.asarray(8**number, value.dtype))
    checkpoints.close()


def test_the_newest_and_the_best_stay(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: None, 5: 0.4, 6: None, 7: None}
    checkpoints = Checkpoints(directory, keep=2, best=2)
    for number, score in list(scores.items())[:4]:
        checkpoints.save(number, placed(1), {}, score=score)
    checkpoints.close()
    assert numbers(directory) == [1, 2, 3, 4]
    checkpoints = Checkpoints(directory, keep=2, best=2)  # a resumed run knows the scores of the one before it
    for number, score in list(scores.items())[4:]:
        checkpoints.save(number, placed(1), {}, score=score)
    checkpoints.close()
    assert numbers(directory) == [1, 2, 6, 7]
    newest = Checkpoints(directory, keep=2)
    newest.save(8, placed(1), {}, score=0.0)
    newest.close()
    assert not capfd.readouterr().err, "nothing is said where all is well"
    assert numbers(directory) == [7, 8] and Checkpoints(directory, keep=1, read_only=True).latest() == 8


@pytest.mark.parametrize("seen_by", ["check", "wait", "save", "close"])
def test_a_failed_save_is_told_in_the_run(directory: Path, monkeypatch: pytest.MonkeyPatch, seen_by: str) -> None:
    """The disk fails after `save` has returned, when the checkpoint is about to be given its name."""
    checkpoints = Checkpoints(directory, keep=4)
    checkpoints.save(1, placed(1), {})
    checkpoints.wait()
    fail_to_finish(monkeypatch)
    checkpoints.save(2, placed(1), {})
    while checkpoints._manager.is_saving_in_progress():
        pass
    with pytest.raises(UserError, match=r"checkpoint could not be saved \(.*No space left on device.*--resume") as told:
        checkpoints.save(3, placed(1), {}) if seen_by == "save" else getattr(checkpoints, seen_by)()
    assert str(directory) in str(told.value) and "\n" not in str(told.value)
    monkeypatch.undo()
    assert Checkpoints(directory, keep=4, read_only=True).latest() == 1


def fail_to_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    from orbax.checkpoint._src.path import atomicity

    async def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("AtomicRenameTemporaryPath", "CommitFileTemporaryPath"):
        monkeypatch.setattr(getattr(atomicity, name), "finalize", full)
