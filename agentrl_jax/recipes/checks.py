"""What a config may not say: settings that contradict each other, or that would have no effect."""

from __future__ import annotations

import dataclasses
import math
import typing

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import Suite
from agentrl_jax.recipes.config import (
    ComputeDtype,
    External,
    Loop,
    MeshShape,
    OptimizerName,
    PretrainedPolicy,
    Remat,
    RunConfig,
    Sft,
    Shown,
    TinyPolicy,
    stage_name,
)
from agentrl_jax.recipes.optimizing import can_offload
from agentrl_jax.recipes.pacing import capped_rate
from agentrl_jax.recipes.turn_credit import check_credit
from agentrl_jax.rl.objective import check_bounded
from agentrl_jax.rollout.ray_pool import SCHEME
from agentrl_jax.rollout.renderers import FRAMES
from agentrl_jax.rollout.sampling import WHOLE, Cut
from agentrl_jax.rollout.turns import SameState
from agentrl_jax.runtime import grammars
from agentrl_jax.sharding import AXES

_COUNTS = {  # smallest whole number that makes sense
    "rollout": dict.fromkeys(
        ("workers", "slots", "tensor", "max_turn_tokens", "max_segments", "bank", "prefill_chunk", "decode_steps"), 1
    )
    | {"max_consecutive_drops": 1, "evidence_patience": 0},
    "policy": dict.fromkeys(("layers", "width", "heads", "kv_heads", "mlp_width", "vocab_size"), 1),
    "sft": dict.fromkeys(("steps", "rows", "width", "micro_rows", "check_every", "check_episodes"), 1)
    | dict.fromkeys(("drills", "warmup"), 0),
    "loop": dict.fromkeys(("steps", "tasks", "width", "micro_rows", "updates_per_batch", "train_tasks"), 1)
    | {"warmup": 0, "group": 2, "max_lag": 0},
    "evaluation": {"episodes": 1, "every": 0, "every_episodes": 1, "seed": 0},
    "checkpoints": {"every": 1, "keep": 1, "best": 0},
    "external": {"attempts": 1},
}
_POSITIVE = {
    "rollout": ("temperature", "start_deadline_s", "step_deadline_s", "stall_s"),
    "external": ("deadline_s", "reload_deadline_s"),
    "hosts": ("timeout_s", "lost_s"),
    "sft": ("learning_rate", "max_grad_norm"),
    "loop": ("learning_rate", "max_grad_norm"),
}
_MOST = 10**9  # beyond it no count is meant


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
    _require(len(set(names)) == len(names), f"stages={names}: a name comes twice; resume could not tell them apart")
    _require(
        config.checkpoints.best == 0 or "rl" in names,
        f"checkpoints.best={config.checkpoints.best} has no effect without the stage 'rl' and its evaluations",
    )
    _require(
        config.store is None or "rl" in names,
        f"store={config.store!r} has no effect without the stage 'rl': it is what that stage samples that is kept",
    )
    remats = typing.get_args(Remat)
    _require(config.remat in (True, False, *remats), f"remat={config.remat!r}: expected one of {', '.join(remats)}")
    for name in ("compute_dtype", "param_dtype"):
        _one_of(f"policy.{name}", getattr(config.policy, name), ComputeDtype)
    _check_bounds(config)
    _check_rollout(config)
    _check_external(config)
    _check_mesh(config.mesh)
    _check_placement(config)
    if config.sft is not None:
        _check_sft(config.sft)
    if config.loop is not None:
        _check_loop(config, config.loop)
    _check_optimizers(config)
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
    _offers(suite, config.evaluation.split, "evaluation.split")
    if config.loop is not None:
        _offers(suite, "train", "loop")
        _require(
            config.loop.branching is None or suite.spec.fork != "none",
            f"loop.branching: the states of the environment {name!r} cannot be copied (its spec says fork='none'); set "
            "loop.branching=None",
        )
    if sft is None:
        return
    if sft.until_success is not None:
        _offers(suite, "validation", "sft.until_success")
    taught = any(isinstance(part, Shown) for part in sft.demonstrations)
    _require(
        not taught or suite.demonstrate is not None,
        f"sft: the environment {name!r} offers no demonstrate(); show what a run has kept, with Stored(path=...)",
    )
    _require(
        not sft.drills or suite.drills is not None,
        f"sft.drills={sft.drills}: the environment {name!r} offers no drills(); set sft.drills=0",
    )
    _require(
        not sft.rename_handles or suite.handles is not None,
        f"sft.rename_handles=True: the environment {name!r} names no handles(); set sft.rename_handles=false",
    )


