"""An exported run speaks as it did when it trained, whatever the directory that it began from says."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import AddedToken

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.protocol import Message
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy
from agentrl_jax.recipes.export import convert, export
from agentrl_jax.rollout.families import FAMILIES, renderer_for
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.checkpoint import Checkpoints

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import small_config

MODEL = llama.LlamaConfig(
    vocab_size=240, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=32, context=512
)
OTHER = FAMILIES["qwen3"].replace("# Tools", "# Means")
TALK = [Message(role="system", content="one"), Message(role="user", content="two")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    words = build(["one two three"], vocab_size=200)
    words.add_special_tokens([AddedToken(f"<|im_{which}|>", special=True) for which in ("start", "end")])
    words.add_tokens(["<tool_response>", "</tool_response>"])
    path = tmp_path_factory.mktemp("base")
    pretrained.save(path, MODEL, jax.jit(partial(llama.init, MODEL))(jax.random.key(0)), words)
    return path


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    checkpoints = Checkpoints(path / "checkpoints", keep=1)
    params = pretrained.load_params(base, MODEL)
    checkpoints.save(1, {"params": params, "step": jax.numpy.int32(1)}, {"stage": "rl"})
    checkpoints.close()
    return path


@pytest.mark.parametrize(
    ("frame", "place"), [("auto", "file"), ("auto", "nowhere"), ("chatml", "field"), ("qwen3", "file")]
)
def test_the_template_of_an_export_is_the_one_that_was_trained_with(base, run, tmp_path, frame, place):
    if place == "file":
        (base / "chat_template.jinja").write_text(OTHER)
    else:
        (base / "chat_template.jinja").unlink(missing_ok=True)
    field = {"chat_template": OTHER} if place == "field" else {}
    (base / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77, **field}))
    config = dataclasses.replace(small_config.config(), policy=PretrainedPolicy(path=str(base), frame=frame))
    policy = policies.describe(config, config.environment.load())
    made = export(config, run, tmp_path / "made")
    again = renderer_for(made, policy.tokenizer)
    assert again.start(TALK).ids == policy.renderer.start(TALK).ids and again.end_id == policy.renderer.end_id
    assert json.loads((made / "tokenizer_config.json").read_text())["model_max_length"] == 77
    kept = frame == "auto" and place != "nowhere"
    assert (again.source == OTHER) == kept
    assert ("chat_template" in json.loads((made / "tokenizer_config.json").read_text())) == (kept and place == "field")


def test_another_checkpoint_than_the_newest(base, tmp_path):
    config = dataclasses.replace(small_config.config(), policy=PretrainedPolicy(path=str(base), frame="chatml"))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    params = pretrained.load_params(base, MODEL)
    for number in (1, 4):
        checkpoints.save(number, {"params": jax.tree.map(lambda x, n=number: x * n, params)}, {"stage": "rl"})
    checkpoints.close()
    for number, factor in ((None, 4), (1, 1)):
        made = export(config, tmp_path, tmp_path / f"made-{number}", number=number)
        found = pretrained.load_params(made, MODEL)
        jax.tree.map(lambda x, y, n=factor: np.testing.assert_array_equal(x * n, y), params, found)
    with pytest.raises(UserError, match=r"--checkpoint 2: the run has 1, 4"):
        export(config, tmp_path, tmp_path / "none", number=2)


def test_a_run_is_no_model_to_convert(run, tmp_path):
    with pytest.raises(UserError, match=r"a run, not a model; type: agentrl export "):
        convert(run, tmp_path / "made")


def test_what_is_opened_to_be_read_warns_of_nothing(run, caplog):
    Checkpoints(run / "checkpoints", keep=1, read_only=True).close()
    assert not caplog.records
