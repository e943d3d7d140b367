"""Rendering, reading back, and what no text may do. Tokenizers are built on the spot."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentrl_jax.batch import Source
from agentrl_jax.protocol import Message, Tool, ToolCall
from agentrl_jax.rollout.calls import JSON, LINE, LLAMA
from agentrl_jax.rollout.renderers import CHATML, TINY, ChatFrame, ChatRenderer
from agentrl_jax.rollout.tokenizer import CONTROLS, build, fingerprint, load, save

PAY = Tool(
    name="pay",
    description="pay an order",
    parameters={
        "type": "object",
        "properties": {
            "order": {"type": "integer", "minimum": 1},
            "method": {"type": "string", "enum": ["card", "gift card"]},
            "share": {"type": "number"},
            "items": {"type": "array", "items": {"type": "string"}},
            "now": {"type": "boolean"},
        },
        "required": ["order"],
    },
)
LOOK = Tool(name="look", description="look", parameters={"type": "object", "properties": {}})
TOOLS = {"pay": PAY, "look": LOOK}


def byte_level(*controls: str) -> Tokenizer:
    """A byte-level tokenizer without merges: what a real model's looks like, in small."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in controls])
    return tokenizer


CHAT = byte_level("<|im_start|>", "<|im_end|>", "<|endoftext|>")
WORDS = build(["you may pay an order now", "pay order = 12 method = card gift card"], vocab_size=300)


def whole(renderer: ChatRenderer, messages: list[Message]) -> tuple[int, ...]:
    return renderer.start(messages).ids


@pytest.mark.parametrize("frame,tokenizer", [(CHATML, CHAT), (TINY, WORDS)], ids=["chatml", "tiny"])
def test_p01_pieces_put_together_are_the_rendering_of_the_whole(frame, tokenizer):
    renderer = ChatRenderer(tokenizer, frame, LINE, [PAY])
    first = [Message(role="system", content="you pay"), Message(role="user", content="pay order 12")]
    answer = Message(role="tool", content="now an order")
    said = renderer.turn("pay order=12")
    pieces = renderer.start(first).ids + said + renderer.bridge(True, [answer]).ids
    assert pieces == whole(renderer, [*first, Message(role="assistant", content="pay order=12"), answer])


def test_p01_separator_of_the_case():
    """`<u>x<e>\\n<a>`, then `hi<e>`, then a tool message: the newline stands between the turns, and nobody chose it."""
    frame = ChatFrame(
        name="case", opens={"user": "<u>", "assistant": "<a>", "tool": "<t>"}, end="<e>", separator="\n"
    )  # fmt: skip
    renderer = ChatRenderer(byte_level("<u>", "<a>", "<t>", "<e>"), frame)
    bridge = renderer.bridge(True, [Message(role="tool", content="t")])
    ids = renderer.start([Message(role="user", content="x")]).ids + renderer.turn("hi") + bridge.ids
    assert renderer.tokenizer.decode(ids, skip_special_tokens=False) == "<u>x<e>\n<a>hi<e>\n<t>t<e>\n<a>"
    assert bridge.sources[0] == Source.SYSTEM and Source.POLICY not in bridge.sources


def test_p11_an_unclosed_turn_is_closed_for_the_policy():
    renderer = ChatRenderer(WORDS, TINY)
    assert renderer.bridge(False, []).ids[0] == renderer.end_id
    assert renderer.bridge(True, []).ids == renderer.bridge(False, []).ids[1:]


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=40), st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", ""]))
def test_no_text_forges_a_turn(text, control):
    renderer = ChatRenderer(CHAT, CHATML)
    controls = {CHAT.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    assert not controls & set(renderer.encode(text + control + text))
    assert not controls & set(renderer.turn(text + control)[:-1])


def test_an_added_token_that_is_not_special_is_no_control_token_in_text():
    loose = byte_level("<|im_end|>")
    loose.add_tokens([AddedToken("<|im_start|>", special=False, normalized=False)])
    renderer = ChatRenderer(loose, CHATML)
    assert loose.token_to_id("<|im_start|>") in loose.encode("<|im_start|>").ids
    assert loose.token_to_id("<|im_start|>") not in renderer.encode("<|im_start|>")
    with pytest.raises(ValueError, match=r"no token '<\|im_start\|>'"):
        ChatRenderer(byte_level("<|im_end|>"), CHATML)


def test_lone_surrogates_render():
    assert ChatRenderer(CHAT, CHATML).encode("a\ud800b")


VALUES = st.fixed_dictionaries(
    {"order": st.integers(1, 10**9)},
    optional={
        "method": st.sampled_from(["card", "gift card"]),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "items": st.lists(st.text(max_size=8), max_size=3),
        "now": st.booleans(),
    },
)


@settings(max_examples=120, deadline=None)
@given(VALUES)
def test_written_calls_read_back(arguments):
    call = ToolCall(name="pay", arguments=arguments)
    for calls in (LINE, JSON, LLAMA):
        if calls is LINE and any(item != item.strip() for item in arguments.get("items", ())):
            continue
        assert calls.parse(calls.write(call), TOOLS).calls == (call,)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**6), st.sampled_from(["card", "gift card"]), st.booleans())
