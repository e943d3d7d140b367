"""Qwen3 at its published sizes on long rows: AGENTRL_QWEN names a directory whose config.json alone is read."""

import os
from functools import partial

from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes.config import Loop, PretrainedPolicy, Rollout, RunConfig
from agentrl_jax.recipes.rl import rl
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.rewards import lexicographic


def config() -> RunConfig:
    return RunConfig(
        name="qwen",
        environment=EnvironmentRef(target="agentrl_envs.workflow:suite", options={"kinds": ["lookup"]}),
        policy=PretrainedPolicy(path=os.environ["AGENTRL_QWEN"], compute_dtype="bfloat16"),
        stages=(rl,),
        rollout=Rollout(workers=16, slots=16, context=8192, max_turn_tokens=512, bank=16),
        loop=Loop(
            tasks=2, group=8, width=8192, micro_rows=16, objective=grpo(beta=0.0),
            reward=partial(lexicographic, broken=-0.5),
        ),
        remat="full",
    )  # fmt: skip
