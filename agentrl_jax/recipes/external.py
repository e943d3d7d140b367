"""A run that samples from an inference server: `external.url` of its config."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from agentrl_jax.recipes.config import RunConfig
from agentrl_jax.recipes.huggingface import put, write
from agentrl_jax.recipes.policy import Policy
from agentrl_jax.runtime.external import Export, ExternalSampler
from agentrl_jax.runtime.external_dialects import (
    COMPLETIONS,
    GENERATE,
    SGLANG,
    reload_ours,
    reload_sglang,
    reload_vllm,
)

_KEPT = 2  # published directories: a server may still be reading the last but one
_SERVERS = {
    "agentrl": (GENERATE, reload_ours),
    "vllm": (GENERATE, reload_vllm),
    "vllm-completions": (COMPLETIONS, reload_vllm),
    "sglang": (SGLANG, reload_sglang),
}


def open_sampler(config: RunConfig, policy: Policy, directory: Path) -> ExternalSampler:
    """The sampler, whose server has answered. Raises `UserError` naming the URL where none does."""
    settings = config.external
    assert settings.url is not None
    dialect, reload = _SERVERS[settings.server]
    exports = Path(settings.exports) if settings.exports is not None else directory / "published"
    sampler = ExternalSampler(
        settings.url, slots=config.rollout.slots, context=config.rollout.context,
        stop_ids=policy.renderer.stop_ids, dialect=dialect, model=settings.model, reload=reload,
        export=exporter(config, policy, exports.expanduser().absolute()), deadline_s=settings.deadline_s,
        attempts=settings.attempts, reload_deadline_s=settings.reload_deadline_s,
        api_key=os.environ.get("AGENTRL_API_KEY") or None, seed=config.seed,
    )  # fmt: skip
    try:
        sampler.connect()
    except BaseException:
        sampler.close()
        raise
    return sampler


def exporter(config: RunConfig, policy: Policy, exports: Path) -> Export:
    """A function from params to the directory it has written them to: numbered, in `exports`, the newest two kept."""

    def export(params: Any) -> Path:
        before = sorted(int(path.name) for path in exports.glob("[0-9]*") if path.name.isdigit())
        made = put(exports / f"{(before[-1] if before else 0) + 1:06d}", lambda d: write(config, policy, params, d))
        for number in before[: -(_KEPT - 1)]:
            shutil.rmtree(exports / f"{number:06d}", ignore_errors=True)
        return made

    return export
