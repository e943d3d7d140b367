"""What a run would cost, said before it starts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agentrl_jax.kernels.kept import words
from agentrl_jax.models import llama
from agentrl_jax.recipes import meshes, rl, sft
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.checks import check, check_environment
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig, stage_name

_BYTES = 4  # f32 gradients and logits


def dry_run(config: RunConfig) -> dict[str, Any]:
    """Resolve a config without training: parameters, token budget, estimated memory. Nothing is written."""
    check(config)
    suite = config.environment.load()
    check_environment(config, suite)
    policy = policies.describe(config, suite)
    parameters = llama.param_count(policy.model)
    trained = policies.trained_shapes(config, policy)
    tools = ", ".join(tool.name for tool in suite.spec.tools)
    return {
        "environment": f"{suite.spec.name} {suite.spec.version}, tools: {tools}",
        "stages": [stage_name(stage) for stage in config.stages],
        "parameters": parameters,
        "trained_parameters": sum(x.size for x in jax.tree.leaves(trained)),
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


def estimated_memory(config: RunConfig, model: llama.LlamaConfig, parameters: int, trained: Any) -> dict[str, int]:
    """Bytes that live together on a device: params, gradients and the optimizer's state of what is trained; the
    sampler's copy and cache, and activations, in the compute dtype; logits; and kept sets, a bit for each token of the
    vocabulary."""
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
        "learner": _learner(config, model, parameters, trained),
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


def _learner(config: RunConfig, model: llama.LlamaConfig, parameters: int, trained: Any) -> int:
    """Of the stage that keeps most; what it offloads is in the host's memory."""
    frozen = parameters if isinstance(config.policy, PretrainedPolicy) and config.policy.lora is not None else 0
    params = bytes_of(trained) + frozen * jnp.dtype(model.param_dtype).itemsize
    made = [sft.optimizer_of(config.sft)] if config.sft is not None and not config.sft.offload else []
    made += [rl.optimizer_of(config.loop)] if config.loop is not None and not config.loop.offload else []
    states = [bytes_of(jax.eval_shape(one.init, trained)) for one in made]
    return params + sum(x.size for x in jax.tree.leaves(trained)) * _BYTES + max(states, default=0)


def bytes_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
