"""A policy as a Hugging Face directory, speaking as it trained, for any other tool to load."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from agentrl_jax.errors import UserError
from agentrl_jax.models.lora import merged
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig
from agentrl_jax.rollout.families import AUTO, read_template
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.tensor_files import read_json, write_json

# What a pretrained policy brings along and training does not change.
_WORDS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
CARRIED = (*_WORDS, "chat_template.jinja")


def put(destination: Path, make: Callable[[Path], None]) -> Path:
    """`make(directory)` beside the destination, moved there in one step."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}-") as scratch:
            made = Path(scratch) / "made"
            make(made)
            os.replace(made, destination)
    except OSError as error:
        raise UserError(f"{destination}: cannot be written ({error.strerror}); give another directory") from error
    return destination


def write(config: RunConfig, policy: policies.Policy, params: Any, directory: Path) -> None:
    """The policy with these params, adapters merged; a pretrained one keeps its tokenizer files."""
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
        carry(source, directory, CARRIED if own else _WORDS)
    if source is not None and not own:  # some tools look for a template here first
        words = directory / "tokenizer_config.json"
        write_json(words, {key: value for key, value in read_json(words).items() if key != "chat_template"})


def _speaks_as_it_came(config: RunConfig, source: Path) -> bool:
    """Whether the policy trained with the chat template that its directory has."""
    assert isinstance(config.policy, PretrainedPolicy)
    return config.policy.frame == AUTO and read_template(source, with_tools=config.rollout.describe_tools) is not None


def carry(source: Path, directory: Path, names: tuple[str, ...]) -> None:
    """Copy those of the files that there are."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
