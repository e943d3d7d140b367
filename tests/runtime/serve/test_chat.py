"""The voice of a policy that speaks through a chat template."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl_jax.protocol import Message, Tool
from agentrl_jax.rollout.calls import CALL_FORMATS, JSON, LLAMA, QWEN
from agentrl_jax.rollout.families import FAMILIES, own_calls
from agentrl_jax.rollout.template_renderer import TemplateRenderer
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.fields import Refusal

sys.path.insert(0, str(Path(__file__).parents[2] / "rollout"))
from small_tokenizers import family

USER = {"role": "user", "content": "look at this"}
TOLD = {"role": "tool", "content": "12"}


def voice(name: str) -> Chat:
    renderer = TemplateRenderer(family(name), FAMILIES[name], LLAMA)
    return Chat(renderer=renderer, vocab_size=renderer.vocab_size)


def test_a_conversation_that_the_template_refuses_is_refused_in_its_words():
    chat = voice("gemma3")
    with pytest.raises(Refusal, match="messages: the chat template refuses: roles must take turns") as caught:
        chat.prompt({"messages": [{"role": "assistant", "content": "so"}, USER]})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "messages", "invalid_value")


def test_a_first_message_of_token_ids_is_refused_where_the_template_needs_another():
    with pytest.raises(Refusal, match="messages: the chat template refuses"):
        voice("gemma3").prompt({"messages": [{"role": "assistant", "token_ids": [5]}, USER]})


def test_a_turn_that_ended_in_a_call_is_not_closed_again():
    """Some Llama models end a call with a token of its own, which training takes for the end of the turn, too."""
    chat, tokenizer = voice("llama3"), family("llama3")
    call = chat.renderer.encode("and so")
    cut, ends = (
        chat.prompt({"messages": [USER, {"role": "assistant", "token_ids": [*call, *end]}, TOLD]}).ids
        for end in ((), (tokenizer.token_to_id("<|eom_id|>"),))
    )
    stop = tokenizer.token_to_id("<|eot_id|>")
    assert ends.count(stop) == cut.count(stop) - 1
    at = ends.index(tokenizer.token_to_id("<|eom_id|>"))
    assert ends[at + 1] == tokenizer.token_to_id("<|start_header_id|>")


def test_calls_of_the_past_are_the_turn_that_makes_them():
    """A client that sends no token ids back: tags are tokens, as in the template's own words, and content is text."""
    renderer = TemplateRenderer(family("qwen3"), FAMILIES["qwen3"], QWEN)
    chat, encode = Chat(renderer=renderer, vocab_size=renderer.vocab_size), family("qwen3").encode
    calls = [{"function": {"name": "look", "arguments": '{"n": 1}'}}, {"function": {"name": "look"}}]
    said = {"role": "assistant", "content": "so", "tool_calls": calls}
    first, second = '{"name": "look", "arguments": {"n": 1}}', '{"name": "look", "arguments": {}}'
    text = f"<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call><|im_end|>\n<|im_start|>user\n"
    ids = chat.prompt({"messages": [USER, said, TOLD]}).ids
    expected = (*chat.prompt({"messages": [USER]}).ids, *encode("so\n" + text).ids)
    assert ids[: len(expected)] == expected
    forged = chat.prompt({"messages": [USER, said | {"content": "<tool_call>"}, TOLD]}).ids
    assert forged.count(renderer.vocabulary.controls["<tool_call>"]) == 2


LOOK = {"type": "function", "function": {"name": "look", "description": "look at this", "parameters": {
    "type": "object", "properties": {}}}}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3"])
def test_tools_are_told_as_the_template_tells_them_where_it_asks_for_the_calls_that_are_read(name):
    calls = CALL_FORMATS[own_calls(FAMILIES[name])]
    renderer = TemplateRenderer(family(name), FAMILIES[name], calls)
    tool = Tool(name="look", description="look at this", parameters=LOOK["function"]["parameters"])
    told = TemplateRenderer(family(name), FAMILIES[name], calls, [tool], show_tools=True)
    first = [{"role": "system", "content": "you are helpful"}, USER]
    prompt = Chat(renderer=renderer, vocab_size=renderer.vocab_size).prompt({"messages": first, "tools": [LOOK]})
    assert prompt.ids == told.start([Message(**m) for m in first]).ids and list(prompt.tools) == ["look"]
    other = JSON if name == "llama3" else LLAMA
    renderer = TemplateRenderer(family(name), FAMILIES[name], other)
    prompt = Chat(renderer=renderer, vocab_size=renderer.vocab_size).prompt({"messages": first, "tools": [LOOK]})
    described = Message(role="system", content=f"{other.describe([tool])}\n\nyou are helpful")
    assert prompt.ids == renderer.start([described, Message(**USER)]).ids
