"""A sampler in another process: the same tokens as the engine here, and failures that are data."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax
import pytest

pytest.importorskip("uvicorn", reason="needs the server's libraries: pip install -e '.[serve]'")
sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))

import fake_suites

from agentrl_jax.errors import UserError
from agentrl_jax.models import llama
from agentrl_jax.protocol import Cause, EnvironmentRef, StopReason, Task
from agentrl_jax.recipes.serve import EngineSize, Served, open_service
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.sampling import SampleRequest
from agentrl_jax.rollout.tokenizer import build
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.external import ExternalSampler, request_seed
from agentrl_jax.runtime.external_dialects import (
    COMPLETIONS,
    GENERATE,
    SGLANG,
    Asked,
    reload_ours,
    reload_sglang,
    reload_vllm,
)
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.server import beside

SIZE = EngineSize(slots=4, context=128, bank=2, prefill_chunk=16, decode_steps=4, seed=7)


@pytest.fixture(scope="module")
def served() -> Served:
    renderer = ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
    config = llama.LlamaConfig(
        vocab_size=renderer.vocab_size, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=64, context=128
    )
    chat = Chat(renderer=renderer, vocab_size=config.vocab_size)
    return Served(name="tiny", model=config, params=llama.init(config, jax.random.key(1)), chat=chat)


@pytest.fixture(scope="module")
def engine(served):
    return open_service(served, SIZE).pump._sampler


@pytest.fixture(scope="module")
def url(served):
    with beside(open_service(served, SIZE)) as url:
        yield url


def external(url, served, **options):
    options = {"slots": 4, "context": 128, "stop_ids": served.chat.renderer.stop_ids, "model": "tiny", **options}
    return ExternalSampler(url, **options)


def ask(slot, ids, *key, fresh=True, max_tokens=10, temperature=1.0):
    return SampleRequest(
        slot=slot, key=key, ids=tuple(ids), fresh=fresh, max_tokens=max_tokens, temperature=temperature
    )


def finish(sampler):
    samples = {}
    while sampler.busy:
        samples |= {sample.slot: sample for sample in sampler.advance()}
    return samples


class Keyed:
    """The engine here, with the keys that the server makes of an external request's seed."""

    def __init__(self, engine) -> None:
        self.engine, self.slots, self.context = engine, engine.slots, engine.context

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def advance(self):
        return self.engine.advance()

    def submit(self, request) -> None:
        names = ("slot", "ids", "fresh", "max_tokens", "temperature", "share_with")
        fields = {name: getattr(request, name) for name in names}
        self.engine.submit(SampleRequest(key=(request_seed(request.key),), **fields))


@pytest.mark.parametrize("dialect", [GENERATE, COMPLETIONS], ids=lambda d: d.name)
def test_the_same_tokens_and_log_probs_as_the_engine_here(served, engine, url, dialect):
    def conversation(sampler):
        found = []
        for turn in range(3):
            for slot in range(4):
                ids = [20 + slot, 30 + turn, 40] * (2 + slot)
                sampler.submit(ask(slot, ids, 5, slot, turn, fresh=turn == 0, temperature=(1.0, 0.7)[slot % 2]))
            found.append(finish(sampler))
        return found

    with external(url, served, dialect=dialect) as sampler:
        there, here = conversation(sampler), conversation(Keyed(engine))
    for far, near in zip(there, here, strict=True):
        for slot in range(4):
            assert (far[slot].ids, far[slot].stop) == (near[slot].ids, near[slot].stop)
            assert far[slot].logprobs == pytest.approx(near[slot].logprobs, abs=1e-5)
            assert set(far[slot].versions) == {0} and far[slot].message == ""


def test_a_rollout_through_it_is_the_rollout_through_the_engine(served, engine, url, tmp_path):
    ref = EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})
    plan = [
        EpisodePlan(group=g, member=m, task=Task(id=f"t{g}", split="train", data={"goal": 5}), seed=9, key=(g, m))
        for g in range(2)
        for m in range(3)
    ]
    runs = []
    with Pool(ref, 4, Deadlines(start=60.0, reset=20.0, step=20.0, verify=20.0)) as pool, external(url, served) as far:
        for sampler in (far, Keyed(engine)):
            found = collect(plan, sampler, pool, served.chat.renderer, max_turn_tokens=8, temperature=1.0)
            runs.append(sorted(found, key=lambda t: (t.group, t.member)))
    assert [t.tokens for t in runs[0]] == [t.tokens for t in runs[1]]
    assert [t.stop for t in runs[0]] == [t.stop for t in runs[1]]
    for one, other in zip(*runs, strict=True):
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-5)
        assert one.policy_versions == other.policy_versions and any(one.action_mask)


