"""An engine whose weights and pages lie over the devices of a `tensor` axis, against one that holds them whole."""

import dataclasses

import jax
import numpy as np
import pytest

from agentrl_jax import sharding
from agentrl_jax.models import llama
from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.publish import publish

CONFIG = llama.LlamaConfig(
    vocab_size=64, width=32, layers=2, heads=8, kv_heads=4, head_width=8, mlp_width=64, qk_norm=True, tied=False
)


def engine(config, place):
    made = Engine(config, slots=8, context=96, bank=4, prefill_chunk=8, decode_steps=4, stop_ids=(3,), seed=7,
                  sharding=place, rows=(8,))  # fmt: skip
    made.publish(publish(config, llama.init(config, jax.random.key(0)), place), 1)
    return made


def two_turns(engine):
    """Samples of two turns of 6 slots, some of which share a prompt, one with a cut vocabulary."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(4, 64, size=n).tolist()) for n in (5, 40, 40, 1, 33, 17)]
    prompts[2] = prompts[1]
    found = {}
    for turn in range(2):
        for slot, ids in enumerate(prompts):
            more = {"share_with": 1} if turn == 0 and slot == 2 else {}
            cut = {"top_k": 5} if slot == 4 else {}
            engine.submit(SampleRequest(slot=slot, key=(slot, turn), ids=ids if turn == 0 else ids[:3],
                                        fresh=turn == 0, max_tokens=10, temperature=1.0, **more, **cut))  # fmt: skip
        while engine.busy:
            found |= {(turn, sample.slot): sample for sample in engine.advance()}
    return found


@pytest.fixture(scope="module")
def alone():
    return two_turns(engine(CONFIG, None))


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 4)])
def test_heads_over_devices_draw_the_same_tokens(alone, data, tensor):
    mesh = sharding.make_mesh(data=data, tensor=tensor, devices=jax.devices()[: data * tensor])
    split = engine(CONFIG, sharding.replicated(mesh))
    found = two_turns(split)
    assert {key: sample.ids for key, sample in found.items()} == {key: sample.ids for key, sample in alone.items()}
    for key, sample in found.items():
        np.testing.assert_allclose(sample.logprobs, alone[key].logprobs, rtol=0, atol=1e-5)
        np.testing.assert_allclose(sample.raw_logprobs, alone[key].raw_logprobs, rtol=0, atol=1e-5)
        assert sample.kept == alone[key].kept
    assert set(split.cache_sizes().values()) == {1}


def test_each_device_holds_its_part_of_weights_and_pages():
    place = sharding.replicated(sharding.make_mesh(tensor=4, devices=jax.devices()[:4]))
    made = engine(CONFIG, place)
    on_one = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    everywhere = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert on_one(made._pools) * 4 == everywhere(made._pools)
    assert on_one(made.params) < everywhere(made.params) / 3.9  # norms are whole
    two_turns(made)
    assert on_one(made._pools) * 4 == everywhere(made._pools)


def test_what_does_not_divide_is_whole_or_refused():
    place = sharding.replicated(sharding.make_mesh(tensor=4, devices=jax.devices()[:4]))
    odd = dataclasses.replace(CONFIG, vocab_size=61)
    params = publish(odd, llama.init(odd, jax.random.key(0)), place)
    assert params["embedding"].sharding.is_fully_replicated
    assert not params["layers"][0]["gate"].sharding.is_fully_replicated
    two = dataclasses.replace(CONFIG, kv_heads=2)
    with pytest.raises(ValueError, match="4 devices must divide kv_heads=2"):
        publish(two, llama.init(two, jax.random.key(0)), place)
