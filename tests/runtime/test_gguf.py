"""GGUF: every architecture there and back, splitting rules on tokenizers built by hand, and what is refused."""

import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.models.families import FAMILIES
from agentrl_jax.protocol import EnvironmentRef
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.config import PretrainedPolicy, Rollout, RunConfig
from agentrl_jax.recipes.serve import from_directory
from agentrl_jax.recipes.sft import sft
from agentrl_jax.runtime import gguf as gguf_reader
from agentrl_jax.runtime import gguf_config, gguf_tokenizer, model_store, pretrained

SIZES = {
    "vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
SLIDES = ["sliding_attention"] * 5 + ["full_attention"]
MODELS = {  # general.architecture -> config.json beyond SIZES
    "llama": {"model_type": "llama", "rope_theta": 10000.0, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3moe": {
        "model_type": "qwen3_moe", "rope_theta": 1e6, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 8,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8, "num_hidden_layers": 6,
        "layer_types": SLIDES, "tie_word_embeddings": True,
    },
}  # fmt: skip
KNOWN = [name for name, raw in MODELS.items() if raw["model_type"] in FAMILIES]
FIELDS = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "attention.sliding_window": "sliding_window",
}  # fmt: skip
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = {
    "tokens": ["<|end|>", "<|begin|>", *BYTES[:45], "!!"], "kinds": [3, 3] + [1] * 46, "merges": ["! !"],
    "model": "gpt2", "rule": "gpt-2",
}  # fmt: skip


def write(path, architecture, raw, tensors, *, words=WORDS, more=(), without=()):
    """A GGUF file as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    for field, theirs in FIELDS.items():
        if theirs in raw and field not in without:
            writer.add_uint32(f"{architecture}.{field}", raw[theirs])
    writer.add_float32(f"{architecture}.rope.freq_base", raw["rope_theta"])
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", raw["rms_norm_eps"])
    writer.add_tokenizer_model(words["model"])
    writer.add_tokenizer_pre(words["rule"])
    writer.add_token_list(words["tokens"])
    writer.add_token_types(words["kinds"])
    writer.add_token_merges(words["merges"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for name, value in more:
        writer.add_string(name, value) if isinstance(value, str) else writer.add_float32(name, value)
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_as(architecture, config, params):
    """The params under GGUF's names: expert tensors stacked, llama's q and k interleaved, gemma's norms plus one."""
    names = gguf_reader._LAYER | (gguf_reader._SANDWICH if architecture == "gemma3" else {})
    if architecture == "gemma3":
        del names["ffn_norm"]
        names |= {"ffn_norm": "pre_feedforward_layernorm"}
    back = {theirs: ours for ours, theirs in names.items()}
    out, experts = {}, {}
    for name, x in pretrained.tensors_from_params(config, params):
        parts = name.split(".")
        kind = parts[-1]
        if parts[1] != "layers":
            key = {"embed_tokens": "token_embd", "norm": "output_norm", "weight": "output"}[parts[1]]
            out[f"{key}.{kind}"] = x
        elif "experts" in parts:
            key = back["mlp.experts.{}." + parts[-2]]
            experts.setdefault(f"blk.{parts[2]}.{key}.{kind}", []).append(x)
        else:
            key = back[".".join(parts[3:-1])]
            if architecture == "llama" and key in ("attn_q", "attn_k"):
                heads = config.heads if key == "attn_q" else config.kv_heads
                x = x.reshape(heads, 2, config.head_width // 2, -1).swapaxes(1, 2).reshape(x.shape)
            out[f"blk.{parts[2]}.{key}.{kind}"] = x
    out |= {name: np.stack(each) for name, each in experts.items()}
    plus = np.float32(1.0 if architecture == "gemma3" else 0.0)
    return {n: np.ascontiguousarray(x + plus if "norm.weight" in n else x) for n, x in out.items()}


@functools.cache
def model(architecture):
    raw = {**SIZES, **MODELS[architecture]}
    config = FAMILIES[raw["model_type"]].config_from_json(raw, "here")
    return raw, config, jax.jit(lambda key: llama.init(config, key))(jax.random.key(0))


@pytest.mark.parametrize("architecture", KNOWN)
def test_there_and_back(architecture, tmp_path):
    raw, config, params = model(architecture)
    write(tmp_path / "m.gguf", architecture, raw, stored_as(architecture, config, params))
    gguf_reader.convert(tmp_path / "m.gguf", tmp_path / "out")
    found, back, tokenizer = pretrained.load(tmp_path / "out")
    assert found == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), params, back)
    tokens = jnp.asarray([[3, 9, 4, 7]], jnp.int32)
    positions, ends = jnp.arange(4, dtype=jnp.int32)[None], jnp.full((1, 4), 4, jnp.int32)
    logits = [llama.hidden(c, p, tokens, positions, ends) @ llama.unembedding(c, p).T for c, p in
              ((config, params), (found, back))]  # fmt: skip
    np.testing.assert_allclose(*logits, atol=1e-6)
    assert tokenizer.encode("<|end|>").ids == [0]
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert '"eos_token_id": 0' in (tmp_path / "out/generation_config.json").read_text()
    assert '"eos_token": "<|end|>"' in (tmp_path / "out/tokenizer_config.json").read_text()


