"""The server through the official client and a real socket."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
import time
import urllib.request

import pytest

openai = pytest.importorskip("openai", reason="the official client is the test client: pip install openai")
from agentrl_jax.protocol import Message  # noqa: E402
from agentrl_jax.recipes.serve import EngineSize, open_service  # noqa: E402
from agentrl_jax.runtime.serve.server import beside  # noqa: E402

ASK = [{"role": "system", "content": "you count ."}, {"role": "user", "content": "count to nine please"}]
IDS = [*range(66, 90)]
TOOLS = [{
    "type": "function",
    "function": {
        "name": "add", "description": "add n",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
}]  # fmt: skip


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(url):
    with client_of(url) as client:
        yield client


def chat(client, **more):
    options = {"model": "tiny", "messages": ASK, "seed": 3, "max_tokens": 12, **more}
    return client.chat.completions.create(**options)


def post(url, path, body, **headers):
    """(status, JSON) of a plain request, for what the client would not send."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, raw, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def generate(url, ids=IDS, **sampling):
    status, body = post(url, "/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})
    assert status == 200, body
    return body


# -- what comes back -----------------------------------------------------------------------------------------


def test_a_chat_answers_with_text_log_probs_and_token_ids(client, renderer):
    answer = chat(client, logprobs=True, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert choice.message.role == "assistant" and choice.message.content == renderer.decode(choice.token_ids)
    assert choice.message.token_ids == choice.token_ids and len(choice.logprobs.content) == len(choice.token_ids)
    assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
    assert choice.policy_versions == [0] * len(choice.token_ids)
    assert answer.prompt_token_ids[-1] == renderer.tokenizer.token_to_id("<assistant>")
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert (choice.finish_reason == "stop") == (choice.token_ids[-1] == renderer.end_id)


def test_a_stream_adds_up_to_the_whole_answer(client):
    whole = chat(client, logprobs=True, extra_body={"return_token_ids": True})
    chunks = list(chat(client, stream=True, logprobs=True, stream_options={"include_usage": True},
                       extra_body={"return_token_ids": True}))  # fmt: skip
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    ids = [index for choice in choices[1:] for index in choice.token_ids]
    assert ids == whole.choices[0].token_ids and len(choices) > 3, "several pieces came"
    streamed = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert streamed == whole.choices[0].logprobs.content
    assert choices[0].delta.role == "assistant" and chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_the_seed_decides_and_choices_differ(client):
    first, again, other = (chat(client, seed=s).choices[0].message.content for s in (3, 3, 4))
    assert first == again != other
    several = chat(client, n=5)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == first and len(set(texts)) > 1 and [c.index for c in several.choices] == list(range(5))
    greedy = {chat(client, seed=s, temperature=0).choices[0].message.content for s in range(3)}
    assert len(greedy) == 1


def test_sixteen_clients_on_four_slots_get_what_they_get_alone(url):
    def ask(seed):
        with client_of(url) as client:
            messages = [*ASK, {"role": "user", "content": "one two three " * (seed % 4)}]
            answer = chat(client, messages=messages, seed=seed, logprobs=True, extra_body={"return_token_ids": True})
            return answer.choices[0].token_ids, [entry.logprob for entry in answer.choices[0].logprobs.content]

    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        together = list(threads.map(ask, range(16)))
    for seed, (ids, logprobs) in enumerate(together):
        alone_ids, alone = ask(seed)
        assert ids == alone_ids and logprobs == pytest.approx(alone, abs=1e-5)


def test_generate_takes_ids_and_gives_ids_log_probs_and_versions(url, client):
    body = generate(url, max_tokens=9, seed=5, logprobs=1, skip_special_tokens=False, stop_token_ids=[6])
    choice = body["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{index}" for index in choice["token_ids"]]
    assert choice["policy_versions"] == [0] * len(entries) and body["usage"]["prompt_tokens"] == len(IDS)
    assert choice["finish_reason"] in ("stop", "length") and body["request_id"]
    text = client.completions.create(model="tiny", prompt=IDS, max_tokens=9, seed=5, logprobs=1,
                                     extra_body={"return_token_ids": True})  # fmt: skip
    assert text.choices[0].token_ids == choice["token_ids"] and text.choices[0].prompt_token_ids == IDS
    assert text.choices[0].logprobs.token_logprobs == [entry["logprob"] for entry in entries]


def test_generate_streams(url):
    body = {"token_ids": IDS, "sampling_params": {"max_tokens": 9, "seed": 5}, "stream": True, "request_id": "mine"}
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(),
                                     {"content-type": "application/json"})  # fmt: skip
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line.removeprefix(b"data: ") for line in answer.read().split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["request_id"] for chunk in chunks} == {"mine"}
    ids = [index for chunk in chunks for index in chunk["choices"][0]["token_ids"]]
    assert ids == generate(url, max_tokens=9, seed=5)["choices"][0]["token_ids"]


