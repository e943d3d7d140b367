"""The policy of a pretrained directory: which renderer speaks for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, Message
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, Rollout, RunConfig
from agentrl_jax.recipes.sft import sft

TEMPLATE = """\
{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nbe good<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture
def directory(tmp_path):
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {
        "model_type": "llama", "vocab_size": 258, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return tmp_path


def prompt(directory, tools: bool = True, **changes) -> str:
    environment = EnvironmentRef(target="agentrl_envs.workflow:suite")
    config = RunConfig(name="n", environment=environment, policy=PretrainedPolicy(path=str(directory)), stages=(sft,))
    config = replace(config, policy=replace(config.policy, **changes), rollout=Rollout(describe_tools=tools))
    renderer = policies.describe(config, environment.load()).renderer
    return renderer.tokenizer.decode(
        renderer.start([Message(role="user", content="go")]).ids, skip_special_tokens=False
    )


def test_auto_takes_the_template_of_the_directory_and_a_name_takes_the_frame(directory):
    assert "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n" in prompt(directory)
    assert "be good" not in prompt(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    described = "<|im_start|>system\nCall one tool a turn as: name key=value"
    assert prompt(directory).startswith(described), "the template writes no tools, so they come first"
    assert prompt(directory, tools=False).startswith("<|im_start|>system\nbe good<|im_end|>\n<|im_start|>user")
    assert prompt(directory, frame="chatml").startswith(described)


def test_a_template_that_is_not_understood_is_one_line(directory):
    (directory / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(UserError, match=r"frame 'auto': chat template, line 1.*name another frame") as caught:
        prompt(directory)
    assert "\n" not in str(caught.value)
