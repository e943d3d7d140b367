"""Adapters: they start as nothing, act as the merged model, alone are trained, and PEFT reads them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from agentrl_jax.batch import TokenBatch
from agentrl_jax.errors import UserError
from agentrl_jax.learner.score import Scorer
from agentrl_jax.learner.state import init_state
from agentrl_jax.learner.update import make_update
from agentrl_jax.models import llama, lora
from agentrl_jax.rl.imitation import imitation_loss
from agentrl_jax.runtime import adapters as peft_files
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.publish import publish

CONFIG = llama.LlamaConfig(
    vocab_size=40, width=16, layers=3, heads=4, kv_heads=2, head_width=8, mlp_width=32, norm_eps=1e-6
)
LORA = lora.Lora(rank=2, alpha=6.0)
ROWS, WIDTH = 4, 12


@pytest.fixture(scope="module")
def base():
    return jax.jit(lambda key: llama.init(CONFIG, key))(jax.random.key(0))


def moved(params, seed=1):
    """Adapters that do something: B starts at zero."""
    leaves, tree = jax.tree.flatten(params.adapters)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return params.replace(adapters=jax.tree.unflatten(tree, drawn))


@pytest.fixture(scope="module")
def adapted(base):
    return moved(lora.init(LORA, base, jax.random.key(1)))


def rows():
    tokens = np.random.default_rng(0).integers(0, 40, (ROWS, WIDTH)).astype(np.int32)
    column = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), tokens.shape)
    ends = np.full_like(tokens, WIDTH)
    return jnp.asarray(tokens), jnp.asarray(column), jnp.asarray(ends)


@jax.jit
def hidden(params):
    return llama.hidden(CONFIG, lora.attached(params), *rows(), True)


def test_fresh_adapters_change_nothing(base):
    fresh = lora.init(LORA, base, jax.random.key(1))
    np.testing.assert_array_equal(hidden(fresh), hidden(base))
    assert {x.shape[0] for x in jax.tree.leaves(fresh.adapters)} == {3}
    assert fresh.adapters["out"]["a"].shape == (3, 4, 8, 2) and fresh.adapters["out"]["b"].shape == (3, 2, 16)


def test_boxed_equals_merged_equals_the_closed_form(base, adapted):
    merged = jax.jit(lora.merged)(adapted)
    np.testing.assert_allclose(hidden(adapted), hidden(merged), atol=1e-5)
    assert float(jnp.abs(hidden(adapted) - hidden(base)).max()) > 0.1
    a, b = adapted.adapters["out"]["a"][1], adapted.adapters["out"]["b"][1]
    w = np.asarray(base["layers"]["out"][1]).reshape(32, 16) + 3.0 * np.asarray(a).reshape(32, 2) @ np.asarray(b)
    np.testing.assert_allclose(merged["layers"]["out"][1].reshape(32, 16), w, atol=1e-5)
    np.testing.assert_array_equal(merged["embedding"], base["embedding"])


def test_the_sampler_gets_the_merged_model(adapted):
    expected = llama.unstack(CONFIG, lora.merged(adapted))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), publish(CONFIG, adapted), expected)


def batch():
    tokens, positions, ends = rows()
    zeros, ints = jnp.zeros(tokens.shape, jnp.float32), jnp.zeros_like(tokens)
    mask = positions > 3
    return TokenBatch(
        tokens=tokens, parents=positions - 1, subtree_ends=ends, positions=positions, trajectory_ids=ints,
        turn_ids=ints, sources=ints.astype(jnp.int8), action_mask=mask, behavior_logprobs=zeros, old_logprobs=None,
        ref_logprobs=None, values=None, returns=None, advantages=zeros,
        weights=mask.astype(jnp.float32) / float(mask.sum()), policy_versions=ints,
    )  # fmt: skip


def scorer():
    return Scorer(
        lambda params, *where: llama.hidden(CONFIG, lora.attached(params), *where),
        lambda params: llama.unembedding(CONFIG, lora.attached(params)),
    )


@pytest.mark.parametrize("bits", ["full", "int8", "nf4"])
def test_only_adapters_are_trained(base, bits):
    if bits != "full":
        pytest.importorskip("qwix", reason="type: pip install qwix")
    settings = lora.Lora(rank=2, alpha=6.0, targets=("query", "value", "down"), base=bits)
    params = lora.init(settings, base, jax.random.key(1))
    before = jax.tree.map(np.array, params)
    optimizer = optax.adam(3e-2)
    update, state = make_update(scorer(), imitation_loss, optimizer, micro_rows=2), init_state(optimizer, params)
    trained = sum(x.size for x in jax.tree.leaves(params.adapters))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * trained + 1
    assert sum(x.size for x in jax.tree.leaves(update.start(params).grads)) == trained
    losses = []
    for _ in range(4):
        state, info = update.step(state, batch(), range(0, ROWS, 2))
        losses.append(float(info.loss))
    assert losses[-1] < losses[0] - 0.1
    jax.tree.map(np.testing.assert_array_equal, before.base, state.params.base)
    for name, pair in state.params.adapters.items():
        assert all(np.any(np.asarray(pair[k]) != before.adapters[name][k]) for k in "ab")
    assert set(update.cache_sizes().values()) == {1}
    assert not any(x.is_deleted() for x in jax.tree.leaves(params.base))


@pytest.mark.parametrize("bits, worst", [("int8", 0.01), ("int4", 0.15), ("nf4", 0.2)])
def test_a_quantised_base_is_near_and_small(base, bits, worst):
    pytest.importorskip("qwix", reason="type: pip install qwix")
    params = lora.init(lora.Lora(rank=2, base=bits), base, jax.random.key(1))
    near = lora.merged(params)
    for name in lora.PROJECTIONS:
        a, b = np.asarray(base["layers"][name]), np.asarray(near["layers"][name])
        assert 0 < np.abs(a - b).max() < worst * np.abs(a).max()
    np.testing.assert_allclose(hidden(params), hidden(near), atol=1e-5)
    packed = params.base["layers"]["down"].qvalue
    assert packed.dtype.itemsize == 1 and ("4" in str(packed.dtype)) == (bits != "int8")


# -- PEFT ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(adapted, tmp_path):
    peft_files.save(tmp_path, CONFIG, LORA, adapted.adapters, base_model="base")
    return tmp_path


def test_adapters_come_back_bit_for_bit(saved, adapted):
    found, back = peft_files.load(saved, CONFIG)
    assert found == LORA
    jax.tree.map(np.testing.assert_array_equal, adapted.adapters, back)


@pytest.mark.filterwarnings("ignore")
def test_peft_computes_the_same(saved, base, adapted, tmp_path):
    torch = pytest.importorskip("torch", reason="type: pip install torch==2.13.0")
    peft = pytest.importorskip("peft", reason="type: pip install peft")
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    pretrained.save(tmp_path / "base", CONFIG, base, words)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(model, saved)
    with torch.no_grad():
        logits = theirs(torch.tensor(np.asarray(rows()[0]), dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(hidden(adapted) @ base["embedding"].T, logits, atol=1e-4)
    theirs.save_pretrained(tmp_path / "again")
    found, back = peft_files.load(tmp_path / "again", CONFIG)
    assert set(found.targets) == set(LORA.targets) and found.alpha == LORA.alpha
    jax.tree.map(np.testing.assert_array_equal, adapted.adapters, {name: back[name] for name in adapted.adapters})


def edited(**change):
    def edit(directory):
        raw = json.loads((directory / peft_files.CONFIG).read_text())
        (directory / peft_files.CONFIG).write_text(json.dumps({**raw, **change}))

    return edit


def tensors(change):
    def edit(directory):
        found = load_file(directory / peft_files.WEIGHTS)
        change(found)
        save_file(found, directory / peft_files.WEIGHTS)

    return edit


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
REFUSALS = {
    "another kind": (edited(peft_type="IA3"), "peft_type is 'IA3', expected 'LORA'"),
    "dora": (edited(use_dora=True), "use_dora is True"),
    "no rank": (edited(r=None), "lacks r or lora_alpha"),
    "another rank": (edited(r=4), r"has shape \(2, 16\), expected \(4, 16\)"),
    "a tensor less": (tensors(lambda t: t.pop(KEY)), f"lacks {KEY}"),
    "a tensor more": (tensors(lambda t: t.update({"x": t[KEY]})), "has x"),
    "none": (tensors(lambda t: t.clear()), "no adapters"),
    "cut short": (lambda d: (d / peft_files.WEIGHTS).write_bytes(b"x" * 40), "not safetensors"),
    "no file": (lambda d: (d / peft_files.WEIGHTS).unlink(), "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_loaded_is_named(saved, case):
    edit, message = REFUSALS[case]
    edit(saved)
    with pytest.raises(UserError, match=message) as raised:
        peft_files.load(saved, CONFIG)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("change, name", [
    ({"rank": 0}, "rank=0"), ({"alpha": 0.0}, "alpha=0.0"), ({"targets": ()}, "targets"),
    ({"targets": ("query", "query")}, "targets"), ({"targets": ("embedding",)}, "'embedding'"),
])  # fmt: skip
def test_settings_without_sense_are_named(base, change, name):
    with pytest.raises(UserError, match=name):
        lora.check(lora.Lora(**change), jax.eval_shape(lambda: base))
