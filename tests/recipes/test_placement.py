"""Devices that sample and devices that learn: who they are, what is refused, and that a split run is the same run."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.recipes import meshes
from agentrl_jax.recipes.checks import check
from agentrl_jax.recipes.config import Evaluation, External, MeshShape, TinyPolicy
from agentrl_jax.recipes.dry_run import estimated_memory
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.train import train
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.runtime.store import Store
from tests.end_to_end.small_config import config as small
from tests.recipes.test_checks import good

MODEL = llama.LlamaConfig(vocab_size=64, width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=32)


def split(count, **more):
    return replace(good(), placement="split", sampler_devices=count, **more)


def test_the_last_devices_of_a_process_sample_and_the_others_learn():
    devices = jax.devices()
    assert meshes.samplers(good()) == meshes.learners(good()) == devices
    assert (meshes.learners(split(2)), meshes.samplers(split(2))) == (devices[:6], devices[6:])
    assert dict(meshes.make(split(2, mesh=MeshShape(fsdp=3))).shape) == {"data": 2, "fsdp": 3, "tensor": 1, "expert": 1}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(good(), placement="apart"), "placement='apart': expected 'colocated' or 'split'"),
        (replace(good(), sampler_devices=2), "sampler_devices=2 has no effect without placement='split'"),
        (split(0), "placement='split' needs sampler_devices"),
        (split(-1), "sampler_devices=-1: expected 0, or devices that sample"),
        (split(2, external=External(url="http://nowhere")), "placement='split' has no effect with external.url"),
    ],
)
def test_settings_that_contradict_are_refused(config, said):
    with pytest.raises(UserError) as refused:
        check(config)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "devices", "said"),
    [
        (split(8), 8, "sampler_devices=8 leaves none of a process's 8 devices to learn: set at most 7"),
        (split(1), 1, "sampler_devices=1 leaves none of a process's 1 devices to learn: set placement='colocated'"),
        (split(3), 8, "rollout.slots=64 must be a multiple of the 3 devices that sample: set rollout.slots=96"),
        (good(), 7, "rollout.slots=64 must be a multiple of the 7 devices that sample: set rollout.slots=112"),
    ],
)
def test_devices_that_cannot_be_shared_out_are_refused_with_what_to_type(monkeypatch, config, devices, said):
    monkeypatch.setattr(meshes, "devices", lambda: jax.devices()[:devices])
    with pytest.raises(UserError) as refused:
        meshes.check_placement(config)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tensor", "lag", "said"),
    [
        (3, 0, "rollout.tensor=3 does not divide the 8 devices that sample: set rollout.tensor=1"),
        (4, 0, "rollout.tensor=4 does not divide the policy's kv_heads=2: set rollout.tensor=2"),
        (2, 1, "rollout.tensor=2 with loop.max_lag=1: .*: set placement='split', or rollout.tensor=1"),
    ],
)
def test_devices_that_cannot_share_heads_are_refused(tensor, lag, said):
    config = replace(good(), rollout=replace(good().rollout, tensor=tensor))
    assert config.loop is not None
    with pytest.raises(UserError, match=said):
        meshes.check_mesh(replace(config, loop=replace(config.loop, max_lag=lag)), MODEL)


def test_a_server_that_samples_needs_no_slots_here():
    rollout = replace(good().rollout, slots=63)
    meshes.check_placement(replace(good(), rollout=rollout, external=External(url="http://nowhere")))


def test_a_dry_run_counts_the_slots_of_one_device():
    learned = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    together, apart = (estimated_memory(config, MODEL, 1000, learned) for config in (good(), split(2)))
    assert together["cache"] == 2 * 2 * (64 // 8) * good().rollout.context * 2 * 4 * 4
    assert apart["cache"] == 4 * together["cache"]
    sampling = apart["sampler"] + apart["cache"]
    learning = sum(apart.values()) - apart["total"] - sampling
    assert apart["total"] == max(sampling, learning) < together["total"] + apart["cache"]


def played(directory):
    """What was sampled, and the figures of each step that no clock has measured."""
    store = Store(str(directory / "trajectories"))
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "reward", "trained_tokens", "sampled", "ratio_deviation_max")
    sampled = sorted((t.group, t.member, t.policy_versions[-1], t.tokens, t.behavior_logprobs) for t in store)
    return sampled, [{name: row[name] for name in names} for row in rows]


@pytest.mark.slow
def test_a_split_run_samples_and_learns_what_a_colocated_one_does(tmp_path, monkeypatch):
    config = small()
    config = replace(
        config, stages=(rl,), sft=None, store="trajectories",
        policy=TinyPolicy(layers=1, width=16, heads=2, kv_heads=1, mlp_width=32, vocab_size=512),
        rollout=replace(config.rollout, workers=4, slots=4),
        loop=replace(config.loop, steps=2, tasks=1, group=4, micro_rows=4, objective=grpo(beta=0.0)),
        evaluation=Evaluation(episodes=4, every=0, every_episodes=4),
    )  # fmt: skip
    train(replace(config, placement="split", sampler_devices=4), tmp_path / "split", quiet=True)
    monkeypatch.setattr(meshes, "devices", lambda: jax.devices()[:4])
    train(config, tmp_path / "colocated", quiet=True)
    assert played(tmp_path / "split") == played(tmp_path / "colocated")
