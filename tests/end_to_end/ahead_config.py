"""The small run with rollouts that run two steps ahead of the learner."""

import dataclasses

import small_config

from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.rl import rl
from agentrl_jax.rl import corrections
from agentrl_jax.rl.algorithms import grpo


def config() -> RunConfig:
    small = small_config.config()
    assert small.loop is not None
    objective = grpo(beta=0.04, correction=corrections.truncated())
    loop = dataclasses.replace(small.loop, steps=6, max_lag=2, objective=objective)
    return dataclasses.replace(small, name="ahead", stages=(rl,), sft=None, loop=loop)
