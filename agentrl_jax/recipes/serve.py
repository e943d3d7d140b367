"""Serving a checkpoint: a Hugging Face directory, a pulled model, or the newest checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig
from agentrl_jax.recipes.directory import is_run
from agentrl_jax.recipes.export import params_of
from agentrl_jax.rollout.calls import CALL_FORMATS
from agentrl_jax.rollout.families import AUTO, FAMILIES, own_calls, read_template, renderer_for
from agentrl_jax.rollout.sampling import LiveSampler, SampleRequest
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.grammars import Grammars
from agentrl_jax.runtime.publish import publish
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.pump import Pump
from agentrl_jax.runtime.serve.service import Service

_FIRST_VERSION = 0
Resolved = Callable[[Path], RunConfig]  # the config of a run directory


@dataclass(frozen=True, kw_only=True)
class Served:
    """A policy ready to be served: its architecture, its params (as the learner has them, adapters beside the rest)
    and its voice."""

    name: str
    model: llama.LlamaConfig
    params: Any
    chat: Chat


@dataclass(frozen=True, kw_only=True)
class EngineSize:
    """`slots` turns decode together, `context` tokens each; `bank` must divide `slots`."""

    slots: int = 16
    context: int | None = None  # None: what the model was made for, at most 4096
    bank: int = 4
    prefill_chunk: int = 64
    decode_steps: int = 8
    seed: int = 0
    queue: int = 256  # requests that may wait for a slot
    constrained: bool = False  # compile what holds turns to a grammar, too


def from_directory(path: str, *, calls: str | None = None, frame: str = AUTO) -> Served:
    """A Hugging Face directory, a GGUF file, or a name that `agentrl models pull` has fetched. `calls`: how calls are
    written; None: as the chat template tells the model to, else json."""
    directory = policies.pretrained_directory(PretrainedPolicy(path=path))
    model, params, tokenizer = pretrained.load(directory)
    source = FAMILIES.get(frame) if frame != AUTO else read_template(directory, with_tools=True)
    renderer = renderer_for(directory, tokenizer, frame, CALL_FORMATS[calls or own_calls(source or "")])
    return Served(
        name=path.rstrip("/"), model=model, params=params,
        chat=Chat(renderer=renderer, vocab_size=model.vocab_size),
    )  # fmt: skip


def from_run(config: RunConfig, directory: Path) -> Served:
    """The newest checkpoint of the run in `directory`, speaking as it did in the run."""
    policy = _policy(config)
    # Where the policy was told its tools, the run's renderer tells it now, too.
    chat = Chat(renderer=policy.renderer, vocab_size=policy.model.vocab_size, describe_tools=False)
    return Served(name=config.name, model=policy.model, params=_newest(config, policy, directory), chat=chat)


def open_service(
    served: Served, size: EngineSize, *, api_key: str | None = None, resolved: Resolved | None = None
) -> Service:
    """The service over a new engine, compiled and with its params published. Nothing listens yet. `resolved` lets
    runs be reloaded."""
    context = size.context if size.context is not None else min(served.model.context, 4096)
    if context > served.model.context:
        raise UserError(f"--context {context}: {served.name} was made for at most {served.model.context} tokens")
    if size.slots % size.bank:
        raise UserError(f"--slots {size.slots}: expected a multiple of {size.bank}")
    grammars = _grammars(served) if size.constrained else None
    engine = Engine(
        served.model, slots=size.slots, context=context, bank=size.bank, prefill_chunk=min(size.prefill_chunk, context),
        decode_steps=size.decode_steps, stop_ids=served.chat.renderer.stop_ids, seed=size.seed, grammars=grammars,
    )  # fmt: skip
    engine.publish(publish(served.model, served.params), _FIRST_VERSION)
    warm_up(engine)
    return Service(
        pump=Pump(engine, queue=size.queue), chat=served.chat, name=served.name, load=loader(served.model, resolved),
        api_key=api_key, grammars=grammars,
    )  # fmt: skip


def _grammars(served: Served) -> Grammars:
    renderer = served.chat.renderer
    try:
        return Grammars(renderer.vocabulary.tokenizer, vocab_size=served.model.vocab_size, stop_ids=renderer.stop_ids)
    except ValueError as error:
        raise UserError(f"--constrained: {error}") from error


def loader(model: llama.LlamaConfig, resolved: Resolved | None = None) -> Callable[[str], Any]:
    """A function from a checkpoint's path to the sampler's params; `UserError` where it is of another architecture.
    `resolved` gives the config of a run directory; without it runs are refused."""

    def load(path: str) -> Any:
        directory = Path(path)
        if is_run(directory):
            if resolved is None:
                raise UserError(f"{path}: a run, whose config is not read here; give what `agentrl export` makes of it")
            config = resolved(directory)
            policy = _policy(config)
            if policy.model != model:
                raise UserError(f"{path}: its config describes another architecture than the one that is served")
            return publish(model, _newest(config, policy, directory))
        other, params, _ = pretrained.load(directory)
        # How it computes, and what it was trained in, is ours to say.
        if replace(other, compute_dtype=model.compute_dtype, param_dtype=model.param_dtype) != model:
            raise UserError(f"{path}: its config.json describes another architecture than the one that is served")
        return publish(model, params)

    return load


def warm_up(sampler: LiveSampler) -> None:
    """Compile what requests will need, so that the first client does not wait for it."""
    shape = {"ids": (0, 0), "fresh": True, "max_tokens": 1, "temperature": 1.0}
    sampler.submit(SampleRequest(slot=0, key=(0,), **shape))
    if sampler.slots > 1:
        sampler.submit(SampleRequest(slot=1, key=(1,), share_with=0, **shape))
    while sampler.busy:
        sampler.advance()


def _policy(config: RunConfig) -> policies.Policy:
    try:
        return policies.describe(config, config.environment.load())
    except ValueError as error:
        raise UserError(f"policy: {error}") from error


def _newest(config: RunConfig, policy: policies.Policy, directory: Path) -> Any:
    if not any((directory / "checkpoints").glob("[0-9]*")):
        raise UserError(f"{directory}: no checkpoint to serve yet; let the run reach one (checkpoints.every)")
    return params_of(config, policy, directory, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
