"""The policy of a run: an architecture, its first parameters, and the renderer that speaks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.learner.score import Scorer
from agentrl_jax.models import llama, lora
from agentrl_jax.protocol import Suite
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig, TinyPolicy
from agentrl_jax.recipes.directory import is_run
from agentrl_jax.rollout import tokenizer as tiny_tokenizer
from agentrl_jax.rollout.calls import CALL_FORMATS
from agentrl_jax.rollout.families import renderer_for
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.template_renderer import TemplateRenderer


@dataclass(frozen=True)
class Policy:
    """What does not change while a policy trains: its architecture, tokenizer and renderer."""

    model: llama.LlamaConfig
    tokenizer: tokenizers.Tokenizer
    renderer: ChatRenderer | TemplateRenderer


def describe(config: RunConfig, suite: Suite) -> Policy:
    """The architecture and renderer of a config's policy, without any parameters."""
    if isinstance(config.policy, TinyPolicy):
        return _describe_tiny(config, config.policy, suite)
    from agentrl_jax.runtime import pretrained

    directory = pretrained_directory(config.policy)
    model, tokenizer = pretrained.load_config(directory)
    model = replace(model, compute_dtype=config.policy.compute_dtype, param_dtype=config.policy.param_dtype)
    if config.policy.lora is not None:
        lora.check(config.policy.lora, _shapes(model))
    if config.policy.adapter is not None:
        _check_adapter(config.policy, config.policy.adapter, model)
    if config.rollout.context > model.context:
        raise UserError(
            f"rollout.context={config.rollout.context} exceeds what {config.policy.path} was made for: {model.context}"
        )
    chosen = config.policy
    renderer = renderer_for(
        directory, tokenizer, chosen.frame, CALL_FORMATS[config.rollout.calls], suite.spec.tools,
        history=chosen.history, show_tools=config.rollout.describe_tools, thinking=chosen.thinking,
    )  # fmt: skip
    return Policy(model, tokenizer, renderer)


def _describe_tiny(config: RunConfig, size: TinyPolicy, suite: Suite) -> Policy:
    assert suite.vocabulary is not None  # checks.check_environment
    tokenizer = tiny_tokenizer.build(suite.vocabulary(), vocab_size=size.vocab_size)
    model = llama.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        width=size.width,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_width=size.width // size.heads,
        mlp_width=size.mlp_width,
        context=max(config.rollout.context, 256),
        compute_dtype=size.compute_dtype,
        param_dtype=size.param_dtype,
    )
    calls, tools = CALL_FORMATS[config.rollout.calls], suite.spec.tools
    preamble = calls.describe(tools) if config.rollout.describe_tools else None
    return Policy(model, tokenizer, ChatRenderer(tokenizer, TINY, calls, tools, preamble=preamble))


def scorer(config: RunConfig, policy: Policy) -> Scorer:
    """The policy as a loss sees it, adapters attached."""
    return scorer_of(config, policy.model)


def scorer_of(config: RunConfig, model: llama.LlamaConfig) -> Scorer:
    """`scorer` of a model alone."""
    remat, sequence = config.remat, config.mesh.sequence
    return Scorer(
        lambda params, tokens, positions, ends: llama.hidden(
            model, lora.attached(params), tokens, positions, ends, remat, sequence
        ),
        lambda params: llama.unembedding(model, lora.attached(params)),
        temperature=config.rollout.temperature,
        chunk=config.logprob_chunk,
        soft_cap=model.final_soft_cap,
        vocab_axes=sharding.axes_of("vocab"),
        row_axes=sharding.axes_of("rows"),
        width_axes=sharding.axes_of("width"),
    )


def initial_params(config: RunConfig, policy: Policy, placement: Any) -> Any:
    """Random parameters from the run's seed, or the pretrained ones.

    `placement`: one sharding for all, or `meshes.placement`: each device then makes or reads its shards alone.
    """
    if isinstance(config.policy, PretrainedPolicy):
        from agentrl_jax.runtime import pretrained

        directory, places = pretrained_directory(config.policy), placement
        if isinstance(placement, lora.LoraParams):  # what is to be quantised is read as its values will lie
            first = lambda _, place: jax.tree.leaves(place)[0]  # noqa: E731
            places = jax.tree.map(first, _shapes(policy.model), placement.base)
        params = pretrained.load_params(directory, policy.model, places)
        return params if config.policy.lora is None else _adapted(config, policy.model, params, placement)
    drawn = lambda seed: llama.init(policy.model, jax.random.key(seed))  # noqa: E731
    return jax.jit(drawn, out_shardings=placement)(np.uint32(config.seed))


def _adapted(config: RunConfig, model: llama.LlamaConfig, params: Any, placement: Any) -> lora.LoraParams:
    """The params frozen, in the bits that the settings ask for; beside them adapters from the run's seed, or those
    that it starts from."""
    policy = config.policy
    assert isinstance(policy, PretrainedPolicy) and policy.lora is not None
    settings = policy.lora
    drawn = lambda params, seed: lora.init(settings, params, jax.random.key(seed))  # noqa: E731
    fresh = jax.jit(drawn, out_shardings=placement)(params, np.uint32(config.seed))
    fresh = fresh if settings.base != "full" else fresh.replace(base=params)  # jit has copied what passed through
    if policy.adapter is None:
        return fresh
    from agentrl_jax.runtime import adapters

    loaded = adapters.load(Path(policy.adapter).expanduser(), model)[1]
    return fresh.replace(adapters=sharding.put(loaded, jax.tree.map(lambda x: x.sharding, fresh.adapters)))


def _check_adapter(policy: PretrainedPolicy, directory: str, model: llama.LlamaConfig) -> None:
    from agentrl_jax.runtime import adapters

    found, settings = adapters.load(Path(directory).expanduser(), model)[0], policy.lora
    if settings is None:
        made = f"Lora(rank={found.rank}, alpha={found.alpha:g}, targets={found.targets})"
        raise UserError(f"policy.adapter={directory}: policy.lora is none; set policy.lora={made} beside it")
    for name in ("rank", "alpha", "targets"):
        ours, theirs = getattr(settings, name), getattr(found, name)
        if ours != theirs and (name != "targets" or set(ours) != set(theirs)):
            raise UserError(
                f"policy.lora.{name}={ours}: the adapters of policy.adapter={directory} have {name}={theirs}; set that"
            )


def param_shapes(config: RunConfig, policy: Policy, sharding: Any) -> Any:
    """What `initial_params` gives, as shapes, dtypes and placement alone."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _shapes(policy.model))


def trained_shapes(config: RunConfig, policy: Policy) -> Any:
    """Shapes and dtypes of what an optimizer moves: all parameters, or those of the adapters."""
    shapes = _shapes(policy.model)
    settings = config.policy.lora if isinstance(config.policy, PretrainedPolicy) else None
    if settings is None:
        return shapes
    return jax.eval_shape(partial(lora.init, replace(settings, base="full")), shapes, jax.random.key(0)).adapters


def _shapes(model: llama.LlamaConfig) -> Any:
    return jax.eval_shape(partial(llama.init, model), jax.random.key(0))


def pretrained_directory(policy: PretrainedPolicy) -> Path:
    path = Path(policy.path).expanduser()
    if is_run(path):  # the command line has the config file that it takes to read one
        raise UserError(f"policy.path={path}: a run; give what `agentrl export {path} DST` makes of it")
    if path.is_dir():
        return path
    from agentrl_jax.runtime import model_store

    return model_store.find(str(path))