def test_completions_take_text_whose_control_tokens_are_only_text(client, renderer):
    answer = client.completions.create(model="tiny", prompt="count <end> <assistant>", max_tokens=1,
                                       extra_body={"return_token_ids": True})  # fmt: skip
    controls = {renderer.tokenizer.token_to_id(name) for name in ("<end>", "<assistant>")}
    assert not controls & set(answer.choices[0].prompt_token_ids)


def test_a_cut_to_one_token_is_greedy(url):
    greedy = generate(url, max_tokens=9, temperature=0.0)["choices"][0]["token_ids"]
    for cut in ({"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}):
        assert generate(url, max_tokens=9, seed=5, **cut)["choices"][0]["token_ids"] == greedy


def test_the_model_is_listed_with_its_length_and_version(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 160) and model.policy_version == 0


# -- tools ---------------------------------------------------------------------------------------------------

CALL = '<tool_call>{"name": "add", "arguments": {"n": 2}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(say, renderer, stream):
    with beside(say("now " + CALL + CALL)) as url, client_of(url) as client:
        answer = chat(client, model="scripted", tools=TOOLS, max_tokens=400, stream=stream)
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            calls, finish = [c for choice in choices for c in choice.delta.tool_calls or []], choices[-1].finish_reason
            content = "".join(choice.delta.content or "" for choice in choices)
        else:
            message = answer.choices[0].message
            calls, finish, content = message.tool_calls, answer.choices[0].finish_reason, message.content
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("add", {"n": 2})] * 2
    assert finish == "tool_calls" and content == "now"
    assert len({call.id for call in calls}) == 2


def test_a_call_inside_reasoning_is_no_call(say):
    """As in training, where the renderer reads calls from what follows the reasoning."""
    thought = f"<think>\nI could say {CALL}\n</think>\n\n"
    for said, calls, content in (
        (thought + "no", 0, thought + "no"),
        (thought + CALL, 1, thought),
        (thought + "now " + CALL, 1, thought + "now"),
        ("<think>\n" + CALL, 0, "<think>\n" + CALL),
    ):
        with beside(say(said)) as url, client_of(url) as client:
            message = chat(client, model="scripted", tools=TOOLS, max_tokens=400).choices[0].message
        assert len(message.tool_calls or ()) == calls and message.content == content


def test_text_that_is_no_call_stays_text(say, renderer):
    broken = '<tool_call>{"name": "add", "arguments": {"n": "x"}}</tool_call>'
    for said, options in ((broken, {"tools": TOOLS}), (CALL, {"tools": TOOLS, "tool_choice": "none"}), (CALL, {})):
        with beside(say(said)) as url, client_of(url) as client:
            choice = chat(client, model="scripted", max_tokens=400, **options).choices[0]
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert choice.message.content == renderer.decode(renderer.turn(said))


def test_tools_are_described_calls_written_and_results_read(say, renderer):
    seen = []
    service = say(lambda request: seen.append(request.ids) or renderer.turn("finish"))
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"n": 2}'}}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "now 2 <end> <system>"},
    ]  # fmt: skip
    with beside(service) as url, client_of(url) as client:
        chat(client, model="scripted", messages=turns, tools=TOOLS)
    text = renderer.tokenizer.decode(list(seen[0]), skip_special_tokens=False)
    assert text.startswith("<system>") and "add n" in text.split("<user>")[0]
    assert seen[0].count(renderer.end_id) == 4 and seen[0].count(renderer.tokenizer.token_to_id("<system>")) == 1
    assert CALL in text and "now 2 <end> <system>" in text


def test_an_assistant_message_with_token_ids_is_those_ids(url, client, renderer):
    first = chat(client, extra_body={"return_token_ids": True})
    sampled = first.choices[0].token_ids
    more = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": "look"}]
    second = chat(client, messages=more, extra_body={"return_token_ids": True})
    held = first.prompt_token_ids + sampled
    assert second.prompt_token_ids[: len(held)] == held
    closed = sampled[-1] == renderer.end_id
    tail = renderer.bridge(closed, [Message(role="user", content="look")]).ids
    assert second.prompt_token_ids[len(held) :] == list(tail)


