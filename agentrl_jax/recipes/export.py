"""A run's newest checkpoint as a Hugging Face directory, for any other tool to load."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.models.lora import merged, trained, with_trained
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig
from agentrl_jax.recipes.train import resolve
from agentrl_jax.rollout.families import AUTO, read_template
from agentrl_jax.runtime import adapters, pretrained
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.tensor_files import read_json, write_json

# What a pretrained policy brings along and training does not change.
_WORDS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_CARRIED = (*_WORDS, "chat_template.jinja")


def export(config: RunConfig, run_directory: Path, destination: Path, *, adapter: bool = False) -> Path:
    """Write the newest checkpoint of a run to `destination`, which must not hold anything yet.

    A pretrained policy keeps its tokenizer files; its chat template is the one that it was trained with, be it the
    directory's own or a frame. Another gets both from its renderer. Adapters are merged into the model, or with
    `adapter` written alone, as PEFT keeps them. The directory appears whole or not at all. Raises `UserError`: no
    checkpoint, a destination in use, no adapters.
    """
    refuse_used(destination)
    settings = config.policy.lora if isinstance(config.policy, PretrainedPolicy) else None
    if adapter and settings is None:
        raise UserError("--adapter: the run trained no adapters (policy.lora is none); leave --adapter out")
    if not any((run_directory / "checkpoints").glob("[0-9]*")):
        raise UserError(f"{run_directory}: no checkpoint to export yet; let the run reach one (checkpoints.every)")
    _, policy = resolve(config)
    params = newest_params(config, policy, run_directory)
    if adapter:
        assert isinstance(config.policy, PretrainedPolicy) and settings is not None
        base = config.policy.path
        return put(
            destination,
            lambda directory: adapters.save(directory, policy.model, settings, trained(params), base_model=base),
        )
    return put(destination, lambda directory: _write(config, policy, params, directory))


def newest_params(config: RunConfig, policy: policies.Policy, run_directory: Path, place: Any = None) -> Any:
    """The params of a run's newest checkpoint, where there is one. `place`: a sharding; None: the default mesh's."""
    everywhere = place if place is not None else sharding.replicated(sharding.make_mesh())
    adapted = isinstance(config.policy, PretrainedPolicy) and config.policy.lora is not None
    # Of a policy with adapters a checkpoint holds these alone: the frozen rest comes from where it came from.
    template = (policies.initial_params if adapted else policies.param_shapes)(config, policy, everywhere)
    checkpoints = Checkpoints(run_directory / "checkpoints", keep=1, read_only=True)
    try:
        latest = checkpoints.latest()
        assert latest is not None  # callers have looked
        return with_trained(template, checkpoints.restore_params(latest, trained(template)))
    finally:
        checkpoints.close()


def convert(source: Path, destination: Path, dtype: str | None = None) -> Path:
    """A GGUF file, or a Hugging Face directory, as a Hugging Face directory that `pretrained.load` reads.

    `dtype` of the weights; None: as in the directory's params, f32. Raises `UserError` for what cannot be read.
    """
    refuse_used(destination)
    if source.is_dir():
        loaded = pretrained.load(source, dtype=dtype)
        return put(destination, lambda directory: _rewrite(source, directory, *loaded))
    if not source.is_file():
        raise UserError(f"{source}: no such file; expected a .gguf file or a Hugging Face directory")
    if dtype is not None:
        raise UserError(f"--dtype {dtype}: a GGUF file converts to f32; convert the directory again for another dtype")
    from agentrl_jax.runtime import gguf

    return put(destination, lambda directory: gguf.convert(source, directory))


def refuse_used(destination: Path) -> None:
    """Raises `UserError` where something lies already: an export replaces nothing."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination}: already holds something; give a new directory")


def put(destination: Path, write: Any) -> Path:
    """`write(directory)` beside the destination, moved there in one step."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as scratch:
            made = Path(scratch) / "made"
            write(made)
            os.replace(made, destination)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror}); give another directory") from error
    return destination


def _write(config: RunConfig, policy: policies.Policy, params: Any, directory: Path) -> None:
    source = policies.pretrained_directory(config.policy) if isinstance(config.policy, PretrainedPolicy) else None
    own = source is not None and _speaks_as_it_came(config, source)
    pretrained.save(
        directory,
        policy.model,
        jax.device_get(jax.jit(merged)(params)),
        policy.tokenizer,
        template=None if own else policy.renderer.source,
        stop_ids=policy.renderer.stop_ids,
    )
    if source is not None:
        carry(source, directory, _CARRIED if own else _WORDS)
    if source is not None and not own:  # some tools look for a template here first
        words = directory / "tokenizer_config.json"
        write_json(words, {key: value for key, value in read_json(words).items() if key != "chat_template"})


def _speaks_as_it_came(config: RunConfig, source: Path) -> bool:
    """Whether the policy trained with the chat template that its directory has."""
    assert isinstance(config.policy, PretrainedPolicy)
    return config.policy.frame == AUTO and read_template(source, with_tools=config.rollout.describe_tools) is not None


def _rewrite(source: Path, directory: Path, model: Any, params: Any, tokenizer: Any) -> None:
    pretrained.save(directory, model, params, tokenizer)
    carry(source, directory, (*_CARRIED, "generation_config.json"))


def carry(source: Path, directory: Path, names: tuple[str, ...] = _CARRIED) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
