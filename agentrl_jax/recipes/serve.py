"""Serving a checkpoint: a Hugging Face directory, a pulled model, or the newest checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig
from agentrl_jax.rollout.calls import CALL_FORMATS
from agentrl_jax.rollout.families import renderer_for
from agentrl_jax.rollout.sampling import LiveSampler, SampleRequest
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.publish import publish
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.pump import Pump
from agentrl_jax.runtime.serve.service import Service

_FIRST_VERSION = 0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A policy ready to be served: its architecture, its params (f32, as the learner has them) and its voice."""

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


def from_directory(path: str, *, calls: str = "json") -> Served:
    """A Hugging Face directory, or a name that `agentrl models pull` has fetched."""
    directory = policies.pretrained_directory(PretrainedPolicy(path=path))
    model, params, tokenizer = pretrained.load(directory)
    renderer = renderer_for(directory, tokenizer, calls=CALL_FORMATS[calls])
    return Served(
        name=path.rstrip("/"), model=model, params=params,
        chat=Chat(renderer=renderer, vocab_size=model.vocab_size),
    )  # fmt: skip


def from_run(config: RunConfig, directory: Path) -> Served:
    """The newest checkpoint of the run in `directory`, speaking as it did in the run."""
    policy = policies.describe(config, config.environment.load())
    chat = Chat(
        renderer=policy.renderer, vocab_size=policy.model.vocab_size, describe_tools=config.rollout.describe_tools
    )
    return Served(name=config.name, model=policy.model, params=_newest(policy.model, directory), chat=chat)


def is_run(directory: Path) -> bool:
    """Whether this is a run directory: a Hugging Face one holds neither of the two."""
    return (directory / "overrides.json").is_file() or (directory / "checkpoints").is_dir()


def open_service(served: Served, size: EngineSize, *, api_key: str | None = None) -> Service:
    """The service over a new engine, compiled and with its params published. Nothing listens yet."""
    context = size.context if size.context is not None else min(served.model.context, 4096)
    if context > served.model.context:
        raise UserError(f"--context {context}: {served.name} was made for at most {served.model.context} tokens")
    if size.slots % size.bank:
        raise UserError(f"--slots {size.slots}: expected a multiple of {size.bank}")
    engine = Engine(
        served.model, slots=size.slots, context=context, bank=size.bank, prefill_chunk=min(size.prefill_chunk, context),
        decode_steps=size.decode_steps, stop_ids=served.chat.renderer.stop_ids, seed=size.seed,
    )  # fmt: skip
    engine.publish(publish(served.model, served.params), _FIRST_VERSION)
    warm_up(engine)
    return Service(
        pump=Pump(engine, queue=size.queue), chat=served.chat, name=served.name, load=loader(served.model),
        api_key=api_key,
    )  # fmt: skip


def loader(model: llama.LlamaConfig) -> Callable[[str], Any]:
    """A function from a checkpoint's path to the sampler's params; `UserError` where it is of another architecture."""

    def load(path: str) -> Any:
        directory = Path(path)
        if is_run(directory):
            return publish(model, _newest(model, directory))
        other, params, _ = pretrained.load(directory)
        if other != model:
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


def _newest(model: llama.LlamaConfig, directory: Path) -> Any:
    if not any((directory / "checkpoints").glob("[0-9]*")):
        raise UserError(f"{directory}: no checkpoint to serve yet; let the run reach one (checkpoints.every)")
    checkpoints = Checkpoints(directory / "checkpoints", keep=1, read_only=True)
    try:
        latest = checkpoints.latest()
        assert latest is not None
        shapes = jax.eval_shape(partial(llama.init, model), jax.random.key(0))
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
        return checkpoints.restore_params(latest, template)
    finally:
        checkpoints.close()