def test_a_file_is_a_policy_and_is_converted_once(tmp_path, monkeypatch):
    raw, config, params = model("llama")
    words = {**WORDS, "tokens": ["<|im_end|>", "<|im_start|>", *WORDS["tokens"][2:]]}
    file, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write(file, "llama", raw, stored_as("llama", config, params), words=words)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    served = from_directory(str(file), frame="chatml")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), params, served.params)
    environment = EnvironmentRef(target="agentrl_envs.workflow:suite")
    run = RunConfig(
        name="n", environment=environment, policy=PretrainedPolicy(path=str(file), frame="chatml"), stages=(sft,),
        rollout=Rollout(context=64),
    )  # fmt: skip
    assert policies.describe(run, environment.load()).model == config == served.model
    monkeypatch.setattr(gguf_reader, "convert", lambda *_: pytest.fail("converted again"))
    (tmp_path / "other").mkdir()
    found = model_store.find(str(file))
    assert model_store.find(str(file.rename(tmp_path / "other" / "name.bin"))) == found
    assert list(found.parent.iterdir()) == [found]


def test_a_file_that_is_no_policy_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"gone.gguf: no such file"):
        model_store.find(str(tmp_path / "gone.gguf"))
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(UserError, match=r"junk.gguf: not GGUF, or cut short"):
        model_store.find(str(tmp_path / "junk.gguf"))
    assert list((tmp_path / "cache/agentrl/models/gguf").iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"junk.gguf: cannot be converted \(.*set XDG_CACHE_HOME"):
        model_store.find(str(tmp_path / "junk.gguf"))


def test_only_llamas_rows_are_permuted():
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    raw = {"num_attention_heads": 2, "num_key_value_heads": 2}
    turned = gguf_reader._laid_out("blk.0.attn_q.weight", x, raw, "llama")
    assert turned[:8, 0].tolist() == [0, 8, 16, 24, 4, 12, 20, 28]
    for architecture in ("qwen2", "qwen3", "gemma3"):
        assert gguf_reader._laid_out("blk.0.attn_q.weight", x, raw, architecture) is x


# -- splitting -------------------------------------------------------------------------------------------------------

TEXT = "I'll pay 12345 EURos!!\n\n  Don'T"
SPLITS = {
    "gpt-2": ["I", "'ll", " pay", " 12345", " EURos", "!!", "\n\n ", " Don", "'", "T"],
    "smollm": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " EURos", "!!", "\n\n ", " Don", "'", "T"],
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "45", " EURos", "!!\n\n", " ", " Don", "'T"],
    "qwen2": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " EURos", "!!\n\n", " ", " Don", "'T"],
}  # fmt: skip


def byte_level(rule, merges=(), more=(), **fields):
    tokens = [*BYTES, *("".join(pair.split(" ")) for pair in merges), *more]
    return gguf_tokenizer.tokenizer({
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens), "tokenizer.ggml.merges": list(merges), **fields,
    }, "here")  # fmt: skip


