"""Turns held to a grammar, with the real llguidance: every call fits its schema, and the learner scores it exactly."""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.kernels.kept import kept_logprobs
from agentrl_jax.models import llama
from agentrl_jax.protocol import Tool
from agentrl_jax.rollout.calls import CALL_FORMATS
from agentrl_jax.rollout.grammar import call_grammar, closed
from agentrl_jax.rollout.sampling import SampleRequest, kept_bits, kept_ids
from agentrl_jax.rollout.vocabulary import Vocabulary
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.grammars import Grammars
from agentrl_jax.runtime.publish import publish

sys.path.append(str(Path(__file__).parents[1] / "rollout"))
from small_tokenizers import family

pytest.importorskip(
    "llguidance", reason="constrained sampling needs llguidance: pip install 'agentrl-jax[constrained]'"
)

ORDER = {"type": "string", "enum": ["A1", "B2", "C3"]}
TOOLS = (
    Tool(name="pay", description="", parameters={
        "type": "object", "properties": {"order": ORDER, "cents": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["order", "cents"],
    }),
    Tool(name="finish", description="", parameters={"type": "object", "properties": {}}),
)  # fmt: skip
BY_NAME = {tool.name: tool for tool in TOOLS}
PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(family("qwen3"))


@pytest.fixture(scope="module")
def config(vocabulary):
    # More rows than tokens, as in padded checkpoints: what stands for no text is never drawn.
    return llama.LlamaConfig(
        vocab_size=vocabulary.size + 9, width=16, layers=1, heads=2, kv_heads=1, head_width=8, mlp_width=32
    )


@pytest.fixture(scope="module")
def params(config):
    return llama.init(config, jax.random.key(0))


@pytest.fixture(scope="module")
def end(vocabulary):
    return vocabulary.controls["<|im_end|>"]


@pytest.fixture(scope="module")
def grammars(vocabulary, config, end):
    return Grammars(vocabulary.tokenizer, vocab_size=config.vocab_size, stop_ids=(end,))


@pytest.fixture(scope="module")
def engine(config, params, grammars, end):
    engine = Engine(config, slots=12, context=160, bank=4, prefill_chunk=16, decode_steps=4, stop_ids=(end,), seed=7,
                    grammars=grammars, rows=(4,))  # fmt: skip
    engine.publish(publish(config, params), 0)
    return engine


def play(engine, *requests):
    for request in requests:
        engine.submit(request)
    found = {}
    while engine.busy:
        found |= {sample.slot: sample for sample in engine.advance()}
    return found


def ask(slot, *key, grammar=None, **more):
    settings = {"max_tokens": 110, "temperature": 1.0, "fresh": True} | more
    return SampleRequest(slot=slot, key=key or (slot,), ids=tuple(PROMPT), grammar=grammar, **settings)


@pytest.mark.parametrize("name", ["qwen", "json", "llama"])
def test_every_turn_is_a_call_that_its_schema_allows(engine, vocabulary, end, name):
    calls = CALL_FORMATS[name]
    grammar = call_grammar(calls, TOOLS, vocabulary.controls)
    samples = play(engine, *(ask(q, q, grammar=grammar, temperature=q % 3 / 2) for q in range(8)))
    names = set()
    for sample in samples.values():
        assert sample.stop == "stop" and sample.ids[-1] == end
        action = calls.parse(vocabulary.decode(sample.ids), BY_NAME)
        assert action.error is None and len(action.calls) == 1
        assert calls.write(action.calls[0]) == action.text, "space and order are those of a teacher's call"
        names.add(action.calls[0].name)
    assert names == {"pay", "finish"}, "an untrained policy makes every kind of call"


@pytest.mark.parametrize("more", [0, 1, 31, -1])
def test_a_mask_has_a_bit_for_every_row_of_the_model(vocabulary, more, end):
    """Rows are often a multiple of 32, as those of Llama 3, Gemma 3 and Qwen; Gemma 3's tokenizer has one id more."""
    larger = Vocabulary(family("qwen3"))
    while larger.tokenizer.get_vocab_size() % 32:
        larger.tokenizer.add_special_tokens([f"<unused{larger.tokenizer.get_vocab_size()}>"])
    rows = larger.tokenizer.get_vocab_size() + more
    matcher = Grammars(larger.tokenizer, vocab_size=rows, stop_ids=(end,)).start('start: "a"')
    assert len(matcher.allowed()) == -(-rows // 32)
    first = np.flatnonzero(np.unpackbits(matcher.allowed().view("u1"), bitorder="little"))
    assert list(first) == list(vocabulary.encode("a"))


def test_the_recorded_masks_give_the_behaviour_logprobs(engine, params, config, vocabulary, end):
    grammar = call_grammar(CALL_FORMATS["qwen"], TOOLS, vocabulary.controls)
    settings = ({}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.1}, {"temperature": 0.0})
    samples = play(engine, *(ask(q, 3, grammar=grammar, **setting) for q, setting in enumerate(settings)))

    @jax.jit
    def forward(tokens):
        positions, ends = jnp.arange(160)[None], jnp.full((1, 160), 160)
        return llama.hidden(config, params, tokens[None], positions, ends)[0] @ llama.unembedding(config, params).T

    for q, setting in enumerate(settings):
        sample, temperature = samples[q], setting.get("temperature", 1.0) or 1.0
        whole = np.pad([*PROMPT, *sample.ids], (0, 160 - len(PROMPT) - len(sample.ids)))
        table = jnp.asarray(forward(whole)[len(PROMPT) - 1 :][: len(sample.ids)])
        bits = jnp.asarray(np.stack([np.frombuffer(kept_bits(kept), "<u4") for kept in sample.kept]))
        tokens, t = jnp.asarray(sample.ids), jnp.full(len(sample.ids), temperature, jnp.float32)
        np.testing.assert_allclose(sample.logprobs, kept_logprobs(table, tokens, t, bits), atol=1e-5)
        raw = jnp.take_along_axis(jax.nn.log_softmax(table), tokens[:, None], 1)[:, 0]
        np.testing.assert_allclose(sample.raw_logprobs, raw, atol=1e-4)
        sets = [kept_ids(kept) for kept in sample.kept]
        assert sets[0] == (vocabulary.controls["<tool_call>"],) and sets[-1] == (end,)
        assert max(map(len, sets)) >= 2 and max(max(found) for found in sets) < vocabulary.size
        forced = [logprob for logprob, found in zip(sample.logprobs, sets, strict=True) if len(found) == 1]
        np.testing.assert_allclose(forced, 0.0, atol=1e-6)


def test_a_turn_is_the_same_whatever_its_neighbours_and_nothing_compiles_again(engine, vocabulary):
    grammar = call_grammar(CALL_FORMATS["qwen"], TOOLS, vocabulary.controls)
    free = {"max_tokens": 20}
    crowd = [ask(q, 5, q, **(free if q % 2 else {"grammar": grammar})) for q in range(12)]
    together = play(engine, *crowd)
    for q in (0, 1, 6):
        alone = play(engine, ask(11 - q, 5, q, **(free if q % 2 else {"grammar": grammar})))[11 - q]
        assert (alone.ids, alone.logprobs, alone.kept) == (together[q].ids, together[q].logprobs, together[q].kept)
    assert together[1].kept is None
    sizes = engine.cache_sizes()
    assert sizes["decode_held_4"] == 1 and set(sizes.values()) <= {0, 1}


def test_what_is_no_grammar_fails_alone_and_in_one_line(engine, vocabulary, config, params, end):
    grammar = call_grammar(CALL_FORMATS["json"], TOOLS, vocabulary.controls)
    wrong = 'start: %json {"type": "string", "not": {}}'
    samples = play(engine, ask(0, grammar=wrong), ask(1, grammar="start: what"), ask(2, grammar=grammar))
    assert "not" in samples[0].message and "what" in samples[1].message and samples[2].stop == "stop"
    for q in (0, 1):
        assert samples[q].stop == "error" and samples[q].message.startswith("grammar: ")
        assert "\n" not in samples[q].message
    plain = Engine(config, slots=12, context=160, bank=4, prefill_chunk=16, decode_steps=4, stop_ids=(end,), seed=7,
                   rows=(4,))  # fmt: skip
    plain.publish(publish(config, params), 0)
    assert play(plain, ask(0, grammar=grammar))[0].message == "grammar needs an engine that was given grammars"
    assert not any("held" in name for name in plain.cache_sizes())


def test_a_closed_schema_refuses_what_it_does_not_name():
    inner = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert closed({"items": inner})["items"]["additionalProperties"] is False
    assert closed({**inner, "additionalProperties": inner})["additionalProperties"]["additionalProperties"] is False
    assert closed({"type": ["object", "null"]})["additionalProperties"] is False
    assert closed({}) == {} and closed({"type": "object"}) == {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(("calls", "tools", "expected"), [("line", TOOLS, "is no JSON"), ("json", (), "has no tools")])
def test_no_grammar_where_there_is_no_json_or_no_tool(calls, tools, expected):
    with pytest.raises(ValueError, match=expected):
        call_grammar(CALL_FORMATS[calls], tools, {})


def test_control_tokens_are_named_by_id_and_never_spelled(vocabulary):
    write = partial(call_grammar, CALL_FORMATS["qwen"], TOOLS)
    assert json.dumps("<tool_call>") in write({}) and "<tool_call>" not in write(vocabulary.controls)
