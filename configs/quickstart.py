"""Train a small agent from nothing to a working retail assistant, on two CPU cores.

    agentrl train configs/quickstart.py

A 0.9 M parameter transformer with random parameters learns to look up orders, keep the shop's
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
            target="agentrl_envs.workflow:suite", options={"handles": "short", "wording": "plain"}
        ),
        policy=TinyPolicy(),
        stages=(sft, rl),
        rollout=Rollout(workers=64, slots=64, context=192, max_turn_tokens=12),
        sft=Sft(
            steps=600,
            demonstrations=(Shown(count=3000), Shown(count=1500, options={"kinds": ["lookup"]})),
            until_success=0.35,
        ),
        loop=Loop(steps=80, objective=grpo(beta=0.0), reward=partial(lexicographic, broken=-1.0)),
        evaluation=Evaluation(),
        checkpoints=Checkpoints(),
    )
