"""Train a small agent from nothing to a working retail assistant, on two CPU cores.

    agentrl train configs/quickstart.py

A 0.6 M parameter transformer with random parameters learns to look up orders, keep the shop's
policy and act through tools in a real SQLite tenant.
"""

from functools import partial

from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes.config import Checkpoints, Evaluation, Loop, Rollout, RunConfig, Sft, Shown, TinyPolicy
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.sft import sft
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.rewards import lexicographic


def config() -> RunConfig:
    return RunConfig(
        name="quickstart",
        environment=EnvironmentRef(
            target="agentrl_envs.workflow:suite",
            options={
                "handles": "short",
                "wording": "plain",
                "kinds": ["cancel", "return", "exchange", "address", "payment"],
                "policies": ["status"],
            },
        ),
        policy=TinyPolicy(layers=3, width=128),
        stages=(sft, rl),
        rollout=Rollout(workers=64, slots=64, context=192, max_turn_tokens=12),
        sft=Sft(
            steps=1200,
            demonstrations=(Shown(count=2500),),
            drills=4000,
            rename_handles=True,
            rows=16,
            width=128,
            micro_rows=16,
            learning_rate=3e-3,
            schedule="cosine",
        ),
        loop=Loop(
            steps=120,
            objective=grpo(beta=0.0),
            reward=partial(lexicographic, broken=-0.5),
            learning_rate=5e-4,
            schedule="cosine",
            width=256,
            micro_rows=8,
        ),
        evaluation=Evaluation(every=30),
        checkpoints=Checkpoints(every=50),
    )