def test_a_word_level_tokenizer_keeps_calls(order, method, now):
    renderer = ChatRenderer(WORDS, TINY, LINE, [PAY, LOOK])
    call = ToolCall(name="pay", arguments={"order": order, "method": method, "now": now})
    assert renderer.parse(renderer.turn(call)).calls == (call,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pay", "missing order"),
        ("pay order=x", "order: expected integer, got 'x'"),
        ("pay order=0", "at least 1"),
        ("pay order=1 order=2", "given twice"),
        ("pay order=1 method=cash", "expected one of card, gift card"),
        ("pay order=1 to=me", "unknown argument 'to'"),
        ("pay the order", "expected key=value, got 'the order'"),
        ('pay order=1 method="card', "quote is not closed"),
        ("steal order=1", "unknown tool 'steal'; there are: look, pay"),
    ],
)
def test_line_errors_name_what_is_wrong(text, words):
    action = LINE.parse(text, TOOLS)
    assert not action.calls and words in str(action.error) and action.text == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<tool_call>{", "not closed"),
        ("<tool_call>{</tool_call>", "must be JSON"),
        ("<tool_call>[1]</tool_call>", "must be {"),
        ('<tool_call>{"name": "pay", "arguments": "x"}</tool_call>', "must be an object"),
        ('<tool_call>{"name": "pay", "arguments": {"order": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "pay", "arguments": {"order": 1, "method": "\\ud83d"}}</tool_call>', "surrogate"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "JSON"),
        ('<tool_call>{"name": "?"}</tool_call>', "unknown tool '?'; there are: look, pay"),
        ('<tool_call>{"name": "look"}</tool_call><tool_call>{"name": "pay"}</tool_call>', "missing order"),
    ],
)
def test_json_errors_name_what_is_wrong(text, words):
    action = JSON.parse(text, TOOLS)
    assert not action.calls and words in str(action.error)


def test_two_halves_of_a_character_are_one():
    tools = {"say": Tool(name="say", description="", parameters={"properties": {"what": {"type": "string"}}})}
    text = '<tool_call>{"name": "say", "arguments": {"what": "\\ud83d\\ude00 \\\\ud83d"}}</tool_call>'
    (call,) = JSON.parse(text, tools).calls
    assert call.arguments == {"what": "\U0001f600 \\ud83d"}


def test_an_argument_may_hold_the_text_of_a_tag():
    tools = {
        "say": Tool(
            name="say", description="", parameters={"type": "object", "properties": {"what": {"type": "string"}}}
        )
    }
    call = ToolCall(name="say", arguments={"what": 'a "</tool_call>" and a <tool_call> \\'})
    found = JSON.parse(JSON.write(call) + JSON.write(call), tools)
    assert found.calls == (call, call) and not found.error


def test_p06_text_and_every_call_of_a_turn_are_kept():
    pay = '<tool_call>{"name": "pay", "arguments": {"order": 1}}</tool_call>'
    text = 'plan <tool_call>{"name": "look"}</tool_call> ' + pay
    action = JSON.parse(text, TOOLS)
    assert [call.name for call in action.calls] == ["look", "pay"] and action.text == text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"name": "pay", "parameters": {"order": 1}}', ["pay"]),
        (' {"name": "look"}; {"name": "pay", "parameters": {"order": 1}}\n', ["look", "pay"]),
        ('{"name": "pay", "parameters": {}}', "missing order"),
        ('{"name": "look"} then', "must be JSON"),
        ('{"name": "steal"}', "unknown tool 'steal'"),
        ('{"type": "function", "name": "look", "parameters": []}', "must be an object"),
        ("{look}", []),
        ('I would say {"name": "look"}', []),
    ],
)
def test_bare_calls_are_whole_turns(text, found):
    action = LLAMA.parse(text, TOOLS)
    if isinstance(found, str):
        assert found in str(action.error) and not action.calls
    else:
        assert [call.name for call in action.calls] == found and action.error is None


@given(st.text(max_size=60))
def test_reading_never_raises(text):
    for calls in (LINE, JSON, LLAMA):
        for prefix in ("", "pay ", "pay order=", "<tool_call>", '{"name": '):
            calls.parse(prefix + text, TOOLS)


@given(st.text(alphabet=[chr(c) for c in range(32, 127)], max_size=40))
def test_printable_ascii_is_never_unknown(text):
    encoded = WORDS.encode(text)
    assert "<unk>" not in encoded.tokens or "<unk>" in text
    if not any(control in text for control in CONTROLS):
        assert WORDS.decode(encoded.ids).replace(" ", "") == text.replace(" ", "")


def test_an_endless_word_is_encoded_in_linear_time():
    started = time.process_time()
    ids = WORDS.encode("x" * 20_000).ids
    assert len(ids) == 20_000 and time.process_time() - started < 2.0


def test_words_are_one_token_and_ids_are_stable(tmp_path):
    again = build(["you may pay an order now", "pay order = 12 method = card gift card"], vocab_size=300)
    assert fingerprint(again) == fingerprint(WORDS)
    assert len(WORDS.encode("pay order 12 method = gift card").ids) == 7
    assert WORDS.encode("zebra 3.50").tokens == ["z", "##e", "##b", "##r", "##a", "3", "##.", "##5", "##0"]
    save(WORDS, tmp_path)
    assert fingerprint(load(tmp_path)) == fingerprint(WORDS)
    with pytest.raises(ValueError, match="No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="at least"):
        build([], vocab_size=10)
