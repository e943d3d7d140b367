"""The engine against the full forward, against itself in other company and at other times, and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.models import llama
from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.runtime.engine import Engine, turn_key
from agentrl_jax.runtime.publish import publish

CONFIG = llama.LlamaConfig(vocab_size=61, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=64)
STOP = 3


@pytest.fixture(scope="module")
def params():
    return llama.init(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def shared_engine():
    return Engine(CONFIG, slots=8, context=96, bank=4, prefill_chunk=8, decode_steps=4, stop_ids=(STOP,), seed=7,
                  text_of=text)  # fmt: skip


@pytest.fixture
def engine(shared_engine, params):
    shared_engine.publish(publish(CONFIG, params), 5)
    yield shared_engine
    while shared_engine.busy:
        shared_engine.advance()


def text(ids):
    return "".join(f"<{token}>" for token in ids)


def ask(slot, ids, *key, fresh=True, max_tokens=12, temperature=1.0, **more):
    return SampleRequest(slot=slot, key=key or (slot,), ids=tuple(ids), fresh=fresh, max_tokens=max_tokens,
                         temperature=temperature, **more)  # fmt: skip


def finish(engine):
    samples = {}
    while engine.busy:
        for sample in engine.advance():
            assert sample.slot not in samples
            samples[sample.slot] = sample
    return samples


def conversation(engine, slot, seed, turns=3):
    """The tokens of a conversation, and (position, logprob) of what was sampled."""
    rng = np.random.default_rng(seed)
    tokens, sampled = [], []
    for turn in range(turns):
        ids = rng.integers(4, 61, size=rng.integers(1, 14)).tolist()
        engine.submit(ask(slot, ids, seed, turn, fresh=turn == 0))
        sample = finish(engine)[slot]
        tokens += ids
        for token, logprob in zip(sample.ids, sample.logprobs, strict=True):
            sampled.append((len(tokens), logprob))
            tokens.append(token)
    return tokens, sampled


def forward_logprobs(params, tokens, temperature=1.0):
    row = jnp.asarray([[*tokens, *[0] * (128 - len(tokens))]], jnp.int32)  # later tokens change nothing; one shape
    return np.asarray(_table(params, row, temperature))


@jax.jit
def _table(params, row, temperature):
    positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    h = llama.hidden(CONFIG, params, row, positions, jnp.full_like(row, row.shape[1]))
    return jax.nn.log_softmax(h[0] @ llama.unembedding(CONFIG, params).T / temperature)


def test_p03_sampler_and_forward_agree_over_three_turns(engine, params):
    tokens, sampled = conversation(engine, slot=1, seed=11)
    table = forward_logprobs(params, tokens)
    assert len(sampled) > 3
    for position, logprob in sampled:
        assert logprob == pytest.approx(table[position - 1, tokens[position]], abs=1e-5)


def test_greedy_takes_the_largest_logit(engine, params):
    engine.submit(ask(0, [5, 6, 7], temperature=0.0))
    sample = finish(engine)[0]
    tokens = [5, 6, 7, *sample.ids]
    table = forward_logprobs(params, tokens)
    assert list(sample.ids) == [int(table[i].argmax()) for i in range(2, len(tokens) - 1)]


def test_p58_group_members_differ_and_runs_repeat(engine):
    def group():
        for q in range(8):
            engine.submit(ask(q, range(5, 25), 0, 1, q, 0, share_with=0 if q else None))
        return [sample.ids for sample in finish(engine).values()]

    first = group()
    assert len(set(first)) >= 2
    assert group() == first


def test_p58_keys_are_unique():
    keys = {turn_key(s, (step, task, member, turn)) for s in range(2) for step in range(5) for task in range(12)
            for member in range(12) for turn in range(6)}  # fmt: skip
    assert len(keys) == 2 * 5 * 12 * 12 * 6
    assert turn_key(0, (1, 23)) != turn_key(0, (12, 3)) != turn_key(1, (2, 3))


def test_sharing_a_prompt_changes_nothing_and_saves_prefill(engine):
    before = engine.counters.prefilled
    for q in range(4):
        engine.submit(ask(q, range(5, 35), q, share_with=0 if q else None))
    shared = finish(engine)
    assert engine.counters.prefilled - before == 29
    for q in range(4):
        engine.submit(ask(q, range(5, 35), q))
    alone = finish(engine)
    assert [shared[q].ids for q in range(4)] == [alone[q].ids for q in range(4)]
    np.testing.assert_allclose(shared[3].logprobs, alone[3].logprobs, atol=1e-5)


def test_a_slot_has_the_same_bits_whatever_else_happens(engine):
    rng = np.random.default_rng(0)
    turns = {q: [rng.integers(4, 61, size=rng.integers(1, 30)).tolist() for _ in range(3)] for q in range(8)}

    def play(members, seed):
        """Each slot's next turn is submitted at a random time after its previous one ended."""
        order = np.random.default_rng(seed)
        next_turn, idle, got = dict.fromkeys(members, 0), set(members), {q: [] for q in members}
        while idle or engine.busy:
            for q in [int(x) for x in order.permutation(sorted(idle)) if order.random() < 0.5]:
                turn = next_turn[q]
                engine.submit(ask(q, turns[q][turn], q, turn, fresh=turn == 0, max_tokens=9))
                idle.discard(q)
            for sample in engine.advance():
                got[sample.slot].append((sample.ids, sample.logprobs))
                next_turn[sample.slot] += 1
                if next_turn[sample.slot] < 3:
                    idle.add(sample.slot)
        return got

    everyone = play(range(8), 1)
    assert play(range(8), 2) == everyone
    assert play([5], 3)[5] == everyone[5]
    assert play([0, 5, 6], 4) == {q: everyone[q] for q in (0, 5, 6)}


