"""A run to be compared on one process and on several: 20 steps of both stages, as few programs as a run can have."""

import dataclasses
import os

import jax
import small_config

from agentrl_jax.recipes import meshes
from agentrl_jax.recipes.config import Checkpoints, Evaluation, HostLimits, RunConfig, TinyPolicy
from agentrl_jax.rl import corrections
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.turns import added, potential_credit, step_credit

if os.environ.get("IN_TURN"):  # a device of each process after another, as a torus may lay them
    own = jax.local_device_count
    meshes.devices = lambda: [device for k in range(own()) for device in jax.devices()[k :: own()]]


def config() -> RunConfig:
    small = small_config.config()
    assert small.sft is not None and small.loop is not None
    ahead = {"max_lag": 2, "objective": grpo(beta=0.04, correction=corrections.truncated())}
    return dataclasses.replace(
        small,
        name="hosts",
        policy=TinyPolicy(layers=1, width=32, heads=2, kv_heads=1, mlp_width=64, vocab_size=512),
        rollout=dataclasses.replace(small.rollout, workers=4, slots=8),
        sft=dataclasses.replace(small.sft, steps=8),
        loop=dataclasses.replace(
            small.loop,
            steps=12,
            learning_rate=1e-3,
            credit=added(potential_credit(scale=0.1), step_credit()),
            **(ahead if os.environ.get("AHEAD") else {}),
        ),
        evaluation=Evaluation(episodes=4, every=0),
        checkpoints=Checkpoints(every=2),
        hosts=HostLimits(timeout_s=240, lost_s=120),
        store="trajectories",
    )
