"""Hugging Face directories: read to shards within a memory bound, written so that transformers agrees, and refused."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from agentrl_jax import sharding
from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.runtime import pretrained, tensor_files

CONFIG = llama.LlamaConfig(
    vocab_size=40, width=16, layers=3, heads=4, kv_heads=2, head_width=8, mlp_width=32, tied=False, norm_eps=1e-6
)
TEMPLATE = "{% for m in messages %}{{ m['content'] }} w39{% endfor %}"


def tokenizer_of(size):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size - 1)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(f"w{size - 1}", special=True)])
    return tokenizer


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: llama.init(CONFIG, key))(jax.random.key(0))


@pytest.fixture
def saved(params, tmp_path):
    pretrained.save(tmp_path / "m", CONFIG, params, tokenizer_of(40), template=TEMPLATE, stop_ids=(39,))
    return tmp_path / "m"


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 2}, {}])
def test_every_device_gets_its_part(saved, params, axes):
    mesh = sharding.make_mesh(**axes)
    wanted = sharding.shardings(mesh, llama.logical_axes(CONFIG))
    found = pretrained.load(saved, wanted)[1]
    equal(params, found)
    assert jax.tree.map(lambda x: x.sharding, found) == wanted
    equal(params, pretrained.load(saved, sharding.replicated(mesh))[1])


def test_the_layers_axis_may_be_sharded(saved, params):
    mesh = sharding.make_mesh(data=1, fsdp=3, devices=jax.devices()[:3])
    rules = {**sharding.RULES, "layers": "fsdp", "width": None}
    found = pretrained.load(saved, sharding.shardings(mesh, llama.logical_axes(CONFIG), rules))[1]
    equal(params, found)
    assert found["layers"]["query"].addressable_shards[1].data.shape == (1, 16, 4, 8)


def test_another_dtype_and_donation(saved, params):
    """What is loaded may be donated, though the CPU backend took the staging buffers as they were."""
    config, found, _ = pretrained.load(saved, dtype="bfloat16")
    assert config.param_dtype == "bfloat16"
    equal(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), found)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    twice = double(pretrained.load(saved)[1])
    equal(jax.tree.map(lambda x: x + x, params), twice)
    equal(params, pretrained.load(saved)[1])


def test_shards_above_a_size(saved, params, tmp_path):
    pretrained.save(tmp_path / "s", CONFIG, params, tokenizer_of(40), shard_bytes=8000)
    index = json.loads((tmp_path / "s" / tensor_files.INDEX).read_text())
    files = sorted(path.name for path in (tmp_path / "s").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 2
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
    assert all((tmp_path / "s" / file).stat().st_size < 9000 for file in files)
    equal(params, pretrained.load(tmp_path / "s")[1])
    pretrained.save(tmp_path / "s", CONFIG, params, tokenizer_of(40))
    assert [path.name for path in (tmp_path / "s").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.filterwarnings("ignore")
def test_transformers_gives_the_same_logits_and_text(saved, params):
    torch = pytest.importorskip("torch", reason="type: pip install torch==2.13.0")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    row = tokenizer("w5 w39 w7 w2")["input_ids"]
    assert row == [5, 39, 7, 2]
    with torch.no_grad():
        logits = theirs(torch.tensor([row])).logits[0].numpy()
    tokens = jnp.asarray([row], jnp.int32)
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    h = llama.hidden(CONFIG, params, tokens, positions, jnp.full_like(tokens, 4))
    np.testing.assert_allclose(h[0] @ params["unembedding"].T, logits, atol=1e-4)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "w1 w39"
    assert (tokenizer.eos_token, theirs.generation_config.eos_token_id) == ("w39", 39)


# -- memory ----------------------------------------------------------------------------------------------------------

BIG = llama.LlamaConfig(
    vocab_size=12_000, width=1024, layers=10, heads=8, kv_heads=4, head_width=128, mlp_width=2048, tied=False
)
MEASURE = """
import json, sys
import jax, numpy as np
from agentrl_jax import sharding
from agentrl_jax.models import llama
from agentrl_jax.runtime import pretrained

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

