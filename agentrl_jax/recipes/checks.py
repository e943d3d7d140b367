"""What a config may not say: settings that contradict each other, or that would have no effect."""

from __future__ import annotations

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Suite
from agentrl_jax.recipes.config import Loop, RunConfig, Sft, TinyPolicy, stage_name


def check(config: RunConfig) -> RunConfig:
    """Refuse settings that contradict each other or have no effect; returns the config unchanged.

    Raises `UserError` that names the settings, their values and what to write instead.
    """
    names = [stage_name(stage) for stage in config.stages]
    if not names:
        raise UserError("stages: the list is empty; a run needs at least one, such as (sft, rl)")
    for section, name in (("sft", "sft"), ("loop", "rl")):
        present = getattr(config, section) is not None
        if present and name not in names:
            raise UserError(f"{section}: set, but stage '{name}' is not in stages={names}: it would have no effect")
        if not present and name in names:
            raise UserError(f"stages: '{name}' needs the section {section}=..., which is None")
    _check_rollout(config)
    if config.sft is not None:
        _check_sft(config.sft)
    if config.loop is not None:
        _check_loop(config, config.loop)
    return config


def check_environment(config: RunConfig, suite: Suite) -> None:
    """Refuse settings that ask of the environment what it does not offer."""
    sft, name = config.sft, suite.spec.name
    if isinstance(config.policy, TinyPolicy):
        _require(
            suite.vocabulary is not None,
            "policy: TinyPolicy builds its tokenizer from the environment's words, and "
            f"{name!r} offers no vocabulary(); use PretrainedPolicy(path=...)",
        )
    if sft is None:
        return
    _require(suite.demonstrate is not None, f"sft: the environment {name!r} offers no demonstrate()")
    _require(
        not sft.drills or suite.drills is not None,
        f"sft.drills={sft.drills}: the environment {name!r} offers no drills(); set sft.drills=0",
    )
    _require(
        not sft.rename_handles or suite.handles is not None,
        f"sft.rename_handles=True: the environment {name!r} names no handles(); set sft.rename_handles=false",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _check_rollout(config: RunConfig) -> None:
    r, e = config.rollout, config.evaluation
    for name in ("workers", "slots", "context", "max_turn_tokens", "bank", "prefill_chunk", "decode_steps"):
        _require(getattr(r, name) >= 1, f"rollout.{name}={getattr(r, name)}: must be at least 1")
    _require(r.temperature > 0, f"rollout.temperature={r.temperature}: must be positive, since log-probs divide by it")
    _require(r.slots % r.bank == 0, f"rollout.bank={r.bank} must divide rollout.slots={r.slots}")
    _require(
        r.workers <= r.slots, f"rollout.workers={r.workers} exceeds rollout.slots={r.slots}: the surplus would idle"
    )
    _require(
        r.max_turn_tokens < r.context,
        f"rollout.max_turn_tokens={r.max_turn_tokens} must be below rollout.context={r.context}",
    )
    _require(e.episodes >= 1, f"evaluation.episodes={e.episodes}: must be at least 1")
    _require(
        e.split != "train", "evaluation.split='train': evaluate on 'validation' or 'heldout', never on training tasks"
    )
    if isinstance(config.policy, TinyPolicy):
        p = config.policy
        _require(p.width % p.heads == 0, f"policy.heads={p.heads} must divide policy.width={p.width}")
        _require(p.heads % p.kv_heads == 0, f"policy.kv_heads={p.kv_heads} must divide policy.heads={p.heads}")


def _check_sft(sft: Sft) -> None:
    _require(bool(sft.demonstrations), "sft.demonstrations is empty: name at least one, such as (Shown(count=4000),)")
    _require(sft.steps >= 1 and sft.rows >= 1, f"sft.steps={sft.steps}, sft.rows={sft.rows}: must be at least 1")
    _require(sft.rows % sft.micro_rows == 0, f"sft.micro_rows={sft.micro_rows} must divide sft.rows={sft.rows}")
    _require(sft.warmup <= sft.steps, f"sft.warmup={sft.warmup} exceeds sft.steps={sft.steps}")
    if sft.until_success is not None:
        _require(
            0 < sft.until_success <= 1,
            f"sft.until_success={sft.until_success}: expected a share in (0, 1], such as 0.4",
        )
        _require(
            sft.check_every <= sft.steps,
            f"sft.until_success is set, but sft.check_every={sft.check_every} > sft.steps={sft.steps}: never looked at",
        )


def _check_loop(config: RunConfig, loop: Loop) -> None:
    objective = loop.objective
    _require(min(loop.steps, loop.tasks, loop.group) >= 1, "loop.steps, loop.tasks and loop.group must be at least 1")
    _require(loop.group > 1, f"loop.group={loop.group}: a group of one has no baseline, every advantage would be 0")
    _require(
        loop.width >= config.rollout.context,
        f"loop.width={loop.width} is below rollout.context={config.rollout.context}: a long episode does not fit",
    )
    _require(
        (loop.tasks * loop.group) % loop.micro_rows == 0,
        f"loop.micro_rows={loop.micro_rows} must divide loop.tasks x loop.group = {loop.tasks * loop.group}",
    )
    _require(loop.warmup <= loop.steps, f"loop.warmup={loop.warmup} exceeds loop.steps={loop.steps}")
    if loop.skip_constant_groups:
        quiet = objective.beta == 0.0 and objective.entropy_coef == 0.0
        _require(
            quiet,
            "loop.skip_constant_groups=True drops groups that the objective's beta or entropy_coef would still train",
        )
