"""`policy.param_dtype=bfloat16`, other optimizers and offloading in runs: resume, export, publication, plan."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama, lora
from agentrl_jax.recipes import checks
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import Checkpoints, RunConfig
from agentrl_jax.recipes.dry_run import dry_run
from agentrl_jax.recipes.export import export, params_of
from agentrl_jax.recipes.plan import shapes
from agentrl_jax.recipes.train import train
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.publish import publish
from tests.recipes.plan.test_shapes import qwen  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import small_config

PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
GIB = 1 << 30


def config(**stage: Any) -> RunConfig:
    small = small_config.config()
    assert small.sft is not None and small.loop is not None
    return replace(
        small,
        policy=replace(small.policy, param_dtype="bfloat16"),
        sft=replace(small.sft, **stage),
        loop=replace(small.loop, **stage),
    )


def test_params_in_half_the_bytes_reach_the_sampler_and_a_dry_run() -> None:
    made = config()
    policy = policies.describe(made, made.environment.load())
    params = policies.initial_params(made, policy, PLACE)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"bfloat16"}
    sent = publish(policy.model, params)
    assert {x.dtype.name for x in jax.tree.leaves(sent)} == {"float32"}  # the compute dtype: the same numbers
    np.testing.assert_array_equal(sent["embedding"], params["embedding"].astype(jnp.float32))
    count = llama.param_count(policy.model)
    learner = {name: dry_run(made)["estimated_memory_bytes"]["learner"] for name, made in (
        ("masters", made), ("f32", small_config.config()), ("half", config(moment_dtype="bfloat16")),
        ("offloaded", config(offload=True)),
    )}  # fmt: skip
    per = {name: size / count for name, size in learner.items()}
    expected = {"masters": 2 + 4 + 4 + 8, "f32": 16, "half": 2 + 4 + 4 + 6, "offloaded": 2 + 4}
    assert per == pytest.approx(expected, abs=1e-2)


def test_a_plan_counts_masters_moments_and_what_the_host_holds(qwen: RunConfig) -> None:  # noqa: F811
    def planned(param_dtype: str, **stage: Any) -> dict[str, Any]:
        part = "loop" if qwen.loop is not None else "sft"
        changed = {part: replace(getattr(qwen, part), **stage), "policy": replace(qwen.policy, param_dtype=param_dtype)}
        return shapes.by_shapes(shapes.request(replace(qwen, **changed), "v5e:4x4", "fsdp=16"))

    def sizes(report: dict[str, Any]) -> list[float]:
        found = {row["what"]: row["gib"] for row in report["resident"]}
        return [found["parameters"], found["optimizer state"], report["host_gib"]]

    one = 596_049_920 / 16 * 4 / GIB
    assert sizes(planned("float32")) == pytest.approx([one, 2 * one, 0], abs=2e-3)
    assert sizes(planned("bfloat16")) == pytest.approx([one / 2, 3 * one, 0], abs=2e-3)
    assert sizes(planned("bfloat16", moment_dtype="bfloat16")) == pytest.approx([one / 2, 2.5 * one, 0], abs=2e-3)
    away = planned("bfloat16", offload=True)
    assert sizes(away) == pytest.approx([one / 2, 0, 3 * one], abs=2e-3)
    own = {row["program"]: row["own_gib"] for row in away["programs"]}
    assert own["apply"] == pytest.approx(4 * one, abs=5e-3)
    muon, factored = sizes(planned("float32", optimizer="muon")), sizes(planned("float32", optimizer="adafactor"))
    embedding = 151936 * 1024 / 16 * 4 / GIB
    assert muon[1] == pytest.approx(one + embedding, abs=2e-3) and factored[1] < 0.01 * one + 0.005


def test_adapters_stay_in_f32_on_a_base_in_bf16() -> None:
    model = llama.LlamaConfig(
        vocab_size=32, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp_width=32, param_dtype="bfloat16"
    )
    adapted = lora.init(lora.Lora(rank=2), llama.init(model, jax.random.key(0)), jax.random.key(1))
    assert {x.dtype.name for x in jax.tree.leaves(adapted.base)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(adapted.adapters)} == {"float32"}
    small = jax.tree.map(lambda x: x + 1e-4, adapted.adapters)
    whole = lora.merged(adapted.replace(adapters=small))["layers"]["query"]
    delta = whole - adapted.base["layers"]["query"].astype(jnp.float32)
    assert float(jnp.abs(delta).min()) > 0  # none of it is lost to bf16


def test_offloading_where_there_is_no_such_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_offload(config(offload=True))
    monkeypatch.setattr(checks, "can_offload", lambda: False)
    checks.check_offload(config())
    with pytest.raises(UserError, match=r"sft.offload=True: these devices have no memory of kind 'pinned_host'"):
        checks.check_offload(config(offload=True))


def run_config() -> RunConfig:
    made = config(steps=2, optimizer="muon", moment_dtype="bfloat16", offload=True)
    evaluation = replace(made.evaluation, episodes=2, every=0)
    return replace(made, evaluation=evaluation, checkpoints=Checkpoints(every=1, keep=9))


def final(directory: Path) -> Any:
    made = run_config()
    policy = policies.describe(made, made.environment.load())
    return jax.device_get(params_of(made, policy, directory, PLACE))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("masters") / "straight"
    train(run_config(), directory, quiet=True)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kept", [1, 2, 3])  # inside sft, between the stages, inside rl
def test_a_run_with_masters_resumes_to_the_same_bits(straight: Path, tmp_path: Path, kept: int) -> None:
    resumed = tmp_path / "resumed"
    shutil.copytree(straight, resumed)
    for path in (resumed / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > kept:
            shutil.rmtree(path)
    (resumed / "summary.json").unlink()
    train(run_config(), resumed, resume=True, quiet=True)
    jax.tree.map(np.testing.assert_array_equal, final(straight), final(resumed))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_masters_exports_its_params(straight: Path, tmp_path: Path) -> None:
    export(run_config(), straight, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    _, again, _ = pretrained.load(tmp_path / "out", dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), final(straight))
