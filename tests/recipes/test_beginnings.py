"""What a run may begin from beside a directory: adapters, and another run's params."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import AddedToken

from agentrl_jax.cli.main import _resolved, _resolved_run
from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.models.lora import Lora, LoraParams
from agentrl_jax.protocol import Message
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, RunConfig
from agentrl_jax.recipes.directory import Source, prepare
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime import adapters, pretrained
from agentrl_jax.runtime.checkpoint import Checkpoints

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import small_config

MODEL = llama.LlamaConfig(
    vocab_size=240, width=16, layers=2, heads=2, kv_heads=1, head_width=8, mlp_width=32, context=512
)
LORA = Lora(rank=2, alpha=8.0, targets=("query", "down"))
PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


# -- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = build(["one two three"], vocab_size=200)
    words.add_special_tokens([AddedToken(f"<|im_{which}|>", special=True) for which in ("start", "end")])
    path = tmp_path_factory.mktemp("base")
    pretrained.save(path / "model", MODEL, jax.jit(partial(llama.init, MODEL))(jax.random.key(0)), words)
    adapters.save(path / "adapter", MODEL, LORA, drawn(), base_model="model")
    return path


def drawn() -> Any:
    """Adapters whose every number differs, both matrices."""
    shapes = jax.eval_shape(partial(policies.lora.init, LORA), llama.shapes(MODEL), jax.random.key(0)).adapters
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    return tree.unflatten([jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)])


def adapted(base: Path, adapter: str = "adapter", lora: Lora | None = LORA) -> RunConfig:
    policy = PretrainedPolicy(path=str(base / "model"), lora=lora, adapter=str(base / adapter))
    return dataclasses.replace(small_config.config(), policy=policy)


@pytest.mark.parametrize("targets", [("query", "down"), ("down", "query")])
def test_a_run_begins_from_adapters(base: Path, targets: tuple[str, ...]) -> None:
    config = adapted(base, lora=dataclasses.replace(LORA, targets=targets))
    policy = policies.describe(config, config.environment.load())
    params = policies.initial_params(config, policy, PLACE)
    assert isinstance(params, LoraParams) and params.scale == 4.0
    equal(params.adapters, drawn())
    equal(params.base, pretrained.load_params(base / "model", MODEL))


@pytest.mark.parametrize(
    ("lora", "adapter", "words"),
    [
        (dataclasses.replace(LORA, rank=4), "adapter", r"policy.lora.rank=4: the adapters of .* have rank=2"),
        (dataclasses.replace(LORA, alpha=2.0), "adapter", r"policy.lora.alpha=2.0: .* have alpha=8.0"),
        (dataclasses.replace(LORA, targets=("query",)), "adapter", r"policy.lora.targets=.* have targets="),
        (None, "adapter", r"policy.lora is none; set policy.lora=Lora\(rank=2, alpha=8, targets="),
        (LORA, "nowhere", r"adapter_config.json"),
    ],
)
def test_adapters_of_another_kind_are_one_line(base: Path, lora: Lora | None, adapter: str, words: str) -> None:
    config = adapted(base, adapter, lora)
    with pytest.raises(UserError, match=words) as caught:
        policies.describe(config, config.environment.load())
    assert "\n" not in str(caught.value)


def test_scales_of_single_projections_are_refused(base: Path, tmp_path: Path) -> None:
    config = tmp_path / "adapter" / adapters.CONFIG
    shutil.copytree(base / "adapter", config.parent)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"alpha_pattern": {"q_proj": 64}}))
    with pytest.raises(UserError, match=r"alpha_pattern is \{'q_proj': 64\}, expected one rank and one alpha"):
        adapters.load(config.parent, MODEL)


# -- another run -----------------------------------------------------------------------------------------------------

SECOND = """
import dataclasses
from small_config import config as small
from agentrl_jax.recipes.config import PretrainedPolicy

def config():
    return dataclasses.replace(small(), name="second", policy=PretrainedPolicy(path="runs/first"))
"""


def checkpoint(config: RunConfig, run: Path, number: int) -> Any:
    policy = policies.describe(config, config.environment.load())
    params = policies.initial_params(dataclasses.replace(config, seed=number), policy, PLACE)
    checkpoints = Checkpoints(run / "checkpoints", keep=2)
    checkpoints.save(number, {"params": params, "step": jax.numpy.int32(number)}, {"stage": "rl"})
    checkpoints.close()
    return params


def test_a_run_begins_from_the_newest_checkpoint_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, file = small_config.config(), Path("config.py")
    shutil.copyfile(small_config.__file__, "first.py")
    file.write_text(SECOND)
    prepare(first, Path("runs/first"), resume=False, source=Source(file=Path("first.py")))
    given = argparse.Namespace(config=str(file), overrides=[])
    with pytest.raises(UserError, match="runs/first: no checkpoint to begin from yet"):
        _resolved(given)

    params = checkpoint(first, Path("runs/first"), 4)
    second = _resolved(given)
    assert second.policy.path == "runs/first/exports/000004"
    suite = second.environment.load()
    before, policy = policies.describe(first, suite), policies.describe(second, suite)
    assert policy.model == before.model
    talk = [Message(role="system", content="you"), Message(role="user", content="cancel")]
    assert policy.renderer.start(talk).ids == before.renderer.start(talk).ids
    equal(policies.initial_params(second, policy, PLACE), params)

    prepare(second, Path("runs/second"), resume=False, source=Source(file=file))
    newer = checkpoint(first, Path("runs/first"), 9)
    for begun in (_resolved_run(Path("runs/second")), _resolved(given, resume=True)):
        assert begun.policy == second.policy, "it goes on from what it began with"
    again = _resolved(given)
    assert again.policy.path == "runs/first/exports/000009"
    equal(policies.initial_params(again, policy, PLACE), newer)
    with pytest.raises(UserError, match=r"policy.path=runs/first: a run; give what `agentrl export runs/first DST`"):
        policies.pretrained_directory(PretrainedPolicy(path="runs/first"))


def test_a_model_beside_checkpoints_of_its_maker_is_no_run(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "model", tmp_path / "model")
    (tmp_path / "model" / "checkpoints").mkdir()
    assert policies.pretrained_directory(PretrainedPolicy(path=str(tmp_path / "model"))) == tmp_path / "model"
