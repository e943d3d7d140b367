"""The quickstart's loop, small enough for a test: every stage, every part, a few steps."""

import dataclasses
from functools import partial

from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes.config import Checkpoints, Evaluation, Loop, Rollout, RunConfig, Sft, Shown, TinyPolicy
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.sft import sft
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.rewards import lexicographic


def config() -> RunConfig:
    return RunConfig(
        name="small",
        environment=EnvironmentRef(
            target="agentrl_envs.workflow:suite", options={"handles": "short", "kinds": ["lookup", "cancel"]}
        ),
        policy=TinyPolicy(layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, vocab_size=512),
        stages=(sft, rl),
        rollout=Rollout(workers=8, slots=8, context=128, max_turn_tokens=8, bank=4, decode_steps=4),
        sft=Sft(steps=6, demonstrations=(Shown(count=48),), rows=8, width=128, micro_rows=8, warmup=1),
        loop=Loop(
            steps=4,
            tasks=2,
            group=4,
            objective=dataclasses.replace(grpo(beta=0.04), entropy_coef=0.001),
            reward=partial(lexicographic, broken=-1.0),
            width=128,
            micro_rows=8,
        ),
        evaluation=Evaluation(episodes=8, every=2, every_episodes=8),
        checkpoints=Checkpoints(every=1),
    )
