"""Real customer-service tasks (the `retail` data set) with SmolLM2-135M-Instruct.

    agentrl models pull smollm2-135m
    agentrl train configs/retail_smollm2.py loop.steps=3 loop.tasks=2 sft.steps=12 evaluation.episodes=8

The line above is a walk through every stage, in minutes on two cores; on an accelerator, leave the overrides out.
`AGENTRL_DATA` names the directory that holds `retail/`, if it is not to be downloaded.
"""

from functools import partial

from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes.config import Checkpoints, Evaluation, Loop, PretrainedPolicy, Rollout, RunConfig, Sft, Shown
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.sft import sft
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.rewards import lexicographic


def config() -> RunConfig:
    return RunConfig(
        name="retail_smollm2",
        environment=EnvironmentRef(target="agentrl_envs.retail:suite"),
        policy=PretrainedPolicy(path="smollm2-135m", frame="chatml"),
        stages=(sft, rl),
        rollout=Rollout(
            workers=16, slots=16, context=2048, max_turn_tokens=160, bank=4, prefill_chunk=64, calls="json"
        ),
        sft=Sft(
            steps=250,
            demonstrations=(Shown(count=495),),
            rows=4,
            width=2048,
            micro_rows=1,
            learning_rate=1e-4,
            warmup=4,
        ),
        loop=Loop(
            steps=100,
            tasks=8,
            group=8,
            objective=grpo(beta=0.0),
            reward=partial(lexicographic, broken=-0.5),
            learning_rate=1e-5,
            width=2048,
            micro_rows=1,
            skip_constant_groups=True,
            train_tasks=495,
        ),
        evaluation=Evaluation(episodes=107, every=0),
        checkpoints=Checkpoints(every=25),
        remat=True,
        logprob_chunk=256,
    )
