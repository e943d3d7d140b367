"""An engine over several devices: the bits of one, a prompt computed once a device, params taken over in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax import sharding
from agentrl_jax.models import llama
from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.fleet import AXIS, Fleet, spread
from agentrl_jax.runtime.publish import publish

CONFIG = llama.LlamaConfig(vocab_size=61, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=64)
SLOTS, GROUP = 8, 4  # and the sizes of test_engine.py, whose programs are then compiled once for both


@pytest.fixture(scope="module")
def params():
    return llama.init(CONFIG, jax.random.key(0))


def open_engine(params, devices, **more):
    sizes = {"slots": SLOTS, "context": 96, "bank": 4, "prefill_chunk": 8, "decode_steps": 4} | more
    engine = Engine(CONFIG, **sizes, stop_ids=(3,), seed=7, sharding=devices and spread(devices))
    engine.publish(publish(CONFIG, params, spread(jax.devices())), 0)
    return engine


@pytest.fixture(scope="module")
def two(params):
    return open_engine(params, jax.devices()[:2])


@pytest.fixture
def engine(two):
    yield two
    while two.busy:
        two.advance()


def ask(slot, ids, *key, **more):
    wanted = {"fresh": True, "max_tokens": 9, "temperature": 1.0} | more
    return SampleRequest(slot=slot, key=key or (slot,), ids=tuple(ids), **wanted)


def finish(engine):
    return {sample.slot: sample for sample in iter_samples(engine)}


def iter_samples(engine):
    while engine.busy:
        yield from engine.advance()


def conversations(engine):
    """Groups that share their prompts, then turns of their own, of all lengths; some rows cut."""
    rng, found = np.random.default_rng(0), []
    for turn in range(3):
        prompts = [rng.integers(4, 61, size=rng.integers(2, 20)).tolist() for _ in range(engine.slots // GROUP)]
        for q in range(engine.slots):
            leader = q - q % GROUP
            engine.submit(
                ask(q, prompts[q // GROUP], turn, q, fresh=not turn, max_tokens=int(rng.integers(1, 14)),
                    share_with=leader if q > leader and not turn else None, top_k=int(rng.choice([0, 5])))
            )  # fmt: skip
        found.append(finish(engine))
    return found


@pytest.fixture(scope="module")
def alone(params):
    engine = open_engine(params, None)
    return conversations(engine), engine.counters


@pytest.mark.parametrize("count", [2, 8])
def test_bits_do_not_depend_on_the_number_of_devices(params, alone, two, count):
    engine = two if count == 2 else open_engine(params, jax.devices()[:count])
    before = engine.counters.sampled  # tests share the engine of two
    with jax.transfer_guard("disallow"):
        found = conversations(engine)
    assert found == alone[0]
    sizes = engine.cache_sizes()
    assert set(sizes) == {"prefill", "copy_pages", "decode_8"} and max(sizes.values()) == 1, (
        "one program for all devices"
    )
    assert engine.counters.sampled - before == alone[1].sampled


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_devices_where_batches_differ(params):
    found = [conversations(open_engine(params, devices, slots=32)) for devices in (None, jax.devices()[:4])]
    assert found[0] == found[1]
    assert found[0] == conversations(open_engine(params, jax.devices()[:1], slots=32))


def test_n_devices_decode_n_times_the_slots_in_a_dispatch(engine):
    before = engine.counters.decode_dispatches
    for q in range(SLOTS):
        engine.submit(ask(q, [5 + q], max_tokens=4, stop_ids=()))
    samples = finish(engine)
    assert len(samples) == SLOTS and engine.counters.decode_dispatches - before == 1
    assert {x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(engine._pools)} == {SLOTS // 2 * 3 + 1}


def test_a_group_over_two_devices_is_prefilled_once_on_each(engine):
    prompt, before = [5 + n % 50 for n in range(30)], engine.counters.prefilled
    wave = [ask(q, prompt, share_with=2 if q > 2 else None) for q in range(2, 7)]
    for request in wave:
        engine.submit(request)
    together = finish(engine)
    assert engine.counters.prefilled - before == 2 * 29
    assert [engine.shares(2, q) for q in (0, 3, 4, 7)] == [True, True, False, False]
    for q in (3, 4, 6):
        engine.submit(ask(q, prompt))
    assert finish(engine) == {q: together[q] for q in (3, 4, 6)}


def test_a_leader_that_leaves_is_followed_by_nobody_on_either_device(engine):
    prompt = [6 + n % 50 for n in range(20)]
    for q in (0, 1, 4, 5):
        engine.submit(ask(q, prompt, share_with=0 if q else None))
    engine.cancel(0)
    engine.cancel(4)  # the one that leads on the other device
    found = finish(engine)
    for q in (1, 5):
        engine.submit(ask(q, prompt))
    assert set(found) == {1, 5} and finish(engine) == found


def test_a_fork_stays_on_its_device(engine):
    engine.submit(ask(0, range(5, 40)))
    finish(engine)
    engine.submit(ask(1, [9], fork_from=0))
    assert finish(engine)[1].ids
    with pytest.raises(ValueError, match="fork_from=0: on another device than slot 4"):
        engine.submit(ask(4, [9], fork_from=0))


def test_slots_that_do_not_divide_are_named(params):
    with pytest.raises(ValueError, match="slots=7: expected a multiple of the 2 devices"):
        open_engine(params, jax.devices()[:2], slots=7)


def pointers(x):
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


def test_colocated_params_are_taken_over_without_a_copy(params):
    learner = sharding.replicated(sharding.make_mesh(data=2, fsdp=4))
    published = publish(CONFIG, jax.device_put(params, learner), learner)
    with jax.transfer_guard("disallow_explicit"):
        adopted = Fleet(spread(jax.local_devices())).adopt(CONFIG, published)
    for mine, theirs in zip(jax.tree.leaves(published), jax.tree.leaves(adopted), strict=True):
        assert theirs.sharding.mesh.axis_names == (AXIS,)
        assert pointers(mine) == pointers(theirs)


def test_split_params_go_from_device_to_device(params, monkeypatch):
    learner = sharding.replicated(sharding.make_mesh(data=2, fsdp=3, devices=jax.devices()[:6]))
    published = publish(CONFIG, jax.device_put(params, learner), learner)
    fetched = []
    monkeypatch.setattr(type(jnp.zeros(1)), "_value", property(fetched.append))
    with jax.transfer_guard("disallow"):
        adopted = Fleet(spread(jax.devices()[6:])).adopt(CONFIG, published)
    monkeypatch.undo()
    assert not fetched, "no host copy"
    jax.tree.map(np.testing.assert_array_equal, adopted, published)
    assert all(x.sharding.device_set == set(jax.devices()[6:]) for x in jax.tree.leaves(adopted))


def test_params_that_are_split_are_refused(params):
    mesh = sharding.make_mesh(data=1, fsdp=8)
    split = jax.device_put(params["embedding"], jax.sharding.NamedSharding(mesh, jax.P(None, "fsdp")))
    with pytest.raises(ValueError, match="expected whole arrays"):
        Fleet(spread(jax.devices())).adopt(CONFIG, {"embedding": split})


def test_devices_in_pairs_share_heads_and_draw_the_same_tokens(params, alone):
    engine = Engine(CONFIG, slots=SLOTS, context=96, bank=4, prefill_chunk=8, decode_steps=4, stop_ids=(3,), seed=7,
                    sharding=spread(jax.devices()[4:], tensor=2))  # fmt: skip
    learner = sharding.replicated(sharding.make_mesh(devices=jax.devices()[:4]))
    engine.publish(publish(CONFIG, jax.device_put(params, learner), learner, onto=engine.sharding), 0)
    with jax.transfer_guard("disallow"):
        found = conversations(engine)
    for turn, mine in zip(alone[0], found, strict=True):
        assert {q: s.ids for q, s in mine.items()} == {q: s.ids for q, s in turn.items()}
        for q in mine:
            np.testing.assert_allclose(mine[q].logprobs, turn[q].logprobs, rtol=0, atol=1e-5)
    assert {x.sharding.shard_shape(x.shape)[:2] for x in jax.tree.leaves(engine._pools)} == {(SLOTS // 2 * 3 + 1, 1)}
    assert set(engine.cache_sizes().values()) == {1}