def test_publication_exports_and_reloads(served, url, tmp_path):
    tokenizer = served.chat.renderer.tokenizer

    def export(params):
        pretrained.save(tmp_path / "v", served.model, params, tokenizer)
        return tmp_path / "v"

    with beside(open_service(served, SIZE)) as own, external(own, served, export=export) as sampler:
        sampler.submit(ask(0, [20, 21], 1))
        before = finish(sampler)[0]
        sampler.publish(jax.tree.map(lambda x: x * 1.2, served.params), 4)
        sampler.submit(ask(0, [20, 21], 1))
        after = finish(sampler)[0]
        assert set(after.versions) == {4} and sampler.version == 4 and after.logprobs[0] != before.logprobs[0]
        with pytest.raises(UserError, match=r"could not load .*more than the current 4"):
            sampler.publish(served.params, 4)
    with external(url, served) as sampler, pytest.raises(UserError, match="no export="):
        sampler.publish(served.params, 1)


def test_a_full_context_and_bad_requests_are_as_in_the_engine(served, url):
    with external(url, served) as sampler:
        sampler.submit(ask(0, range(8, 136), 1))
        sampler.submit(ask(1, [9] * 124, 2, max_tokens=50))
        samples = finish(sampler)
        assert (samples[0].stop, samples[0].ids) == ("context", ())
        assert samples[0].message == "128 tokens leave no room to sample in context=128"
        assert samples[1].stop in ("context", "stop") and len(samples[1].ids) <= 4
        for bad, words in ((ask(9, [1], 1), "slot=9"), (ask(2, [], 1), "holds nothing"),
                           (ask(2, [1], 1, max_tokens=0), "max_tokens=0")):  # fmt: skip
            with pytest.raises(ValueError, match=words):
                sampler.submit(bad)