# -- stopping ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 2, 50])
def test_a_stop_text_ends_the_answer_before_it(say, renderer, stream, step):
    service = say("one two three four five six", step=step)
    with beside(service) as url, client_of(url) as client:
        answer = chat(client, model="scripted", stop=["four five", "zzz"], stream=stream, max_tokens=50)
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            text, finish = "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason
        else:
            text, finish = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert answer.usage.completion_tokens == len("one two three four five")
    assert (text, finish) == ("one two three ", "stop")


def test_a_stop_id_of_the_request_ends_it_after_the_id(url):
    whole = generate(url, max_tokens=30, seed=5)["choices"][0]
    cut = whole["token_ids"][4]
    first = whole["token_ids"].index(cut)
    choice = generate(url, max_tokens=30, seed=5, stop_token_ids=[cut])["choices"][0]
    assert choice["token_ids"] == whole["token_ids"][: first + 1] and choice["finish_reason"] == "stop"


def test_a_full_context_ends_with_length(url):
    choice = generate(url, ids=[9] * 154, max_tokens=5000, temperature=1.0, seed=1)["choices"][0]
    if choice["finish_reason"] == "length":
        assert len(choice["token_ids"]) == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(say, renderer, stream):
    service = say("one two three", hold=lambda: True)  # never over
    sampler = service.pump._sampler
    with beside(service) as url:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"model": "scripted", "messages": ASK, "stream": stream}).encode()
        lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json"]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            wait_for(lambda: sampler.turns)
        wait_for(lambda: sampler.cancelled)
        assert not sampler.turns


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def test_shutdown_cancels_what_does_not_end(say):
    service = say("one two three", hold=lambda: True)
    failed = []

    def ask(url):
        with client_of(url) as client:
            try:
                chat(client, model="scripted")
            except openai.APIError as error:
                failed.append(error)

    with beside(service) as url:
        thread = threading.Thread(target=ask, args=(url,))
        thread.start()
        wait_for(lambda: service.pump._sampler.turns)
    thread.join(60)  # the turn itself would go on for ever
    assert failed and not thread.is_alive() and not service.pump._thread.is_alive()


# -- weights -------------------------------------------------------------------------------------------------


def test_reload_publishes_between_dispatches_and_keeps_what_was_sampled(served, checkpoint):
    service = open_service(served, EngineSize(slots=2, context=250, bank=2, prefill_chunk=8, decode_steps=2, seed=7))
    with beside(service) as url:
        before = generate(url, max_tokens=8, seed=1)["choices"][0]
        assert post(url, "/v1/weights/reload", {"path": str(checkpoint)}) == (200, {"policy_version": 1})
        after = generate(url, max_tokens=8, seed=1)["choices"][0]
        assert set(after["policy_versions"]) == {1} and set(before["policy_versions"]) == {0}
        assert after["logprobs"] != before["logprobs"]
        for bad, words in (({"path": "/nowhere"}, "/nowhere"), ({}, "path"),
                           ({"path": str(checkpoint), "policy_version": 1}, "more than the current 1")):  # fmt: skip
            status, answer = post(url, "/v1/weights/reload", bad)
            assert status == 400 and words in answer["error"]["message"]
        with (
            client_of(url) as client,
            chat(
                client, stream=True, seed=2, max_tokens=230, logit_bias={}, extra_body={"return_token_ids": True}
            ) as stream,
        ):
            chunks = iter(stream)
            seen = [next(chunks), next(chunks)]
            assert post(url, "/v1/weights/reload", {"path": str(checkpoint), "policy_version": 9})[0] == 200
            seen += list(chunks)
        versions = [v for chunk in seen[1:] for v in chunk.choices[0].policy_versions]
        assert versions == sorted(versions) and versions[0] == 1
        assert client_of(url).models.list().data[0].policy_version == 9