def check_offload(config: RunConfig) -> None:
    """Refuse to lay moments where this process's devices cannot reach."""
    for section in ("sft", "loop"):
        part = getattr(config, section)
        _require(
            part is None or not part.offload or can_offload(),
            f"{section}.offload=True: these devices have no memory of kind 'pinned_host'; set {section}.offload=false",
        )


def _offers(suite: Suite, split: str, setting: str) -> None:
    """One task of the split, to know that there is such a split and that its data is there."""
    try:
        found = len(suite.tasks(split, 1, 0))
    except Exception as error:
        raise UserError(f"{setting}: no tasks of split {split!r}: {type(error).__name__}: {error}") from error
    _require(found == 1, f"{setting}: the environment {suite.spec.name!r} has no tasks of split {split!r}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _one_of(setting: str, value: object, literal: object) -> None:
    words = typing.get_args(literal)
    _require(value in words, f"{setting}={value!r}: expected one of {', '.join(words)}")


def _check_optimizers(config: RunConfig) -> None:
    adapted = isinstance(config.policy, PretrainedPolicy) and config.policy.lora is not None
    for section in ("sft", "loop"):
        part: Sft | Loop | None = getattr(config, section)
        if part is None:
            continue
        _one_of(f"{section}.optimizer", part.optimizer, OptimizerName)
        _one_of(f"{section}.moment_dtype", part.moment_dtype, ComputeDtype)
        if part.optimizer == "adafactor":
            _require(
                part.moment_dtype == "float32",
                f"{section}.moment_dtype={part.moment_dtype!r} has no effect with {section}.optimizer='adafactor', "
                "which keeps no first moment",
            )
            _require(
                not part.offload or adapted or config.policy.param_dtype != "float32",
                f"{section}.offload=True: with {section}.optimizer='adafactor' and policy.param_dtype='float32' there "
                "is next to nothing to offload; leave it out",
            )


def _check_bounds(config: RunConfig) -> None:
    for section, bounds in _COUNTS.items():
        part = getattr(config, section)
        for name, least in bounds.items():
            value = getattr(part, name, least)
            _require(
                least <= value <= _MOST, f"{section}.{name}={str(value)[:20]}: expected a whole number from {least} on"
            )
    for section, names in _POSITIVE.items():
        part = getattr(config, section)
        for name in names if part is not None else ():
            value = getattr(part, name)
            _require(0 < value < math.inf, f"{section}.{name}={value}: expected a positive, finite number")
    for name, least in (("seed", 0), ("logprob_chunk", 1)):
        value = getattr(config, name)
        _require(least <= value <= _MOST, f"{name}={str(value)[:20]}: expected a whole number from {least} on")
    for index, shown in enumerate(config.sft.demonstrations if config.sft is not None else ()):
        count = 1 if shown.count is None else shown.count
        _require(1 <= count <= _MOST, f"sft.demonstrations.{index}.count={count}: expected at least 1")


def _check_rollout(config: RunConfig) -> None:
    r, e = config.rollout, config.evaluation
    _require(r.slots % r.bank == 0, f"rollout.bank={r.bank} must divide rollout.slots={r.slots}")
    _require(
        r.workers <= r.slots, f"rollout.workers={r.workers} exceeds rollout.slots={r.slots}: the surplus would idle"
    )
    _require(
        r.max_turn_tokens < r.context,
        f"rollout.max_turn_tokens={r.max_turn_tokens} must be below rollout.context={r.context}",
    )
    _require(
        r.workers_url is None or r.workers_url.startswith(SCHEME),
        f"rollout.workers_url={r.workers_url!r}: expected a Ray cluster, such as ray://auto or ray://10.0.0.2:10001",
    )
    _check_failures(config)
    _check_cut("rollout", r.cut)
    for name, value in (("top_k", r.top_k), ("min_p", r.min_p)):
        _require(value != 1, f"rollout.{name}={value} leaves one token to draw, and nothing to learn from")
    if r.constrain != "nothing":
        _check_constrained(config)
    _check_cut("evaluation", e.cut)
    _require(
        e.temperature > 0 or e.cut == WHOLE,
        "evaluation.top_k, top_p and min_p have no effect at evaluation.temperature=0 (greedy): leave them out",
    )
    _require(e.temperature >= 0, f"evaluation.temperature={e.temperature}: expected 0 (greedy) or more")
    _require(
        e.split != "train", "evaluation.split='train': evaluate on 'validation' or 'heldout', never on training tasks"
    )
    for index, shown in enumerate(config.sft.demonstrations if config.sft is not None else ()):
        split = shown.split if isinstance(shown, Shown) else None  # what is stored is looked at when it is read
        _require(
            split != config.evaluation.split,
            f"sft.demonstrations.{index}.split={split!r} is what evaluation.split measures on: use 'train'",
        )
    if isinstance(config.policy, PretrainedPolicy):
        _check_pretrained(config.policy)
    if isinstance(config.policy, TinyPolicy):
        p = config.policy
        _require(p.width % p.heads == 0, f"policy.heads={p.heads} must divide policy.width={p.width}")
        _require(p.heads % p.kv_heads == 0, f"policy.kv_heads={p.kv_heads} must divide policy.heads={p.heads}")


def _check_failures(config: RunConfig) -> None:
    r = config.rollout
    for name in ("max_failure_fraction", "min_valid_fraction"):
        value = getattr(r, name)
        _require(0 <= value <= 1, f"rollout.{name}={value}: expected a share of the episodes, from 0 to 1")
    _require(0 <= r.free_space_gb < math.inf, f"rollout.free_space_gb={r.free_space_gb}: expected 0 (off) or more")
    longest = {name: getattr(r, name) for name in ("start_deadline_s", "step_deadline_s")}
    if config.external.url is not None:
        longest["external.deadline_s"] = config.external.deadline_s
    for name, seconds in longest.items():
        _require(
            r.stall_s > seconds,
            f"rollout.stall_s={r.stall_s} must be above {name}={seconds}: one slow answer would end the run",
        )
    if r.evidence_patience:
        _require(
            0 < r.evidence_threshold <= 1,
            f"rollout.evidence_threshold={r.evidence_threshold}: with evidence_patience={r.evidence_patience} expected "
            "a gain above 0, at most 1",
        )
    else:
        _require(
            r.evidence_threshold == 0,
            f"rollout.evidence_threshold={r.evidence_threshold} has no effect without rollout.evidence_patience",
        )


def _check_external(config: RunConfig) -> None:
    external = config.external
    if external.url is None:
        for name, value in dataclasses.asdict(external).items():
            _require(
                value == getattr(External(), name), f"external.{name}={value!r} has no effect without external.url"
            )
        return
    _require(
        external.url.startswith(("http://", "https://")),
        f"external.url={external.url!r}: expected a server's address, such as http://127.0.0.1:8000",
    )
    _require(
        not config.rollout.records and config.evaluation.cut == WHOLE,
        "external.url: a server does not say what top_k, top_p, min_p or constrain left to draw from; leave them out",
    )
    servers = typing.get_args(typing.get_type_hints(External)["server"])
    _require(external.server in servers, f"external.server={external.server!r}: expected one of {', '.join(servers)}")


def _check_mesh(shape: MeshShape) -> None:
    """What is wrong whatever the devices; see `meshes.check_mesh`."""
    asked = {axis: getattr(shape, axis) for axis in AXES}
    for axis, size in asked.items():
        _require(
            size == -1 or 1 <= size <= _MOST,
            f"mesh.{axis}={str(size)[:20]}: expected a number of devices, or -1 for those that the other axes leave",
        )
    free = [axis for axis, size in asked.items() if size == -1]
    said = " and ".join(f"mesh.{axis}=-1" for axis in free)
    _require(len(free) < 2, f"{said}: one axis can take the devices that the others leave; give the others a size")


def _check_placement(config: RunConfig) -> None:
    placement, count = config.placement, config.sampler_devices
    _require(placement in ("colocated", "split"), f"placement={placement!r}: expected 'colocated' or 'split'")
    _require(0 <= count <= _MOST, f"sampler_devices={str(count)[:20]}: expected 0, or devices that sample")
    if placement == "colocated":
        _require(count == 0, f"sampler_devices={count} has no effect without placement='split'")
        return
    _require(count > 0, "placement='split' needs sampler_devices: how many devices of each process sample")
    _require(
        config.external.url is None, "placement='split' has no effect with external.url: a server samples; leave it out"
    )


def _check_cut(section: str, cut: Cut) -> None:
    _require(0 <= cut.top_k <= _MOST, f"{section}.top_k={str(cut.top_k)[:20]}: expected 0 (off) or more")
    _require(0 < cut.top_p <= 1, f"{section}.top_p={cut.top_p}: expected above 0, at most 1 (off)")
    _require(0 <= cut.min_p <= 1, f"{section}.min_p={cut.min_p}: expected from 0 (off) to 1")


def _check_constrained(config: RunConfig) -> None:
    r, setting = config.rollout, f"rollout.constrain={config.rollout.constrain!r}"
    _require(r.constrain == "calls", f"{setting}: expected 'nothing' or 'calls'")
    _require(r.calls != "line", f"{setting} needs calls in JSON, and rollout.calls='line' is none; use 'json'")
    _require(
        isinstance(config.policy, PretrainedPolicy),
        f"{setting}: TinyPolicy's words put spaces into every JSON string; use PretrainedPolicy(path=...)",
    )
    _require(grammars.available(), f"{setting} needs llguidance: {grammars.INSTALL}")


def _check_pretrained(policy: PretrainedPolicy) -> None:
    if policy.frame in FRAMES:
        for name, unset in (("history", "keep"), ("thinking", None)):
            _require(
                getattr(policy, name) == unset,
                f"policy.{name}={getattr(policy, name)!r} has no effect with policy.frame={policy.frame!r}, "
                "which knows no reasoning; use frame='auto'",
            )


def _check_sft(sft: Sft) -> None:
    _require(bool(sft.demonstrations), "sft.demonstrations is empty: name at least one, such as (Shown(count=4000),)")
    _require(sft.rows % sft.micro_rows == 0, f"sft.micro_rows={sft.micro_rows} must divide sft.rows={sft.rows}")
    _require(sft.warmup < sft.steps, f"sft.warmup={sft.warmup} must be below sft.steps={sft.steps}")
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
    _require(
        loop.width >= config.rollout.context,
        f"loop.width={loop.width} is below rollout.context={config.rollout.context}: a long episode does not fit",
    )
    _require(
        (loop.tasks * loop.group) % loop.micro_rows == 0,
        f"loop.micro_rows={loop.micro_rows} must divide loop.tasks x loop.group = {loop.tasks * loop.group}",
    )
    best, every, measured = config.checkpoints.best, config.checkpoints.every, config.evaluation.every
    _require(
        not best or (measured > 0 and math.lcm(every, measured) < loop.steps),
        f"checkpoints.best={best}: no step before the last of loop.steps={loop.steps} has both a checkpoint "
        f"(checkpoints.every={every}) and an evaluation (evaluation.every={measured}): set both to the same number",
    )
    updates = loop.steps * loop.updates_per_batch
    _require(loop.warmup < updates, f"loop.warmup={loop.warmup} must be below the updates of the stage, {updates}")
    if loop.max_lag:
        try:
            check_bounded(objective, loop.oldest)
        except ValueError as error:
            raise UserError(f"loop.max_lag={loop.max_lag}: {error}") from error
    if (branching := loop.branching) is not None:
        _require(
            1 <= branching.trunks < loop.group,
            f"loop.branching.trunks={branching.trunks}: expected 1 to {loop.group - 1}, so that of loop.group="
            f"{loop.group} members some run from the reset and some branch from those",
        )
        _require(
            1 <= branching.max_turn <= _MOST,
            f"loop.branching.max_turn={str(branching.max_turn)[:20]}: expected the latest turn to branch before, 1 or "
            "more; turn 0 is the reset",
        )
    if loop.rate_cap is not None:
        try:
            capped_rate(loop)
        except ValueError as error:
            raise UserError(f"loop.rate_cap: {error}") from error
    _one_of("loop.same_state", loop.same_state, SameState)
    _require(
        loop.most_turns is None or 1 <= loop.most_turns <= _MOST,
        f"loop.most_turns={str(loop.most_turns)[:20]}: expected a whole number from 1 on, or none",
    )
    check_credit(loop)
    if loop.skip_constant_groups:
        quiet = objective.beta == 0.0 and objective.entropy_coef == 0.0
        _require(
            quiet,
            "loop.skip_constant_groups=True drops groups that the objective's beta or entropy_coef would still train",
        )