# -- servers that fail ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(*answers):
    """A server whose n-th answer is (status, body, headers); the last one goes on. `asked` has the bodies it got."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            status, body, headers = answers[min(len(asked), len(answers)) - 1]
            if status == 0:
                hold.wait(30)
                return
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(raw)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    hold = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


def content(*pairs):
    return {"content": [{"token": f"token_id:{i}", "logprob": logprob} for i, logprob in pairs]}


GOOD = {"choices": [{"token_ids": [5, 6], "logprobs": content((5, -1.0), (6, -2.0)), "finish_reason": "stop"}]}


def answer(served, *answers, **options):
    with answering(*answers) as (url, asked), external(url, served, **options) as sampler:
        sampler.submit(ask(0, [9, 9], 1))
        return finish(sampler)[0], asked, sampler


def test_what_may_pass_is_tried_again_with_the_same_seed(served):
    sample, asked, sampler = answer(served, (503, {}, {}), (429, {}, {"retry-after": "0"}), (200, GOOD, {}))
    assert sample.ids == (5, 6) and sample.versions == (0, 0) and sampler.retries == 2
    assert len(asked) == 3 and asked[0] == asked[1] == asked[2]
    assert asked[0][1]["sampling_params"]["seed"] == request_seed((1,))


def test_a_fork_takes_up_what_the_other_slot_holds(served):
    with answering((200, GOOD, {})) as (url, asked), external(url, served) as sampler:
        for request in (
            ask(0, [20, 21], 1),
            replace(ask(1, [30], 2), fork_from=0),
            ask(0, [31], 3, fresh=False),
            ask(1, [32], 4, fresh=False),
        ):
            sampler.submit(request)
            assert finish(sampler)[request.slot].ids == (5, 6)
        for source, fresh in ((0, False), (2, True), (3, True)):  # no new context, itself, one that holds nothing
            with pytest.raises(ValueError, match=f"fork_from={source}: "):
                sampler.submit(replace(ask(2, [9], 5, fresh=fresh), fork_from=source))
    start = [20, 21, 5, 6]
    read = [body["token_ids"] for _, body in asked]
    assert read == [start[:2], [*start, 30], [*start, 31], [*start, 30, 5, 6, 32]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"choices": [{"logprobs": content((5, -1.0))}]}, "token ids"),
        ({"choices": [{"token_ids": [5]}]}, "--max-logprobs"),
        ({"choices": [{"token_ids": [5, 6], "logprobs": content((5, -1.0))}]}, "2 tokens came with 1"),
        ({"choices": [{"token_ids": [5], "logprobs": content((5, -9999.0))}]}, "--logprobs-mode processed_logprobs"),
        ({"choices": [{"token_ids": [5], "logprobs": content((5, None))}]}, "finite"),
        ({"choices": [{"token_ids": [], "logprobs": content()}]}, "no token"),
        ({"choices": [{"token_ids": [5] * 99, "logprobs": content(*[(5, -1.0)] * 99)}]}, "at most 10"),
        ({"choices": []}, "one choice"),
        ([], "one choice"),
        (b"<html>", "not JSON"),
    ],
)
def test_an_answer_that_cannot_train_is_an_error_that_says_what_to_do(served, body, words):
    sample, asked, _ = answer(served, (200, body, {}))
    assert sample.stop == "error" and words in sample.message and sample.ids == () and len(asked) == 1


def test_completions_without_token_ids_name_the_option(served):
    body = {"choices": [{"text": "x", "logprobs": {"token_logprobs": [-1.0]}}]}
    sample, _, _ = answer(served, (200, body, {}), dialect=COMPLETIONS)
    assert sample.stop == "error" and "return_token_ids" in sample.message


def test_sglangs_native_answer_is_read(served):
    rows = {"output_token_logprobs": [[-0.5, 7, None], [-0.25, 8, None]], "finish_reason": {"type": "length"}}
    sample, asked, _ = answer(served, (200, {"text": "", "meta_info": rows}, {}), dialect=SGLANG)
    assert (sample.ids, sample.logprobs) == ((7, 8), (-0.5, -0.25)) and asked[0][0] == "/generate"
    assert asked[0][1]["input_ids"] == [9, 9] and asked[0][1]["return_logprob"] is True


def test_a_refusal_is_not_tried_again_and_a_dead_server_is_given_up(served):
    sample, asked, _ = answer(served, (400, {"error": "too long"}, {}))
    assert sample.stop == "error" and "HTTP 400" in sample.message and len(asked) == 1
    sample, asked, _ = answer(served, (500, {}, {}), attempts=2)
    assert sample.stop == "error" and "attempt 2" in sample.message and len(asked) == 2
    with external("http://127.0.0.1:9", served, attempts=2) as sampler:
        sampler.submit(ask(0, [9], 1))
        assert "ConnectError" in finish(sampler)[0].message


def test_a_hang_ends_at_the_deadline_and_the_slot_keeps_its_context(served):
    answers = (200, GOOD, {}), (0, {}, {}), (200, GOOD, {})
    with answering(*answers) as (url, asked), external(url, served, deadline_s=2.0) as sampler:
        sampler.submit(ask(0, [9, 9], 1))
        finish(sampler)
        sampler.submit(ask(0, [8], 2, fresh=False))
        hung = finish(sampler)[0]
        sampler.submit(ask(0, [7], 3, fresh=False))
        finish(sampler)
    assert hung.stop == "error" and "no answer within 2 s" in hung.message
    assert [body["token_ids"] for _, body in asked] == [[9, 9], [9, 9, 5, 6, 8], [9, 9, 5, 6, 7]]


def test_closing_gives_up_what_is_in_flight(served):
    with answering((0, {}, {})) as (url, _asked):
        sampler = external(url, served)
        sampler.submit(ask(0, [9, 9], 1))
        sampler.close()
        sampler.close()


def test_an_episode_whose_sampler_fails_leaves_the_batch(served, tmp_path):
    ref = EnvironmentRef(target="fake_suites:counter", options={"scratch": str(tmp_path)})
    plan = [EpisodePlan(group=0, member=0, task=Task(id="t", split="train", data={"goal": 5}), seed=9, key=(0, 0))]
    deadlines = Deadlines(start=60.0, reset=20.0, step=20.0, verify=20.0)
    broken = answering((400, {"error": "out of memory"}, {}))
    with broken as (url, _), Pool(ref, 1, deadlines) as pool, external(url, served) as sampler:
        (lost,) = collect(plan, sampler, pool, served.chat.renderer, max_turn_tokens=8, temperature=1.0)
    assert lost.stop is StopReason.FAILURE and not lost.valid and not any(lost.action_mask)
    assert lost.attribution.cause is Cause.ENVIRONMENT and "out of memory" in lost.attribution.evidence


def test_reload_calls():
    assert list(reload_ours("/d", 3)) == [("/v1/weights/reload", {"path": "/d", "policy_version": 3})]
    assert [path for path, _ in reload_vllm("/d", 3)] == ["/collective_rpc", "/reset_prefix_cache"]
    assert list(reload_sglang("/d", 3)) == [("/update_weights_from_disk", {"model_path": "/d"})]


def test_seeds_fit_and_differ():
    seeds = {request_seed((a, b)) for a in range(50) for b in range(50)}
    assert len(seeds) == 2500 and all(0 <= seed < 2**62 for seed in seeds)
    path, body = GENERATE.ask(Asked(None, (1,), 1, 1.0, max(seeds), ()))
    assert "model" not in body and path == "/inference/v1/generate"


@pytest.mark.parametrize("dialect", [GENERATE, COMPLETIONS, SGLANG], ids=lambda d: d.name)
def test_a_request_asks_for_the_whole_vocabulary_whatever_the_servers_defaults(dialect):
    _, body = dialect.ask(Asked(None, (1,), 1, 1.0, 7, ()))
    said = {**body, **body.get("sampling_params", {})}
    assert (said["top_k"], said["top_p"], said["min_p"], said["repetition_penalty"]) == (-1, 1.0, 0.0, 1.0)


def test_an_address_as_openais_clients_have_it_will_do():
    for given in ("http://127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/"):
        with ExternalSampler(given, slots=1, context=8, stop_ids=(1,)) as sampler:
            assert sampler._server.url == "http://127.0.0.1:9"
