"""The trajectory store of a run: opened for it alone, so that a resumed run can go back in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from agentrl_jax.errors import UserError
from agentrl_jax.recipes.config import Place, RunConfig
from agentrl_jax.recipes.describe import describe
from agentrl_jax.recipes.shares import store_of
from agentrl_jax.rollout.codec import digest
from agentrl_jax.runtime.store import Writer, committed

if TYPE_CHECKING:
    from agentrl_jax.recipes.policy import Policy


def open_store(config: RunConfig, policy: Policy, directory: Path, *, resume: bool, index: int = 0) -> Writer:
    """The writer of process `index` of `config.store`; raises `UserError` where trajectories of another run lie."""
    assert config.store is not None
    place, about = _place(store_of(config.store, index), directory), about_run(config, policy)
    found = committed(place)
    if found is not None and found.trajectories and not (resume and found.about == about):
        raise UserError(
            f"store={config.store!r}: holds {found.trajectories} trajectories of the run {found.about.get('run')!r}; "
            "give each run a store of its own"
        )
    return Writer(place, about)


def about_run(config: RunConfig, policy: Policy) -> dict[str, Any]:
    """What is written beside the trajectories. Who learns from them needs the same tokenizer."""
    return {
        "run": config.name,
        "seed": config.seed,
        "environment": describe(config.environment),
        "tokenizer": fingerprint_of(policy.tokenizer),
    }


def fingerprint_of(tokenizer: tokenizers.Tokenizer) -> str:
    """Equal for tokenizers whose ids mean the same."""
    return digest(sorted(tokenizer.get_vocab(with_added_tokens=True).items()))


def _place(store: Place, directory: Path) -> Place:
    if isinstance(store, str) and "://" not in store:
        return str(directory / Path(store).expanduser())
    return store
