"""What a run would cost, said before it starts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.kernels.kept import words
from agentrl_jax.models import llama
from agentrl_jax.recipes import meshes
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.checks import check, check_environment
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig, stage_name

_BYTES = 4  # f32 parameters, gradients, optimizer moments and logits


def dry_run(config: RunConfig) -> dict[str, Any]:
    """Resolve a config without training: parameters, token budget, estimated memory. Nothing is written."""
    check(config)
    suite = config.environment.load()
    check_environment(config, suite)
    policy = policies.describe(config, suite)
    parameters = llama.param_count(policy.model)
    trained = policies.trained_count(config, policy)
    tools = ", ".join(tool.name for tool in suite.spec.tools)
    return {
        "environment": f"{suite.spec.name} {suite.spec.version}, tools: {tools}",
        "stages": [stage_name(stage) for stage in config.stages],
        "parameters": parameters,
        "trained_parameters": trained,
        "vocabulary": policy.model.vocab_size,
        "token_budget": token_budget(config),
        "estimated_memory_bytes": estimated_memory(config, policy.model, parameters, trained),
        "devices": [str(device) for device in jax.devices()],
    }


def token_budget(config: RunConfig) -> dict[str, int]:
    """Upper bounds: every row full, every episode as long as its context."""
    budget: dict[str, int] = {}
    if config.sft is not None:
        budget["sft_tokens_at_most"] = config.sft.steps * config.sft.rows * config.sft.width
    if config.loop is not None:
        episodes = config.loop.steps * config.loop.tasks * config.loop.group
        budget |= {"rl_episodes": episodes, "rl_tokens_at_most": episodes * config.rollout.context}
    return budget


def estimated_memory(config: RunConfig, model: llama.LlamaConfig, parameters: int, trained: int) -> dict[str, int]:
    """Bytes that live together on a device: params, gradients and two moments of what is trained; the sampler's copy
    and cache, and activations, in the compute dtype; logits; and kept sets, a bit for each token of the vocabulary."""
    r, computed = config.rollout, jnp.dtype(model.compute_dtype).itemsize
    here = config.external.url is None  # else the sampler lives on a server
    slots = r.slots * r.tensor / len(meshes.samplers(config))  # that one device's pages are worth
    cache = int(2 * model.layers * slots * r.context * model.kv_heads // r.tensor * model.head_width * computed)
    shapes = [(s.micro_rows, s.width) for s in (config.sft, config.loop) if s is not None]
    per_layer = 6 * model.width + 3 * model.mlp_width
    layers = 1 if config.remat in (True, "full") else model.layers
    activations = max(
        (
            computed
            * (rows * width * (layers * per_layer + model.layers * model.width + model.heads * width * 2 * layers))
            for rows, width in shapes
        ),
        default=0,
    )
    logits = 2 * config.logprob_chunk * model.vocab_size * _BYTES
    loop = config.loop
    again = isinstance(config.policy, PretrainedPolicy) and config.policy.history == "template"
    segments = r.max_segments if again else 1
    columns = 0 if loop is None or not r.records else loop.tasks * loop.group * segments * loop.width
    parts = {
        "learner": (parameters + 3 * trained) * _BYTES,
        "sampler": parameters * computed * here // r.tensor,
        "cache": cache * here,
        "activations": activations,
        "logits": logits,
        "kept_sets": columns * words(model.vocab_size) * _BYTES,
    }
    sampling = parts["sampler"] + parts["cache"]
    learning = sum(parts.values()) - sampling
    together = max(sampling, learning) if config.placement == "split" else sampling + learning
    return parts | {"total": together}
