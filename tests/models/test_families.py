"""config.json and tensors of every family: round trips, and what is refused by name."""

import numpy as np
import pytest
from cases import CASES, config_of, params_of

from agentrl_jax.errors import UserError
from agentrl_jax.models import decoder
from agentrl_jax.models.families import FAMILIES, family_of

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "moe_intermediate_size": 8, "num_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_config_survives_its_json(case):
    config = config_of(case)
    family = family_of(config.model_type)
    again = family.config_from_json(family.config_to_json(config), "config.json")
    assert again == config


@pytest.mark.parametrize("case", CASES)
def test_tensors_cover_the_parameters_once_and_go_both_ways(case):
    config, params = config_of(case), params_of(case)
    counted, names = {}, set()
    for tensor in family_of(config.model_type).tensors(config):
        where = params
        for name in tensor.path:
            where = where[name]
        theirs = tensor.to_theirs(where[tensor.index])
        assert theirs.shape == tensor.shape
        np.testing.assert_array_equal(tensor.to_ours(theirs), where[tensor.index])
        counted[tensor.path] = counted.get(tensor.path, 0) + theirs.size
        names.add(tensor.name)
    assert sum(counted.values()) == decoder.param_count(config)
    assert len(names) == len(list(family_of(config.model_type).tensors(config)))


def test_an_unknown_architecture_names_the_known_ones():
    with pytest.raises(UserError, match=r"x/config.json: model_type is 'mamba', expected one of gemma3_text, llama, "):
        family_of("mamba", "x/config.json")
    assert set(FAMILIES) == {"llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"}


REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; this decoder computes 'silu' only"),
    ("llama", {"mlp_bias": True}, "mlp_bias is True"),
    ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' lacks factor"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
    ("llama", {"num_key_value_heads": 3}, "kv_heads=3 must divide heads=4"),
    ("llama", {"hidden_size": None}, "lacks hidden_size"),
    ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, expected a whole number"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["chunked"]}, "layer_types is "),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ("qwen3_moe", {"num_experts": None}, "num_experts is None"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
     "sliding_attention"),
]  # fmt: skip


@pytest.mark.parametrize("model_type, changes, said", REFUSED)
def test_a_setting_that_is_not_computed_is_named(model_type, changes, said):
    with pytest.raises(UserError) as error:
        family_of(model_type).config_from_json({**SIZES, **changes}, "m/config.json")
    assert str(error.value).startswith("m/config.json: ") and said in str(error.value)


def test_both_ways_to_write_rope_are_read():
    llama = family_of("llama")
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = llama.config_from_json({**SIZES, "rope_theta": 5e5, "rope_scaling": scaling}, "c")
    new = llama.config_from_json({**SIZES, "rope_parameters": {**scaling, "rope_theta": 5e5}}, "c")
    assert old == new and old.rope_theta == 5e5 and old.rope_scaling.factor == 2.0
    nulls = llama.config_from_json({**SIZES, "rope_scaling": None, "hidden_act": "silu", "mlp_bias": None}, "c")
    assert nulls.rope_scaling is None


def test_gemma_defaults_are_the_papers():
    config = family_of("gemma3_text").config_from_json({**SIZES, "num_hidden_layers": 7}, "c")
    assert config.window_layers == (True,) * 5 + (False, True)
    assert (config.window, config.rope_theta, config.window_rope_theta) == (4096, 1e6, 1e4)
    assert config.head_width == 256 and config.scale == 256**-0.5 and config.tied
