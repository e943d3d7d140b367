"""The reinforcement stage of `small_config`, from a sampler that cuts: one step, nothing before it."""

import dataclasses

from small_config import config as small

from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.rl import rl


def config() -> RunConfig:
    base = small()
    assert base.loop is not None
    return dataclasses.replace(
        base,
        name="cut",
        stages=(rl,),
        sft=None,
        rollout=dataclasses.replace(base.rollout, top_p=0.9),
        loop=dataclasses.replace(base.loop, steps=2),
        evaluation=dataclasses.replace(base.evaluation, episodes=2, every=0),
    )