config = pretrained.load_config(sys.argv[1])[0]
mesh = sharding.make_mesh(fsdp=len(jax.devices()))
places = sharding.shardings(mesh, llama.logical_axes(config))
jax.block_until_ready(jax.device_put(np.ones(8), jax.devices()[-1]))
before = peak()
params = pretrained.load_params(sys.argv[1], config, places)
grown = peak() - before
sums = {name: float(np.asarray(x[0]).max()) for name, x in params["layers"].items()}
shards = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards)
print(json.dumps({"grown": grown, "shards": shards, "sums": sums}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from Linux's /proc")
def test_peak_memory_is_the_shards_and_one_tensor(tmp_path):
    """Beyond the local shards, at most 1.25 x the largest tensor of the checkpoint (not of our stacked layout)."""
    # All 0.5: what a tensor holds plays no part.
    tensors = ((t.name, np.full(t.shape, 0.5, np.float32)) for t in llama.tensors(BIG))
    tensor_files.write(tmp_path, tensors, shard_bytes=100 << 20)
    largest = BIG.vocab_size * BIG.width * 4
    (tmp_path / "config.json").write_text(json.dumps(llama.config_to_json(BIG)))
    tokenizer_of(40).save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["shards"] > 400e6
    assert 0.9 * found["shards"] < found["grown"] < found["shards"] + 1.25 * largest, found
    assert set(found["sums"].values()) == {0.5}


# -- refusals --------------------------------------------------------------------------------------------------------


def edit_config(**change):
    def edit(saved):
        raw = json.loads((saved / "config.json").read_text())
        (saved / "config.json").write_text(json.dumps({k: v for k, v in {**raw, **change}.items() if v != "absent"}))

    return edit


def edit_tensors(change):
    def edit(saved):
        tensors = load_file(saved / "model.safetensors")
        change(tensors)
        save_file(tensors, saved / "model.safetensors")

    return edit


def cut(name, keep):
    def edit(saved):
        (saved / name).write_bytes((saved / name).read_bytes()[:keep])

    return edit


def with_index(raw):
    return lambda saved: (saved / tensor_files.INDEX).write_text(json.dumps(raw))


NORM, KEY = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"
REFUSALS = {
    "another architecture": (edit_config(model_type="gpt2"), "config.json: model_type is 'gpt2', expected one of"),
    "no architecture": (edit_config(model_type="absent"), "config.json: model_type is None"),
    "an odd type": (edit_config(model_type=["llama"]), "config.json: model_type is"),
    "a size is missing": (edit_config(hidden_size="absent"), "config.json: lacks hidden_size"),
    "config cut short": (cut("config.json", 30), r"config.json:\d: not JSON"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "config.json: holds a list"),
    "config binary": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "config.json: not JSON"),
    "tokenizer cut short": (cut("tokenizer.json", 30), "tokenizer.json: not a tokenizer"),
    "tokenizer of another model": (
        lambda d: tokenizer_of(41).save(str(d / "tokenizer.json")), "tokenizer.json: has token id 40.*vocab_size=40"),
    "weights cut short": (cut("model.safetensors", 5000), "model.safetensors: not safetensors, or cut short"),
    "weights empty": (cut("model.safetensors", 0), "model.safetensors: not safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "a tensor is missing": (edit_tensors(lambda t: t.pop(KEY)), f"no tensor {KEY}"),
    "a tensor is turned": (
        edit_tensors(lambda t: t.update({KEY: np.ascontiguousarray(t[KEY].reshape(8, -1))})),
        rf"model.safetensors: tensor {KEY} has shape \(8, 32\), expected \(16, 16\)"),
    "tensors are left over": (
        edit_tensors(lambda t: t.update({"a": t[NORM], "b": t[NORM]})), "tensor a and 1 more left over"),
    "quantised": (edit_tensors(lambda t: t.update({NORM: t[NORM].astype(np.int8)})), f"tensor {NORM} is I8"),
    "fewer layers": (edit_config(num_hidden_layers=2), "and 8 more left over"),
    "more layers": (edit_config(num_hidden_layers=4), "no tensor model.layers.3"),
    "index without map": (with_index({}), "index.json: lacks weight_map"),
    "index names no file": (with_index({"weight_map": {NORM: "x.safetensors"}}), "x.safetensors: no such file"),
    "index names another": (with_index({"weight_map": {"z": "model.safetensors"}}), "index.json: names z"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_loaded_is_named_in_one_line(saved, case):
    edit, message = REFUSALS[case]
    edit(saved)
    with pytest.raises(UserError, match=message) as raised:
        pretrained.load(saved)
    assert "\n" not in str(raised.value) and str(saved) in str(raised.value)


def test_the_place_of_a_picture_may_lie_beyond_the_embedding(saved):
    """As in the text models of Gemma 3: 262,144 rows, and `<image_soft_token>` is number 262,144."""
    tokenizer = tokenizer_of(40)
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.save(str(saved / "tokenizer.json"))
    assert pretrained.load_config(saved)[1].token_to_id("<image_soft_token>") == 40
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(saved / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has token id 41.*vocab_size=40"):
        pretrained.load_config(saved)


def test_derived_tensors_are_no_surplus(saved):
    edit_tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": t[NORM]}))(saved)
    pretrained.load(saved)
