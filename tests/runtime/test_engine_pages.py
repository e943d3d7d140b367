"""What requests share and what they must not: pages, prefixes, forks, batch sizes; and what ends a turn."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels.kept import kept_logprobs
from agentrl_jax.models import llama
from agentrl_jax.rollout.sampling import SampleRequest, kept_bits, kept_ids
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.publish import publish
from agentrl_jax.sampler.pages import PAGE

CONFIG = llama.LlamaConfig(vocab_size=61, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=64)
PROMPT = [5 + n * n % 50 for n in range(2 * PAGE + 9)]


def text(ids):
    return "".join(f"<{token}>" for token in ids)


@pytest.fixture(scope="module")
def params():
    return llama.init(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def shared_engine():
    return Engine(CONFIG, slots=12, context=128, bank=4, prefill_chunk=16, decode_steps=4, stop_ids=(3,), seed=7,
                  text_of=text, rows=(8, 16))  # fmt: skip


@pytest.fixture
def engine(shared_engine, params):
    shared_engine.publish(publish(CONFIG, params), 0)
    yield shared_engine
    while shared_engine.busy:
        shared_engine.advance()
    for slot in range(12):
        shared_engine.release(slot)
    shared_engine.publish(publish(CONFIG, params), 0)
    assert shared_engine.free_pages == 12 * 4, "a page was lost or freed twice"


def ask(slot, ids, *key, fresh=True, max_tokens=12, temperature=1.0, **more):
    return SampleRequest(slot=slot, key=key or (slot,), ids=tuple(ids), fresh=fresh, max_tokens=max_tokens,
                         temperature=temperature, **more)  # fmt: skip


def finish(engine):
    samples = {}
    while engine.busy:
        samples |= {sample.slot: sample for sample in engine.advance()}
    return samples


def play(engine, *requests):
    for request in requests:
        engine.submit(request)
    return finish(engine)


@jax.jit
def _logits(params, row):
    positions = jnp.arange(row.shape[1], dtype=jnp.int32)[None]
    h = llama.hidden(CONFIG, params, row, positions, jnp.full_like(row, row.shape[1]))
    return h[0] @ llama.unembedding(CONFIG, params).T


def logits(params, tokens):
    return _logits(params, jnp.asarray([[*tokens, *[0] * (128 - len(tokens))]], jnp.int32))


def test_a_slot_has_the_same_bits_in_a_batch_of_another_size(engine):
    many = play(engine, *(ask(q, PROMPT[q:], max_tokens=12 + q) for q in range(12)))
    assert set(engine.cache_sizes()) == {"prefill", "copy_pages", "decode_8", "decode_16"}, "both sizes agree"
    for q in (0, 7, 11):
        alone = play(engine, ask(q, PROMPT[q:], max_tokens=12 + q))[q]
        assert alone == many[q]


def test_a_slot_has_the_same_bits_in_bf16(params):
    config = replace(CONFIG, compute_dtype="bfloat16")
    engine = Engine(config, slots=12, context=64, bank=4, prefill_chunk=16, decode_steps=4, stop_ids=(), seed=7,
                    rows=(8, 16))  # fmt: skip
    engine.publish(publish(config, params), 0)
    many = play(engine, *(ask(q, PROMPT[:9], max_tokens=5) for q in range(12)))
    assert play(engine, ask(11, PROMPT[:9], max_tokens=5))[11] == many[11]


def test_eight_members_hold_and_compute_a_prompt_once(engine):
    free, before = engine.free_pages, engine.counters.prefilled
    for q in range(8):
        engine.submit(ask(q, PROMPT, 1, q, max_tokens=5, share_with=0 if q else None))
    together = finish(engine)
    assert engine.counters.prefilled - before == len(PROMPT) - 1
    assert free - engine.free_pages == 2 + 8, "two full pages for all, one of its own for each"
    for q in (0, 5):
        alone = play(engine, ask(11, PROMPT, 1, q, max_tokens=5))[11]
        assert (alone.ids, alone.logprobs) == (together[q].ids, together[q].logprobs)


def test_a_fork_goes_on_from_what_it_shares_and_disturbs_nobody(engine):
    first = play(engine, ask(0, PROMPT, max_tokens=6))[0]
    assert first.stop == "length"
    forked = play(engine, ask(1, [9, 8], 5, fork_from=0), ask(2, [9, 8], 5, fork_from=0))
    assert (forked[1].ids, forked[1].logprobs) == (forked[2].ids, forked[2].logprobs)
    itself = play(engine, ask(0, [9, 8], 5, fresh=False))[0]
    assert (itself.ids, itself.logprobs) == (forked[1].ids, forked[1].logprobs)


def test_p56_a_prompt_is_taken_up_again_but_never_from_another_version(engine, params):
    cold = play(engine, ask(0, PROMPT))[0]
    before = engine.counters.prefilled
    warm = play(engine, ask(5, PROMPT, 0))[5]
    assert engine.counters.prefilled - before == len(PROMPT) - 1 - 2 * PAGE
    assert (warm.ids, warm.logprobs) == (cold.ids, cold.logprobs)
    other = publish(CONFIG, jax.tree.map(lambda x: x * 1.3, params))
    engine.publish(other, 1)
    before = engine.counters.prefilled
    updated = play(engine, ask(0, PROMPT))[0]
    assert engine.counters.prefilled - before == len(PROMPT) - 1
    fresh = Engine(CONFIG, slots=12, context=128, bank=4, prefill_chunk=16, decode_steps=4, stop_ids=(3,), seed=7,
                   rows=(16,))  # fmt: skip
    fresh.publish(other, 1)
    assert play(fresh, ask(0, PROMPT))[0] == updated


def test_p56_pages_outlive_a_version_where_that_is_asked_for(params):
    keeping = Engine(CONFIG, slots=12, context=128, bank=4, prefill_chunk=16, decode_steps=4, stop_ids=(3,), seed=7,
                     rows=(8,), keep_across_versions=True)  # fmt: skip
    keeping.publish(publish(CONFIG, params), 0)
    play(keeping, ask(0, PROMPT))
    keeping.publish(publish(CONFIG, params), 1)
    before = keeping.counters.prefilled
    play(keeping, ask(1, PROMPT))
    assert keeping.counters.prefilled - before == len(PROMPT) - 1 - 2 * PAGE


def test_p56_a_running_turn_keeps_its_tokens_and_names_the_new_version(engine, params):
    other = jax.tree.map(lambda x: x * 1.3, params)
    engine.submit(ask(0, PROMPT, 77, max_tokens=12, temperature=0.2))
    assert engine.advance() == []
    engine.publish(publish(CONFIG, other), 1)
    sample = finish(engine)[0]
    alone = play(engine, ask(0, PROMPT, 77, max_tokens=12, temperature=0.2))[0]
    assert sample.versions[:4] == (0,) * 4 and set(sample.versions[4:]) == {1} and len(sample.ids) > 4
    table = jax.nn.log_softmax(logits(params, [*PROMPT, *sample.ids]) / 0.2)
    for n in range(4):
        expected = table[len(PROMPT) + n - 1, sample.ids[n]]
        assert sample.logprobs[n] == pytest.approx(float(expected), abs=1e-4)
    assert alone.versions == (1,) * len(alone.ids)


def test_cuts_are_recorded_and_reproduce_the_behaviour_logprobs(engine, params):
    settings = [{"top_k": 5}, {"top_p": 0.6, "temperature": 0.7}, {"min_p": 0.3}, {}]
    samples = play(engine, *(ask(q, PROMPT, q, **setting) for q, setting in enumerate(settings)))
    assert samples[3].kept is None
    for q, setting in enumerate(settings):
        sample, temperature = samples[q], setting.get("temperature", 1.0)
        table = logits(params, [*PROMPT, *sample.ids])[len(PROMPT) - 1 : len(PROMPT) + len(sample.ids) - 1]
        tokens, t = jnp.asarray(sample.ids), jnp.full(len(sample.ids), temperature, jnp.float32)
        raw = jnp.take_along_axis(jax.nn.log_softmax(table), tokens[:, None], 1)[:, 0]
        np.testing.assert_allclose(sample.raw_logprobs, raw, atol=1e-4)
        if sample.kept is None:
            assert sample.raw_logprobs == sample.logprobs
            continue
        bits = jnp.asarray(np.stack([np.frombuffer(kept_bits(kept), "<u4") for kept in sample.kept]))
        np.testing.assert_allclose(sample.logprobs, kept_logprobs(table, tokens, t, bits), atol=1e-4)
        assert all(token in kept_ids(kept) for token, kept in zip(sample.ids, sample.kept, strict=True))
    assert all(len(kept_ids(kept)) == 5 for kept in samples[0].kept)


def test_a_stop_string_ends_the_turn_and_what_was_drawn_past_it_leaves_no_trace(engine):
    plain = play(engine, ask(0, PROMPT, 4, max_tokens=11))[0]
    string = text(plain.ids[4:6])[1:-1]  # it spans two tokens, the second of a dispatch and the third
    cut = play(engine, ask(0, PROMPT, 4, max_tokens=11, stop_strings=("never", string)))[0]
    assert (cut.stop, cut.ids) == ("stop", plain.ids[:6])
    assert len(cut.logprobs) == len(cut.raw_logprobs) == len(cut.versions) == 6
    went_on = play(engine, ask(0, [9], 6, fresh=False))[0]
    rebuilt = play(engine, ask(1, [*PROMPT, *cut.ids, 9], 6))[1]
    assert went_on.ids == rebuilt.ids
    np.testing.assert_allclose(went_on.logprobs, rebuilt.logprobs, atol=1e-5)


def test_a_request_has_stop_ids_of_its_own(engine):
    plain = play(engine, ask(0, PROMPT, 4, max_tokens=11))[0]
    stop = plain.ids[5]
    short = plain.ids[: plain.ids.index(stop) + 1]
    for stop_ids in ((stop,), (*range(100, 120), stop)):  # more than the device looks at
        samples = play(engine, ask(0, PROMPT, 4, max_tokens=11, stop_ids=stop_ids), ask(1, PROMPT, 4, max_tokens=11))
        assert (samples[0].stop, samples[0].ids) == ("stop", short)
        assert samples[1].ids == plain.ids


def test_a_cancelled_turn_leaves_its_pages_to_the_next(engine):
    engine.submit(ask(0, PROMPT, 4, max_tokens=40))
    engine.submit(ask(1, PROMPT, 4, max_tokens=6))
    engine.advance()
    assert engine.peek(0).ids == engine.peek(1).ids[: len(engine.peek(0).ids)] != ()
    engine.cancel(0)
    assert 0 not in finish(engine)
    engine.submit(ask(0, PROMPT, max_tokens=3))
    engine.submit(ask(1, PROMPT, 1, max_tokens=3, share_with=0))
    engine.cancel(0)
    assert len(finish(engine)[1].ids) >= 1, "the follower computes the prompt itself"


@pytest.mark.parametrize("bad, words", [
    ({"temperature": -1.0}, "temperature=-1.0"), ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_k": -1}, "top_k=-1"), ({"top_p": 0.0}, "top_p=0.0"), ({"min_p": 1.5}, "min_p=1.5"),
    ({"ids": [61]}, "0..60"), ({"ids": [-1]}, "0..60"), ({"stop_strings": ("",)}, "stop_strings"),
])  # fmt: skip
def test_a_request_that_cannot_be_served_fails_alone(engine, bad, words):
    engine.submit(ask(0, **{"ids": PROMPT, **bad}))
    engine.submit(ask(1, PROMPT, max_tokens=2))
    samples = finish(engine)
    assert samples[0].stop == "error" and words in samples[0].message and "\n" not in samples[0].message
    assert samples[0].ids == () and len(samples[1].ids) >= 1 and samples[1].message == ""


def test_a_pool_that_runs_dry_ends_one_turn_and_serves_the_others(params):
    engine = Engine(
        CONFIG, slots=3, context=128, bank=4, prefill_chunk=16, decode_steps=4, stop_ids=(), seed=7, pages=5
    )
    engine.publish(publish(CONFIG, params), 0)
    samples = play(engine, ask(0, PROMPT, max_tokens=4), ask(1, PROMPT[1:], max_tokens=4), ask(2, [7], max_tokens=4))
    stops = {q: sample.stop for q, sample in samples.items()}
    assert stops == {0: "length", 1: "error", 2: "length"} and "raise pages" in samples[1].message
    assert play(engine, ask(1, PROMPT[:40], max_tokens=4))[1].stop == "length"


@pytest.mark.parametrize("more, words", [
    ({"fork_from": 3}, "fork_from=3"), ({"fork_from": 0}, "fork_from=0"), ({"fork_from": 99}, "fork_from=99"),
    ({"fork_from": 3, "fresh": False}, "fresh context"),
])  # fmt: skip
def test_a_fork_of_nothing_is_named(engine, more, words):
    with pytest.raises(ValueError, match=words):
        engine.submit(ask(0, [5], **more))


def test_nothing_is_compiled_again_over_200_random_requests(engine, params):
    rng = np.random.default_rng(3)
    sent, idle = 0, set(range(12))
    with jax.transfer_guard("disallow"):
        while sent < 200 or engine.busy:
            for q in [q for q in sorted(idle) if sent < 200 and rng.random() < 0.6]:
                ids = rng.integers(4, 61, size=rng.integers(1, 90)).tolist()
                engine.submit(ask(
                    q, ids, sent, max_tokens=int(rng.integers(1, 30)), temperature=float(rng.choice([0, 0.5, 1.0])),
                    top_k=int(rng.integers(0, 9)), top_p=float(rng.choice([0.8, 1.0])), fresh=bool(rng.random() < 0.8)
                    or not sent, stop_ids=tuple(rng.integers(4, 61, size=rng.integers(0, 3)).tolist()),
                ) if sent >= 12 else ask(q, ids, sent))  # fmt: skip
                idle.discard(q)
                sent += 1
            idle |= {sample.slot for sample in engine.advance()}
            if rng.random() < 0.05:
                engine.publish(publish(CONFIG, params), engine.version + 1)
    assert max(engine.cache_sizes().values()) == 1 == engine.cache_sizes()["decode_16"]
