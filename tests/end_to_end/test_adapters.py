"""A run that trains adapters on a pretrained policy, and what can be taken out of it, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from agentrl_envs.workflow import suite
from tokenizers import AddedToken

from agentrl_jax.models import llama, lora
from agentrl_jax.rollout import tokenizer as tokenizers
from agentrl_jax.runtime import adapters, pretrained

ROOT = Path(__file__).parents[2]
CONFIG = """
import dataclasses
from small_config import config as small
from agentrl_jax.models.lora import Lora
from agentrl_jax.recipes.config import PretrainedPolicy

def config():
    policy = PretrainedPolicy(path="base", lora=Lora(rank=2, targets=("query", "down")))
    return dataclasses.replace(small(), name="adapters", policy=policy)
"""
FEW = ("sft.steps=2", "loop.steps=2", "evaluation.every=0", "evaluation.episodes=2")


def agentrl(*arguments: str, cwd: Path, code: int = 0) -> str:
    paths = [str(ROOT), str(ROOT / "envs"), str(ROOT / "tests" / "end_to_end")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), XLA_FLAGS="")
    command = [sys.executable, "-m", "agentrl_jax.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_train_resume_and_leave_the_run(tmp_path: Path) -> None:
    words = tokenizers.build(suite(handles="short").vocabulary(), vocab_size=512)
    words.add_special_tokens([AddedToken(f"<|im_{which}|>", special=True) for which in ("start", "end")])
    shape = llama.LlamaConfig(
        vocab_size=520, width=32, layers=2, heads=2, kv_heads=1, head_width=16, mlp_width=64, context=256
    )
    base = llama.init(shape, jax.random.key(3))
    pretrained.save(tmp_path / "base", shape, base, words)
    (tmp_path / "config.py").write_text(CONFIG)

    described = json.loads(agentrl("train", "config.py", "--dry-run", cwd=tmp_path))
    expected = 2 * 2 * ((32 + 32) + (64 + 32))  # layers x rank x (in + out), of query and down
    assert described["trained_parameters"] == expected < described["parameters"]
    agentrl("train", "config.py", *FEW, cwd=tmp_path)
    run = tmp_path / "runs" / "adapters"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["sft"] * 2 + ["rl"] * 2
    assert max(row["ratio_deviation_max"] for row in rows if row["stage"] == "rl") < 1e-5
    kept = [path.read_text() for path in (run / "checkpoints").rglob("_METADATA")]
    assert kept and not any("embedding" in text for text in kept)  # what is frozen is not kept again
    agentrl("train", "config.py", *FEW, "--resume", cwd=tmp_path)

    agentrl("eval", "runs/adapters", "evaluation.episodes=2", cwd=tmp_path)
    agentrl("export", "runs/adapters", "merged", cwd=tmp_path)
    agentrl("export", "runs/adapters", "adapter", "--adapter", cwd=tmp_path)
    assert "already holds something" in agentrl("export", "runs/adapters", "merged", cwd=tmp_path, code=2)
    _, whole, tokenizer = pretrained.load(tmp_path / "merged")
    settings, part = adapters.load(tmp_path / "adapter", shape)
    assert tokenizer.token_to_id("<|im_end|>") == words.token_to_id("<|im_end|>")
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
    for name in lora.PROJECTIONS:
        same = np.array_equal(whole["layers"][name], base["layers"][name])
        assert same != (name in settings.targets), name
    again = lora.merged(lora.LoraParams(part, base, settings.alpha / settings.rank))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, again)

    agentrl("models", "convert", "merged", "half", "--dtype", "bfloat16", cwd=tmp_path)
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < 0.6 * sum(
        x.nbytes for x in jax.tree.leaves(whole)
    )
    pretrained.load(tmp_path / "half")
