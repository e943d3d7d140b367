"""A run's newest checkpoint as a Hugging Face directory, for any other tool to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.models.lora import trained, with_trained
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig
from agentrl_jax.recipes.huggingface import CARRIED, carry, put, write
from agentrl_jax.recipes.train import resolve
from agentrl_jax.runtime import adapters, pretrained
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.tensor_files import read_json


def export(
    config: RunConfig, run_directory: Path, destination: Path, *, adapter: bool = False, number: int | None = None
) -> Path:
    """Write checkpoint `number` of a run, or the newest, to `destination`, which must not hold anything yet.

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
    params = params_of(config, policy, run_directory, number=number)
    if adapter:
        assert isinstance(config.policy, PretrainedPolicy) and settings is not None
        base = config.policy.path
        return put(
            destination,
            lambda directory: adapters.save(directory, policy.model, settings, trained(params), base_model=base),
        )
    return put(destination, lambda directory: write(config, policy, params, directory))


def exported(config: RunConfig, run_directory: Path) -> Path:
    """The export of a run's newest checkpoint, `exports/NUMBER` in its directory; made where it is not there yet."""
    numbers = [int(path.name) for path in (run_directory / "checkpoints").glob("[0-9]*") if path.name.isdigit()]
    if not numbers:
        raise UserError(f"{run_directory}: no checkpoint to begin from yet; let the run reach one (checkpoints.every)")
    made = run_directory / "exports" / f"{max(numbers):06d}"
    return made if made.is_dir() else export(config, run_directory, made)


def params_of(
    config: RunConfig, policy: policies.Policy, run_directory: Path, place: Any = None, *, number: int | None = None
) -> Any:
    """The params of checkpoint `number` of a run, None: the newest. `place`: a sharding; None: the default mesh's.

    Raises `UserError` where there is no checkpoint of that number.
    """
    everywhere = place if place is not None else sharding.replicated(sharding.make_mesh())
    adapted = isinstance(config.policy, PretrainedPolicy) and config.policy.lora is not None
    # Of a policy with adapters a checkpoint holds these alone: the frozen rest comes from where it came from.
    template = (policies.initial_params if adapted else policies.param_shapes)(config, policy, everywhere)
    checkpoints = Checkpoints(run_directory / "checkpoints", keep=1, read_only=True)
    try:
        there = checkpoints.numbers()
        if number is not None and number not in there:
            raise UserError(f"--checkpoint {number}: the run has {', '.join(map(str, there))}; evaluations.jsonl: `at`")
        wanted = there[-1] if number is None else number
        return with_trained(template, checkpoints.restore_params(wanted, trained(template)))
    finally:
        checkpoints.close()


def convert(source: Path, destination: Path, dtype: str | None = None) -> Path:
    """A GGUF file, or a Hugging Face directory, as a Hugging Face directory that `pretrained.load` reads.

    `dtype` of the weights; None: as in the directory's params, f32. Raises `UserError` for what cannot be read.
    """
    refuse_used(destination)
    if (source / "checkpoints").is_dir():
        raise UserError(f"{source}: a run, not a model; type: agentrl export {source} {destination}")
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


def _rewrite(source: Path, directory: Path, model: Any, params: Any, tokenizer: Any) -> None:
    ends = read_json(source / "config.json").get("eos_token_id")  # a template's stops, where nothing else has them
    stops = [i for i in (ends if isinstance(ends, list) else [ends]) if type(i) is int]
    pretrained.save(directory, model, params, tokenizer, stop_ids=stops)
    carry(source, directory, (*CARRIED, "generation_config.json"))