@pytest.mark.parametrize("rule", SPLITS)
def test_splitting_rules(rule):
    tokenizer = byte_level(rule)
    pieces = [TEXT[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert pieces == SPLITS[rule]
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_merges_stay_inside_a_piece():
    merges = ["1 2", "12 3", "123 4", "Ġ a"]
    assert byte_level("llama-bpe", merges).encode("1234 a").tokens == ["123", "4", "Ġa"]
    assert byte_level("qwen2", merges).encode("1234 a").tokens == ["1", "2", "3", "4", "Ġa"]
    assert byte_level("gpt-2", merges).encode("1234 a").tokens == ["1234", "Ġa"]


def test_a_whole_token_needs_no_merges_in_llama3():
    assert byte_level("llama-bpe", more=["abc"]).encode("abc").tokens == ["abc"]
    assert byte_level("qwen2", more=["abc"]).encode("abc").tokens == ["a", "b", "c"]


def test_qwen_composes_and_llama3_begins():
    composed = "é"
    assert byte_level("qwen2").encode("e\u0301").ids == byte_level("qwen2").encode(composed).ids
    begin = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    tokenizer = byte_level("llama-bpe", **begin)
    assert tokenizer.encode("b").tokens == [BYTES[0], "b"]
    assert tokenizer.encode("b", add_special_tokens=False).tokens == ["b"]


def test_sentencepiece_merges_by_score():
    pieces = {
        "<unk>": 0,
        "<end>": 0,
        "<0xC3>": 0,
        "<0xA9>": 0,
        "▁": -9,
        "a": -9,
        "b": -9,
        "ab": -1,
        "▁a": -2,
        "▁ab": -3,
    }
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": list(pieces),
        "tokenizer.ggml.token_type": [2, 3, 6, 6] + [1] * 6,
        "tokenizer.ggml.scores": [float(score) for score in pieces.values()],
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip
    gemma = gguf_tokenizer.tokenizer(fields, "here")
    assert gemma.encode("ab ab<end>").tokens == ["ab", "▁ab", "<end>"]
    assert gemma.encode("é").tokens == ["<0xC3>", "<0xA9>"]
    assert gemma.decode(gemma.encode("ab é a").ids) == "ab é a"
    older = gguf_tokenizer.tokenizer({**fields, "tokenizer.ggml.add_space_prefix": True}, "here")
    assert older.encode("ab").tokens == ["▁ab"] and older.decode(older.encode("ab").ids) == "ab"


# -- scaling and refusals --------------------------------------------------------------------------------------------


def test_llama3s_scaling_is_read_off_its_divisors():
    raw = {"head_dim": 64, "rope_theta": 500000.0}
    frequency = 500000.0 ** (-np.arange(32) / 32)
    wave = 2 * np.pi / frequency
    smooth = (8192 / wave - 1) / 3
    scaled = np.where(wave < 8192 / 4, frequency, np.where(wave > 8192, frequency / 8, 0))
    scaled = np.where(scaled == 0, (1 - smooth) * frequency / 8 + smooth * frequency, scaled)
    divisors = (frequency / scaled).astype(np.float32)
    found = gguf_config.llama3_scaling(divisors, raw, "here")
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)
    with pytest.raises(UserError, match="not Llama 3's scaling"):
        gguf_config.llama3_scaling(np.linspace(1, 8, 32, dtype=np.float32), raw, "here")


def junk(path, *_):
    path.write_bytes(b"GGUF" + b"\xff" * 60)


def cut(path, *_):
    path.write_bytes(path.read_bytes()[:-3000])


def again(change=lambda tensors: None, **options):
    def edit(path, raw, tensors):
        tensors = dict(tensors)
        change(tensors)
        write(path, "llama", raw, tensors, **options)

    return edit


NORM = "blk.1.attn_norm.weight"
REFUSALS = {
    "junk": (junk, "not GGUF, or cut short"),
    "cut short": (cut, "not GGUF, or cut short"),
    "empty": (lambda path, *_: path.write_bytes(b""), "not GGUF, or cut short"),
    "absent": (lambda path, *_: path.unlink(), "no such file"),
    "a field is missing": (again(without=("block_count",)), "lacks the field llama.block_count"),
    "a tensor is missing": (again(lambda t: t.pop(NORM)), "no tensor model.layers.1.input_layernorm.weight"),
    "no embedding": (again(lambda t: t.pop("token_embd.weight")), "no tensor token_embd.weight"),
    "a tensor is longer": (again(lambda t: t.update({NORM: np.ones(17, np.float32)})), r"shape \(17,\), expected"),
    "an unknown tensor": (again(lambda t: t.update({"blk.0.ssm_a": np.ones(4, np.float32)})), "tensor blk.0.ssm_a"),
    "another scaling": (again(more=(("llama.rope.scaling.type", "longrope"),)), "scaling.type is 'longrope'"),
    "more tokens than rows": (
        again(words={**WORDS, "tokens": [*WORDS["tokens"], "x"], "kinds": [*WORDS["kinds"], 1]}), "has token id 48"),
    "a rule": (again(words={**WORDS, "rule": "odd"}), "splitting rule 'odd'"),
    "another tokenizer": (again(words={**WORDS, "model": "bert"}), "tokenizer 'bert'"),
    "merges of other tokens": (again(words={**WORDS, "merges": ["zz yy"]}), "tokenizer.ggml.merges"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_converted_is_named_in_one_line(case, tmp_path):
    raw, config, params = model("llama")
    tensors, path = stored_as("llama", config, params), tmp_path / "m.gguf"
    write(path, "llama", raw, tensors)
    edit, message = REFUSALS[case]
    edit(path, raw, tensors)
    with pytest.raises(UserError, match=message) as raised:
        gguf_reader.convert(path, tmp_path / "out")
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)
    assert not (tmp_path / "out").exists()
