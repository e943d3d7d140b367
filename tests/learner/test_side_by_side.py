"""The hook of the side-by-side harness does that harness' work: first loss and gradient norm, computed another way."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

from benchmarks import long_prompts, ours_update

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, MLP, VOCABULARY, EPS, THETA = 2, 16, 4, 2, 4, 24, 61, 1e-5, 1e4
GROUP, CLIP = 3, 0.2
NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
}  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    """In Hugging Face's names; large enough that every part of the model matters to the loss."""
    rng = np.random.default_rng(0)
    shapes = {"q": (WIDTH, WIDTH), "k": (KV_HEADS * HEAD, WIDTH), "v": (KV_HEADS * HEAD, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"gate": (MLP, WIDTH), "up": (MLP, WIDTH), "down": (WIDTH, MLP), "norm1": (WIDTH,), "norm2": (WIDTH,)}
    found = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        found |= {f"model.layers.{layer}.{NAMES[short]}.weight": shape for short, shape in shapes.items()}
    return {n: (0.3 * rng.normal(size=s) + ("norm" in n)).astype(np.float32) for n, s in found.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory, weights):
    folder = tmp_path_factory.mktemp("model")
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": WIDTH,
        "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
        "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def data():
    """Two groups of members of different lengths; the prompt, then turns of the policy and of the environment."""
    rng = np.random.default_rng(1)
    parts = {name: [] for name in ("tokens", "loss_mask", "old_logprobs")}
    lengths, prompts = [], []
    for group in range(2):
        prompt = rng.integers(0, VOCABULARY, 5 + group)
        for _ in range(GROUP):
            mask = np.concatenate([np.zeros(len(prompt)), rng.random(int(rng.integers(4, 20))) < 0.5, [1]])
            tokens = np.concatenate([prompt, rng.integers(0, VOCABULARY, len(mask) - len(prompt))])
            parts["tokens"].append(tokens.astype(np.int32))
            parts["loss_mask"].append(mask.astype(np.int32))
            parts["old_logprobs"].append((mask * rng.normal(-4.0, 0.7, len(mask))).astype(np.float32))
            lengths.append(len(mask))
            prompts.append(len(prompt))
    return {name: np.concatenate(found) for name, found in parts.items()} | {
        "lengths": np.array(lengths), "prompt_lengths": np.array(prompts), "group": np.repeat(np.arange(2), GROUP),
        "advantages": rng.normal(size=2 * GROUP).astype(np.float32),
    }  # fmt: skip


def logits_of(weights, tokens):
    """f32[n, V] of one trajectory by itself: Llama in a few lines, [n, n] scores and all."""

    def normed(x, scale):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale[None]

    def heads(x):
        return x.reshape(len(tokens), -1, HEAD)

    def turned(x):
        turn = THETA ** (-2.0 * np.arange(HEAD // 2) / HEAD)
        angle = jnp.asarray(np.arange(len(tokens))[:, None, None] * turn[None, None], jnp.float32)
        a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)

    x = weights["model.embed_tokens.weight"][tokens]
    past = jnp.asarray(np.tril(np.ones((len(tokens), len(tokens)), bool)))[None]
    for layer in range(LAYERS):
        w = {short: weights[f"model.layers.{layer}.{name}.weight"] for short, name in NAMES.items()}
        y = normed(x, w["norm1"])
        q, k, v = turned(heads(y @ w["q"].T)), turned(heads(y @ w["k"].T)), heads(y @ w["v"].T)
        k, v = (jnp.repeat(z, HEADS // KV_HEADS, axis=1) for z in (k, v))
        scores = jnp.where(past, jnp.einsum("ihc,jhc->hij", q, k) * HEAD**-0.5, -jnp.inf)
        x = x + jnp.einsum("hij,jhc->ihc", jax.nn.softmax(scores), v).reshape(len(tokens), -1) @ w["o"].T
        y = normed(x, w["norm2"])
        x = x + (jax.nn.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
    return normed(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


def padded(data):
    """Tokens, actions and old log-probabilities, one trajectory a row."""
    ends = np.cumsum(data["lengths"])[:-1]
    longest = int(data["lengths"].max())
    return [
        np.stack([np.pad(part, (0, longest - len(part))) for part in np.split(data[name], ends)])
        for name in ("tokens", "loss_mask", "old_logprobs")
    ]


@jax.jit
def loss_of(weights, tokens, actions, old, advantages):
    """GRPO: a mean over trajectories of means over their actions of the clipped surrogate, with a minus."""
    table = jax.nn.log_softmax(jax.vmap(partial(logits_of, weights))(tokens))[:, :-1]
    chosen = jnp.take_along_axis(table, tokens[:, 1:, None], axis=-1)[..., 0]
    counted, wanted = actions[:, 1:].astype(jnp.float32), advantages[:, None]
    ratio = jnp.exp(counted * (chosen - old[:, 1:]))
    gain = jnp.minimum(ratio * wanted, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * wanted)
    return -jnp.mean(jnp.sum(counted * gain, axis=1) / jnp.sum(counted, axis=1))


def first_step(data, model, **settings):
    work = ours_update.prepare(data, model, chunk=16, **settings)
    _, info = work.update.step(work.state, work.batch, work.micro)
    return info.to_host(), work


@pytest.mark.parametrize("prompts", ["short", "half"])
def test_the_first_loss_and_gradient_norm_are_those_of_the_formula(weights, model, data, prompts):
    if prompts == "half":
        data = long_prompts.lengthen(data)
        assert data["prompt_lengths"].sum() / data["lengths"].sum() == pytest.approx(0.5, abs=0.02)
    value, grads = jax.jit(jax.value_and_grad(loss_of))(weights, *padded(data), data["advantages"])
    found, work = first_step(data, model, width=64)
    assert found["loss"] == pytest.approx(float(value), abs=2e-6)
    assert found["grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    assert 0 < found["clip_fraction"] < 1 and found["finite"]
    assert int((np.asarray(work.batch.sources) != 0).sum()) < data["lengths"].sum()  # each prompt is there once


def test_copied_prompts_and_micro_batches_are_the_same_work(model, data):
    shared, _ = first_step(data, model, width=64)
    apart, work = first_step(data, model, width=32, share=False, micro_rows=1, remat="full")
    assert len(work.micro) > 1 and work.real_tokens == data["lengths"].sum()
    assert {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in shared.items()} == apart
