"""`agentrl serve`: what it serves, what it refuses, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import pytest

from agentrl_jax.cli.main import main
from agentrl_jax.errors import UserError
from agentrl_jax.models import llama, lora
from agentrl_jax.protocol import Message
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy
from agentrl_jax.recipes.serve import from_run, is_run, loader
from agentrl_jax.rollout.calls import CALL_FORMATS
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.publish import publish
from agentrl_jax.runtime.serve import server
from tests.strictly import STRICT

openai = pytest.importorskip("openai", reason="the official client is the test client: pip install openai")
pytest.importorskip("uvicorn", reason="needs the server's libraries: pip install -e '.[serve]'")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = build(["one two three"], vocab_size=220)
    config = llama.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=32,
        context=512,
    )  # fmt: skip
    pretrained.save(path, config, llama.init(config, jax.random.key(0)), tokenizer)
    return path


def refusal(capsys, *argv) -> str:
    assert main(["serve", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("agentrl: error: ") and captured.err.count("\n") == 1
    return captured.err


def test_what_cannot_be_served_is_one_line(capsys, checkpoint, monkeypatch, tmp_path):
    assert "'nowhere'" in refusal(capsys, "nowhere", "--port", 0)
    assert "--slots 0" in refusal(capsys, checkpoint, "--slots", 0)
    assert "--context 1:" in refusal(capsys, checkpoint, "--context", 1)
    assert "at most 512 tokens" in refusal(capsys, checkpoint, "--port", 0, "--context", 1024)
    with server.listen("127.0.0.1", 0) as taken:
        line = refusal(capsys, checkpoint, "--port", taken.getsockname()[1])
    assert "in use" in line and "another --port" in line
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    assert "no config.py" in refusal(capsys, run, "--port", 0)
    shutil.copyfile(ROOT / "tests" / "end_to_end" / "small_config.py", run / "config.py")
    (run / "overrides.json").write_text("[]")
    assert "no checkpoint to serve yet" in refusal(capsys, run, "--port", 0)
    assert "--calls json" in refusal(capsys, run, "--port", 0, "--calls", "json")
    assert "--frame tiny" in refusal(capsys, run, "--port", 0, "--frame", "tiny")
    assert "--calls" in refusal(capsys, checkpoint, "--calls", "prose")
    assert "frame 'prose': unknown" in refusal(capsys, checkpoint, "--port", 0, "--frame", "prose")
    for calls in CALL_FORMATS:  # known: what is refused is the frame
        assert "'<|im_start|>'" in refusal(capsys, checkpoint, "--port", 0, "--frame", "chatml", "--calls", calls)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    assert "'bert'" in refusal(capsys, tmp_path / "bert", "--port", 0)
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'agentrl-jax[serve]'" in refusal(capsys, checkpoint)


def test_a_tokenizer_without_a_known_frame_is_refused(capsys, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "odd")
    raw = json.loads((tmp_path / "odd" / "tokenizer.json").read_text())
    raw["added_tokens"] = []
    raw["model"]["vocab"] = {token.replace("<", "("): index for token, index in raw["model"]["vocab"].items()}
    raw["model"]["unk_token"] = "(unk>"
    (tmp_path / "odd" / "tokenizer.json").write_text(json.dumps(raw))
    line = refusal(capsys, tmp_path / "odd", "--port", 0)
    assert "no chat template" in line and "<|im_start|>" in line


def small_run(**changes):
    sys.path.insert(0, str(ROOT / "tests" / "end_to_end"))
    import small_config

    return dataclasses.replace(small_config.config(), **changes)


def test_the_newest_checkpoint_of_a_run_is_served_as_it_spoke_in_the_run(tmp_path):
    config = small_run()
    policy = policies.describe(config, config.environment.load())
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for number in (1, 2):
        params = jax.jit(partial(llama.init, policy.model))(jax.random.key(number))
        checkpoints.save(number, {"params": params, "step": jax.numpy.int32(number)}, {"stage": "rl"})
    checkpoints.close()
    assert is_run(tmp_path)
    served = from_run(config, tmp_path)
    assert served.name == "small" and served.model == policy.model and not served.chat.describe_tools
    jax.tree.map(lambda x, y: (x == y).all() or pytest.fail("another checkpoint"), served.params, params)
    assert served.chat.renderer.frame.name == "tiny"
    (tmp_path / "overrides.json").touch()
    reloaded = loader(served.model, lambda _: config)(str(tmp_path))
    assert (reloaded["final_norm"] == params["final_norm"]).all()
    with pytest.raises(UserError, match="agentrl export"):
        loader(served.model)(str(tmp_path))
    with pytest.raises(UserError, match="another architecture"):
        loader(dataclasses.replace(served.model, layers=1), lambda _: config)(str(tmp_path))
    told = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, describe_tools=True))
    chat = from_run(told, tmp_path).chat
    (tool,) = [{"type": "function", "function": {"name": t.name}} for t in chat.renderer.tools.values()][:1]
    ask = {"messages": [{"role": "user", "content": "one"}], "tools": [tool]}
    assert chat.prompt(ask).ids == chat.renderer.start([Message(role="user", content="one")]).ids, "described once"


def test_a_run_that_trains_adapters_is_served_and_reloaded_merged(tmp_path, checkpoint):
    adapters = lora.Lora(rank=2, targets=("query", "down"))
    config = small_run(policy=PretrainedPolicy(path=str(checkpoint), lora=adapters))
    policy = policies.describe(config, config.environment.load())
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = policies.initial_params(config, policy, place)
    params = lora.with_trained(params, jax.tree.map(lambda x: x + 0.5, lora.trained(params)))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(1, {"params": lora.trained(params), "step": jax.numpy.int32(1)}, {"stage": "rl"})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1, read_only=True)
    with pytest.raises(UserError, match="other params"):
        checkpoints.restore_params(1, policies.param_shapes(config, policy, place))
    checkpoints.close()
    served = from_run(config, tmp_path)
    first, again = publish(served.model, served.params), loader(served.model, lambda _: config)(str(tmp_path))
    expected = publish(policy.model, lora.merged(params))
    for found in (first, again):
        jax.tree.map(lambda x, y: (x == y).all() or pytest.fail("not merged"), found, expected)
    plain = publish(policy.model, params.base)
    assert not all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), first, plain)))


def test_a_directory_is_reloaded_whatever_the_served_policy_was_trained_in(checkpoint):
    model = dataclasses.replace(pretrained.load_config(checkpoint)[0], param_dtype="bfloat16")
    assert loader(model)(str(checkpoint))["final_norm"].shape == (model.width,)


def test_a_real_process_answers_and_ends_cleanly_on_sigterm(checkpoint):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "envs")])}
    command = [*STRICT, "-m", "agentrl_jax.cli.main", "serve", str(checkpoint), "--port", "0",
               "--name", "mine", "--slots", "2", "--drain-seconds", "2"]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        watchdog = threading.Timer(200, process.kill)
        watchdog.start()
        try:
            lines = [process.stdout.readline().split() for _ in range(2)]
            assert lines[0] == ["serving", "mine"] and lines[1][0] == "base_url", process.stderr.read()
            with openai.OpenAI(base_url=lines[1][1], api_key="none", max_retries=0) as client:
                answer = client.completions.create(model="mine", prompt="one two", max_tokens=4)
                assert answer.usage.completion_tokens >= 1
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, "the connection that this client keeps open holds nothing up"
            assert process.stderr.read() == "" and process.stdout.read() == ""
        finally:
            watchdog.cancel()
            process.kill()