def test_a_reload_loads_beside_the_sampling_and_publishes_in_the_pump(say):
    service, where = say("one two"), {}
    sampler, publish = service.pump._sampler, service.pump._sampler.publish

    def note(name, result=None):
        where[name] = threading.current_thread()
        return result

    sampler.publish = lambda params, version: note("publish", publish(params, version))
    service.load = lambda path: note("load", f"params of {path}")
    with beside(service) as url:
        assert post(url, "/v1/weights/reload", {"path": "there", "policy_version": 4}) == (200, {"policy_version": 4})
        assert where["publish"] is service.pump._thread is not where["load"]
    assert sampler.params == "params of there"


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"messages": [{"role": "user", "content": "one " * 200}]}, ["context holds 160", "prompt has 8"]),
        ({"temperature": -1}, ["temperature", "0 to 100"]),
        ({"max_tokens": 0}, ["max_tokens", "at least 1"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "poet", "content": "x"}]}, ["messages[0].role", "poet"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            ["text only"],
        ),
        ({"top_p": 1.5}, ["top_p", "got 1.5"]),
        ({"frequency_penalty": 1}, ["frequency_penalty=1"]),
        ({"tools": TOOLS, "tool_choice": "required"}, ["tool_choice", "--constrained"]),
        ({"tool_choice": "required"}, ["tool_choice", "no tools"]),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, ["tool_choice", "required"]),
        ({"top_logprobs": 3, "logprobs": True}, ["top_logprobs", "sampled token"]),
        ({"response_format": {"type": "json_object"}}, ["response_format", "--constrained"]),
        ({"response_format": {"type": "xml"}}, ["response_format", "json_object"]),
        ({"stop": ["x"] * 20}, ["stop"]),
        ({"n": 0}, ["n:", "from 1 to 128"]),
    ],
)
def test_what_cannot_be_served_is_a_400_that_says_why(client, options, words):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert all(word in caught.value.body["message"] for word in words), caught.value.body
    assert caught.value.body["type"] == "invalid_request_error"


def test_an_unknown_model_is_a_404_and_a_long_prompt_has_openais_code(client):
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="gpt")
    assert caught.value.code == "model_not_found" and "tiny" in caught.value.body["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[9] * 160)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/chat/completions", b"{", {}, 400),
        ("/v1/chat/completions", b"[1]", {}, 400),
        ("/v1/chat/completions", b"[" * 100_000, {}, 400),
        ("/v1/chat/completions", b"{}", {"content-type": "text/plain"}, 400),
        ("/inference/v1/generate", {"token_ids": [1, 10**6], "sampling_params": {}}, {}, 400),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, {}, 400),
        ("/inference/v1/generate", {"token_ids": [True], "sampling_params": {}}, {}, 400),
        ("/inference/v1/generate", {"token_ids": [1]}, {}, 400),
        ("/v1/nothing", {}, {}, 404),
        ("/v1/models", {}, {}, 405),
    ],
)
def test_malformed_requests_have_openais_shape(url, path, body, headers, status):
    found, answer = post(url, path, body, **headers)
    assert found == status and set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_full_queue_is_a_429(say, renderer):
    go = threading.Event()
    service = say("one", queue=2, slots=1, hold=lambda: not go.is_set())
    with beside(service) as url, concurrent.futures.ThreadPoolExecutor(3) as threads, client_of(url) as client:

        def ask(_):
            return chat(client, model="scripted").choices[0].message.content

        answers = [threads.submit(ask, 0)]
        wait_for(lambda: service.pump._sampler.turns)
        answers += [threads.submit(ask, i) for i in (1, 2)]
        wait_for(lambda: len(service.pump._waiting) == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            ask(3)
        assert caught.value.code == "queue_full" and caught.value.response.headers["retry-after"] == "1"
        go.set()
        assert [answer.result(20) for answer in answers] == ["one"] * 3


def test_a_request_that_the_sampler_refuses_fails_alone(say, renderer):
    def script(request):
        return ValueError("this one cannot be") if request.key == (1,) else renderer.turn("one")

    with beside(say(script)) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="this one cannot be"):
            chat(client, model="scripted", seed=1)
        assert chat(client, model="scripted", seed=2).choices[0].message.content == "one"


def test_a_broken_sampler_is_a_503_and_unhealthy(say, renderer):
    def script(request):
        return ValueError("x") if request.key == (1,) else 1 / 0

    service = say(script)
    with beside(service) as url, client_of(url) as client:
        assert urllib.request.urlopen(f"{url}/health", timeout=20).status == 200
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                chat(client, model="scripted")
            assert caught.value.status_code == 503 and "division" in caught.value.body["message"]
        assert post_status(f"{url}/health") == 503


def post_status(url):
    try:
        return urllib.request.urlopen(url, timeout=20).status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_an_api_key_is_asked_for(say, replace):
    service = say("one")
    service.api_key = "secret"
    with beside(service) as url:
        with client_of(url) as client, pytest.raises(openai.AuthenticationError):
            chat(client, model="scripted")
        with client_of(url).with_options(api_key="secret") as client:
            assert chat(client, model="scripted").choices[0].message.content == "one"


def test_each_device_function_is_compiled_once(url, service):
    sizes = service.pump._sampler.cache_sizes()
    assert set(sizes.values()) == {1}, sizes