def test_a_cancelled_turn_frees_its_slot_and_changes_no_other(engine):
    engine.submit(ask(1, range(5, 25), 1))
    alone = finish(engine)[1]
    engine.submit(ask(0, range(5, 25), 0))
    engine.submit(ask(1, range(5, 25), 1, share_with=0))
    engine.cancel(0)  # before its prompt, which the other was to copy, is computed
    engine.submit(ask(2, range(5, 25), 2, max_tokens=60))
    engine.advance()
    partial = engine.peek(2)
    assert 0 < len(partial.ids) == len(partial.logprobs) == len(partial.versions)
    engine.cancel(2)
    engine.submit(ask(2, [9], 3, max_tokens=1))
    samples = finish(engine)
    assert set(samples) == {1, 2} and samples[1].ids == alone.ids and len(samples[2].ids) == 1
    engine.submit(ask(3, range(96)))
    engine.cancel(3)
    assert not engine.busy


def test_stops_length_context_and_versions(engine, params):
    engine.submit(ask(0, [5 + n % 50 for n in range(80)], max_tokens=50))
    engine.submit(ask(1, [9], max_tokens=1))
    engine.submit(ask(2, [5] * 96))
    samples = finish(engine)
    if samples[0].stop == "context":
        assert len(samples[0].ids) == 96 - 80
    assert (len(samples[1].ids), samples[1].versions) == (1, (5,)) and samples[1].stop in ("length", "stop")
    assert (samples[2].stop, samples[2].ids) == ("context", ()) and "context=96" in samples[2].message
    for q in range(8):
        engine.submit(ask(q, [q + 20], 99, q, max_tokens=90))
    for sample in finish(engine).values():
        assert (sample.stop == "stop") == (STOP in sample.ids)
        assert STOP not in sample.ids[:-1]


def test_p56_a_new_version_is_sampled_from_and_named(engine, params):
    other = jax.tree.map(lambda x: x * 1.3, params)
    samples = []
    for version, tree in enumerate((params, other, params)):
        engine.publish(publish(CONFIG, tree), version)
        engine.submit(ask(0, range(5, 16), max_tokens=6))
        samples.append(finish(engine)[0])
    assert samples[0].logprobs == samples[2].logprobs != samples[1].logprobs
    assert [s.versions[0] for s in samples] == [0, 1, 2]


def test_no_implicit_transfers_and_each_function_compiles_once(engine):
    with jax.transfer_guard("disallow"):
        for round_ in range(3):
            for q in range(8):
                ids, share = range(5, 9 + 5 * round_), 0 if q else None
                engine.submit(ask(q, ids, round_, q, share_with=share, temperature=q / 4))
            finish(engine)
    assert engine.cache_sizes() == {"prefill": 1, "copy_pages": 1, "decode_8": 1}


def test_published_params_survive_donation(params):
    mine = jax.tree.map(jnp.copy, params)
    published = publish(CONFIG, mine)
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(mine)
    assert all(x.is_deleted() for x in jax.tree.leaves(mine))
    np.testing.assert_array_equal(published["embedding"], params["embedding"])
    np.testing.assert_array_equal(published["layers"][1]["down"].weight.T, params["layers"]["down"][1])


@pytest.mark.parametrize("request_, message", [
    (ask(8, [1]), "slot=8"),
    (ask(0, [1], max_tokens=0), "max_tokens=0"),
    (ask(6, []), "holds nothing"),
    (ask(0, [1, 2], share_with=7), "share_with=7"),
])  # fmt: skip
def test_bad_requests_are_named(engine, request_, message):
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)


def test_a_busy_slot_and_an_unpublished_engine_refuse(engine):
    engine.submit(ask(0, [5, 6]))
    with pytest.raises(ValueError, match="busy"):
        engine.submit(ask(0, [5, 6]))
    with pytest.raises(ValueError, match="rows="):
        Engine(CONFIG, slots=8, context=8, bank=3, prefill_chunk=4, decode_steps=2, stop_ids=(), seed=0, rows=(0, 8))
