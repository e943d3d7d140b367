"""The policy of a run: an architecture, its first parameters, and the renderer that speaks for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import tokenizers

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.protocol import Suite
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig, TinyPolicy
from agentrl_jax.rollout import tokenizer as tiny_tokenizer
from agentrl_jax.rollout.calls import CALL_FORMATS
from agentrl_jax.rollout.renderers import CHATML, TINY, ChatFrame, ChatRenderer


@dataclass(frozen=True)
class Policy:
    """What does not change while a policy trains: its architecture, tokenizer and renderer."""

    model: llama.LlamaConfig
    tokenizer: tokenizers.Tokenizer
    renderer: ChatRenderer


def describe(config: RunConfig, suite: Suite) -> Policy:
    """The architecture and renderer of a config's policy, without any parameters."""
    if isinstance(config.policy, TinyPolicy):
        return _describe_tiny(config, config.policy, suite)
    from agentrl_jax.runtime import pretrained

    model, tokenizer = pretrained.load_config(pretrained_directory(config.policy))
    if config.rollout.context > model.context:
        raise UserError(
            f"rollout.context={config.rollout.context} exceeds what {config.policy.path} was made for: {model.context}"
        )
    return Policy(model, tokenizer, _renderer(config, tokenizer, CHATML, suite))


def _renderer(config: RunConfig, tokenizer: tokenizers.Tokenizer, frame: ChatFrame, suite: Suite) -> ChatRenderer:
    calls = CALL_FORMATS[config.rollout.calls]
    preamble = None if config.rollout.describe_tools else ""
    return ChatRenderer(tokenizer, frame, calls, suite.spec.tools, preamble=preamble)


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
    )
    return Policy(model, tokenizer, _renderer(config, tokenizer, TINY, suite))


def initial_params(config: RunConfig, policy: Policy, sharding: Any) -> Any:
    """Random parameters from the run's seed, or the pretrained ones, placed by `sharding`."""
    if isinstance(config.policy, PretrainedPolicy):
        from agentrl_jax.runtime import pretrained

        return pretrained.load_params(pretrained_directory(config.policy), policy.model, sharding)
    key = jax.random.key(config.seed)
    return jax.jit(partial(llama.init, policy.model), out_shardings=sharding)(key)


def param_shapes(policy: Policy, sharding: Any) -> Any:
    """What `initial_params` gives, as shapes, dtypes and placement alone."""
    shapes = jax.eval_shape(partial(llama.init, policy.model), jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def pretrained_directory(policy: PretrainedPolicy) -> Path:
    path = Path(policy.path).expanduser()
    if path.is_dir():
        return path
    from agentrl_jax.runtime import model_store

    return model_store.find(policy.path)
