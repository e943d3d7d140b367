"""Turns that a client holds to a form, through the official client, a real socket and the real llguidance."""

import json

import openai
import pytest

from agentrl_jax.recipes.serve import EngineSize, open_service
from agentrl_jax.runtime.serve.server import beside

pytest.importorskip(
    "llguidance", reason="constrained sampling needs llguidance: pip install 'agentrl-jax[constrained]'"
)

SHADE = {"type": "string", "enum": ["red", "blue"]}
SCHEMA = {
    "type": "object", "properties": {"shade": SHADE, "sure": {"type": "boolean"}}, "required": ["shade", "sure"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": {
        "type": "object", "properties": {"shade": SHADE}, "required": ["shade"]}}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(served, replace):
    longer = replace(served, model=replace(served.model, context=512))
    size = EngineSize(slots=2, context=512, bank=2, prefill_chunk=64, decode_steps=4, constrained=True)
    with (
        beside(open_service(longer, size)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def ask(client, **more):
    options = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "max_tokens": 100, **more}
    return client.chat.completions.create(**options)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_json_of_the_schema(client, seed):
    reply = ask(client, response_format=FORMAT, seed=seed).choices[0]
    found = json.loads(reply.message.content)
    assert reply.finish_reason == "stop" and set(found) == {"shade", "sure"}
    assert found["shade"] in ("red", "blue") and isinstance(found["sure"], bool)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"paint", "wait"}), ({"type": "function", "function": {"name": "paint"}}, {"paint"})],
)
def test_a_required_call_is_made_with_arguments_of_its_schema(client, choice, names):
    for seed in range(3):
        reply = ask(client, tools=TOOLS, tool_choice=choice, seed=seed).choices[0]
        (call,) = reply.message.tool_calls
        assert reply.finish_reason == "tool_calls" and call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert arguments.get("shade") in ("red", "blue") if call.function.name == "paint" else arguments == {}


def test_a_stream_is_held_too_and_neighbours_are_not(client):
    stream = ask(client, response_format=FORMAT, seed=1, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == ask(client, response_format=FORMAT, seed=1).choices[0].message.content
    assert ask(client, seed=1).choices[0].message.content != text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "leave one of the two out"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "poem"}}}}, "grammar"),
    ],
)
def test_a_form_that_means_nothing_is_refused(client, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        ask(client, **options)
