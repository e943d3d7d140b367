"""Settings that contradict each other, or would have no effect, are refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes.checks import check
from agentrl_jax.recipes.config import (
    Evaluation,
    Loop,
    PretrainedPolicy,
    Rollout,
    RunConfig,
    Sft,
    Shown,
    Stored,
    TinyPolicy,
)
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.sft import sft
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.rewards import lexicographic


def good() -> RunConfig:
    return RunConfig(
        name="good",
        environment=EnvironmentRef(target="agentrl_envs.workflow:suite"),
        policy=TinyPolicy(),
        stages=(sft, rl),
        sft=Sft(demonstrations=(Shown(count=8),)),
        loop=Loop(objective=grpo(beta=0.0), reward=lexicographic),
    )


def with_(section: str, **changes: object) -> Callable[[RunConfig], RunConfig]:
    return lambda config: replace(config, **{section: replace(getattr(config, section), **changes)})


WRONG: dict[str, tuple[Callable[[RunConfig], RunConfig], str]] = {
    "no stage": (lambda c: replace(c, stages=()), "stages"),
    "a section without its stage": (lambda c: replace(c, stages=(sft,)), "loop: set, but stage 'rl'"),
    "a stage without its section": (lambda c: replace(c, sft=None), "'sft' needs the section"),
    "bank and slots": (with_("rollout", bank=24), "rollout.bank=24 must divide rollout.slots=64"),
    "idle workers": (with_("rollout", workers=65), "rollout.workers=65 exceeds"),
    "another optimizer": (with_("sft", optimizer="sgd"), "sft.optimizer='sgd': expected one of adamw, adafactor, muon"),
    "a moment that is not kept": (
        with_("loop", optimizer="adafactor", moment_dtype="bfloat16"),
        "loop.moment_dtype='bfloat16' has no effect with loop.optimizer='adafactor'",
    ),
    "nothing to offload": (with_("loop", optimizer="adafactor", offload=True), "loop.offload=True: with loop.optim"),
    "params of another dtype": (with_("policy", param_dtype="float16"), "policy.param_dtype='float16': expected one"),
    "no temperature": (with_("rollout", temperature=0.0), "rollout.temperature=0.0"),
    "a negative top_k": (with_("rollout", top_k=-1), "rollout.top_k=-1: expected 0 (off) or more"),
    "one token to draw": (with_("rollout", top_k=1), "rollout.top_k=1 leaves one token to draw, and nothing to learn"),
    "nothing to draw from": (with_("rollout", top_p=0.0), "rollout.top_p=0.0: expected above 0"),
    "a share of the peak above one": (with_("evaluation", min_p=1.5), "evaluation.min_p=1.5: expected from 0"),
    "a cut of a greedy evaluation": (with_("evaluation", temperature=0.0, top_p=0.9), "no effect at evaluation.temp"),
    "a schema for a line": (with_("rollout", constrain="calls"), "rollout.calls='line' is none; use 'json'"),
    "a schema for words": (with_("rollout", constrain="calls", calls="json"), "use PretrainedPolicy(path=...)"),
    "turn and context": (with_("rollout", max_turn_tokens=256), "rollout.max_turn_tokens=256"),
    "evaluation on training tasks": (with_("evaluation", split="train"), "evaluation.split='train'"),
    "heads and width": (with_("policy", heads=3), "policy.heads=3 must divide"),
    "kv heads": (with_("policy", kv_heads=3), "policy.kv_heads=3 must divide"),
    "stripping what a frame does not know": (
        lambda c: replace(c, policy=PretrainedPolicy(path="m", frame="chatml", history="template")),
        "policy.history='template' has no effect with policy.frame='chatml'",
    ),
    "thinking without reasoning": (
        lambda c: replace(c, policy=PretrainedPolicy(path="m", frame="chatml", thinking=False)),
        "policy.thinking=False has no effect",
    ),
    "no segment": (with_("rollout", max_segments=0), "rollout.max_segments=0"),
    "nothing to show": (with_("sft", demonstrations=()), "sft.demonstrations is empty"),
    "rows and micro rows": (with_("sft", micro_rows=5), "sft.micro_rows=5 must divide"),
    "a stop never looked at": (with_("sft", until_success=0.5, check_every=1000), "never looked at"),
    "a share above one": (with_("sft", until_success=40.0), "sft.until_success=40.0"),
    "demonstrations of what is measured": (
        with_("sft", demonstrations=(Shown(count=8, split="heldout"),)),
        "sft.demonstrations.0.split='heldout'",
    ),
    "no demonstrations": (with_("sft", demonstrations=(Shown(count=0),)), "sft.demonstrations.0.count=0"),
    "no stored demonstrations": (
        with_("sft", demonstrations=(Stored(path="s", count=0),)),
        "sft.demonstrations.0.count=0",
    ),
    "a store of nothing": (
        lambda c: replace(c, stages=(sft,), loop=None, store="s"),
        "store='s' has no effect without the stage 'rl'",
    ),
    "no layers": (with_("policy", layers=0), "policy.layers=0"),
    "no heads": (with_("policy", heads=0), "policy.heads=0"),
    "no micro rows": (with_("loop", micro_rows=0), "loop.micro_rows=0"),
    "a learning rate without end": (with_("loop", learning_rate=float("inf")), "loop.learning_rate=inf"),
    "checkpoints that are thrown away": (with_("checkpoints", keep=0), "checkpoints.keep=0"),
    "a best that nothing measures": (
        with_("checkpoints", best=1, every=7),
        "checkpoints.best=1: no step before the last of loop.steps=60 has both a checkpoint (checkpoints.every=7)",
    ),
    "a best without evaluations": (
        lambda c: with_("checkpoints", best=1)(replace(c, stages=(sft,), loop=None)),
        "checkpoints.best=1 has no effect without the stage 'rl'",
    ),
    "steps beyond counting": (with_("loop", steps=10**400), "loop.steps=1000"),
    "a negative seed": (lambda c: replace(c, seed=-1), "seed=-1"),
    "a stage twice": (lambda c: replace(c, stages=(sft, rl, sft)), "comes twice"),
    "a group of one": (with_("loop", group=1), "loop.group=1"),
    "row and context": (with_("loop", width=128), "loop.width=128 is below rollout.context=256"),
    "loop micro rows": (with_("loop", micro_rows=5), "loop.micro_rows=5 must divide"),
    "warm-up longer than the run": (with_("loop", warmup=99), "loop.warmup=99 must be below"),
    "dropping what the KL trains": (
        with_("loop", skip_constant_groups=True, objective=grpo(beta=0.04)),
        "loop.skip_constant_groups=True drops groups",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_contradiction_is_one_line_that_names_the_setting(name: str) -> None:
    change, expected = WRONG[name]
    with pytest.raises(UserError) as caught:
        check(change(good()))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_constraint_without_llguidance_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(good(), policy=PretrainedPolicy(path="m"), rollout=Rollout(constrain="calls", calls="qwen"))
    monkeypatch.setattr("agentrl_jax.runtime.grammars.available", lambda: False)
    with pytest.raises(UserError, match=r"^rollout.constrain='calls' needs llguidance: pip install 'agentrl-jax\[con"):
        check(config)
    monkeypatch.setattr("agentrl_jax.runtime.grammars.available", lambda: True)
    assert check(config) is config


def test_what_is_right_passes_unchanged() -> None:
    config = replace(good(), rollout=Rollout(), evaluation=Evaluation())
    assert check(config) is config
