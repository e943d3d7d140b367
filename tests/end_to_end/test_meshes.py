"""The same run on every mesh: real runs, supervised and by reinforcement, whose losses may not tell where they ran."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from agentrl_jax.recipes import meshes
from agentrl_jax.recipes.config import Checkpoints, Evaluation, MeshShape, Rollout, RunConfig, TinyPolicy
from agentrl_jax.recipes.train import train
from tests.end_to_end import small_config

BOUND = 1e-5  # of f32 losses
MESHES = {
    "data2": (2, MeshShape()),
    "fsdp2": (2, MeshShape(fsdp=2)),
    "tensor2": (2, MeshShape(tensor=2)),
    "data4": (4, MeshShape()),
    "fsdp4": (4, MeshShape(fsdp=4)),
    "tensor4": (4, MeshShape(tensor=4)),
    "fsdp2-tensor2-sequence": (4, MeshShape(fsdp=2, tensor=2, sequence=True)),
    "data8": (8, MeshShape()),
    "fsdp8": (8, MeshShape(fsdp=8)),
    "data2-fsdp2-tensor2": (8, MeshShape(data=2, fsdp=2, tensor=2)),
    "fsdp2-tensor4": (8, MeshShape(fsdp=2, tensor=4)),
}


def config(steps: int, shape: MeshShape) -> RunConfig:
    """As many supervised as reinforced steps, each compiled once (`assert_compiled_once`), under the transfer guard."""
    small = small_config.config()
    assert small.sft is not None and small.loop is not None
    return replace(
        small,
        mesh=shape,
        environment=replace(small.environment, target="tests.end_to_end.lucky_suite:suite"),
        policy=TinyPolicy(layers=1, width=32, heads=4, kv_heads=4, mlp_width=64, vocab_size=376),
        rollout=Rollout(workers=4, slots=8, context=128, max_turn_tokens=4, bank=8, decode_steps=4),
        sft=replace(small.sft, steps=steps, learning_rate=1e-3),
        loop=replace(small.loop, steps=steps, learning_rate=1e-3),
        evaluation=Evaluation(episodes=1, every=0),
        checkpoints=Checkpoints(every=1, keep=2 * steps),
    )


def run(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    devices: int,
    shape: MeshShape,
    steps: int,
    *,
    resume: bool = False,
) -> list[dict]:
    """The figures of all steps."""
    monkeypatch.setattr(meshes, "devices", lambda: jax.devices()[:devices])
    train(config(steps, shape), directory, resume=resume, quiet=True)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def differ(found: list[dict], expected: list[dict]) -> float:
    """The largest difference of two runs' losses; they learned from the same tokens."""
    assert [row["trained_tokens"] for row in found] == [row["trained_tokens"] for row in expected]
    return max(abs(one["loss"] - other["loss"]) for one, other in zip(found, expected, strict=True))


def test_the_same_losses_on_fsdp_and_tensor_meshes_also_where_a_run_goes_on_under_another(monkeypatch, tmp_path):
    steps = 2
    expected = run(monkeypatch, tmp_path / "one", 1, MeshShape(), steps)
    assert [row["stage"] for row in expected] == ["sft"] * steps + ["rl"] * steps
    split = tmp_path / "fsdp"
    assert differ(run(monkeypatch, split, *MESHES["fsdp2"], steps), expected) < BOUND
    shutil.rmtree(split / "checkpoints" / str(2 * steps))  # as if it had been stopped before
    assert differ(run(monkeypatch, split, *MESHES["tensor2"], steps, resume=True), expected) < BOUND
    assert differ(run(monkeypatch, tmp_path / "all", *MESHES["data2-fsdp2-tensor2"], steps), expected) < BOUND


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run(monkeypatch, tmp_path_factory.mktemp("one") / "run", 1, MeshShape(), 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_twenty_steps_have_the_same_losses_on_every_mesh(monkeypatch, tmp_path, long_run, name):
    found = differ(run(monkeypatch, tmp_path / "run", *MESHES[name], 10), long_run)
    print(f"{name}: losses of 20 steps differ by {found:.1e}")
    assert found < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "shape"), [(1, MeshShape()), MESHES["tensor2"]], ids=["one", "tensor2"])
def test_a_checkpoint_of_four_shares_goes_on_elsewhere(monkeypatch, tmp_path, long_run, devices, shape):
    run(monkeypatch, tmp_path / "run", *MESHES["fsdp4"], 10)
    for number in range(13, 21):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(number))
    assert differ(run(monkeypatch, tmp_path / "run", devices, shape, 10, resume=True), long_run) < BOUND
