"""The three ways to ask for tokens: each checks a body, queues it, and is a `Reply` that is read whole or in chunks.

`/inference/v1/generate` follows vLLM's `GenerateRequest` and `GenerateResponse` (vllm/entrypoints/serve/disagg/
protocol.py, also in Prime Intellect's `renderers.client`, through which verifiers and prime-rl speak to a policy):

    {"model", "token_ids", "sampling_params": {max_tokens, temperature, seed, n, stop, stop_token_ids, logprobs},
     "request_id", "stream"}
    -> {"request_id", "model", "created", "choices": [{"index", "token_ids", "finish_reason", "logprobs":
        {"content": [{"token": "token_id:123", "logprob", "bytes": null, "top_logprobs": []}]},
        "policy_versions"}], "usage", "prompt_logprobs": null, "kv_transfer_params": null}

`policy_versions` is ours: the version of the params that sampled each token. Without `max_tokens` a turn may fill the
context, and log-probs always come; in vLLM they come with `logprobs` 0 or 1, which is accepted here too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl_jax.protocol import Tool
from agentrl_jax.runtime.serve.answers import Answer, Json
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.fields import Body, Refusal, refuse, token_ids
from agentrl_jax.runtime.serve.held import grammar_of
from agentrl_jax.runtime.serve.service import Service, Turns
from agentrl_jax.runtime.serve.settings import read_settings
from agentrl_jax.runtime.serve.text import Delta


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A queued request of one form. A subclass says what a whole choice and a chunk of it look like."""

    turns: Turns
    answer: Answer
    chunk_kind: str

    @property
    def stream(self) -> bool:
        return self.answer.settings.stream

    async def whole(self) -> Json:
        deltas = await self.turns.whole()
        choices = [self.choice(index, delta) for index, delta in enumerate(deltas)]
        return self.finished(self.answer.whole(choices, [len(delta.ids) for delta in deltas]))

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """A chunk a delta that shows something; then the usage, where it was asked for."""
        count = 0
        for first in self.opening():
            yield first
        async for index, delta in self.turns.deltas():
            count += len(delta.ids)
            for choice in self.parts(index, delta):
                yield self.answer.chunk([choice], kind=self.chunk_kind)
        if self.answer.settings.include_usage:
            yield self.answer.chunk([], kind=self.chunk_kind, usage=self.answer.usage(count))

    def opening(self) -> Sequence[Json]:
        return ()

    def finished(self, body: Json) -> Json:
        return body

    def choice(self, index: int, delta: Delta) -> Json:
        raise AssertionError("a form of reply says this")

    def parts(self, index: int, delta: Delta) -> Sequence[Json]:
        raise AssertionError("a form of reply says this")

    def shows(self, delta: Delta) -> bool:
        """Whether a chunk of this delta would tell the client anything."""
        settings = self.answer.settings
        return bool(delta.text or delta.finish or (delta.ids and (settings.logprobs or settings.return_token_ids)))


@dataclass(frozen=True, kw_only=True)
class ChatReply(Reply):
    """`chat.completion`. With tools the text is sent once the turn is over: only then is it known whether it calls."""

    voice: Chat
    tools: Mapping[str, Tool]

    def choice(self, index: int, delta: Delta) -> Json:
        message = self.voice.message(delta.ids, delta.text, self.tools)
        if self.answer.settings.return_token_ids:
            message["token_ids"] = list(delta.ids)
        return {
            "index": index, "message": message, "finish_reason": _finish(delta, message),
            "logprobs": self.answer.chat_logprobs(delta), **self.answer.tokens(delta),
        }  # fmt: skip

    def finished(self, body: Json) -> Json:
        return {**body, **self._prompt()}

    def opening(self) -> Sequence[Json]:
        roles = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
            for i in range(self.answer.settings.n)
        ]
        return [self.answer.chunk(roles, kind=self.chunk_kind, **self._prompt())]

    def parts(self, index: int, delta: Delta) -> Sequence[Json]:
        if not self.shows(delta):
            return ()
        message: Json = {"content": delta.text} if delta.text else {}
        if self.tools and delta.finish:
            message = self.voice.message(delta.ids, delta.text, self.tools)
            del message["role"]
            for place, call in enumerate(message.get("tool_calls", ())):
                call["index"] = place
        return [{
            "index": index, "delta": message, "finish_reason": _finish(delta, message) if delta.finish else None,
            "logprobs": self.answer.chat_logprobs(delta), **self.answer.tokens(delta),
        }]  # fmt: skip

    def _prompt(self) -> Json:
        return {"prompt_token_ids": list(self.answer.prompt)} if self.answer.settings.return_token_ids else {}


@dataclass(frozen=True, kw_only=True)
class CompletionReply(Reply):
    """`text_completion`."""

    def choice(self, index: int, delta: Delta) -> Json:
        prompt = {"prompt_token_ids": list(self.answer.prompt)} if self.answer.settings.return_token_ids else {}
        return {**self._part(index, delta), **prompt}

    def parts(self, index: int, delta: Delta) -> Sequence[Json]:
        return [self._part(index, delta)] if self.shows(delta) else ()

    def _part(self, index: int, delta: Delta) -> Json:
        return {
            "index": index, "text": delta.text, "finish_reason": delta.finish,
            "logprobs": self.answer.completion_logprobs(delta), **self.answer.tokens(delta),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerateReply(Reply):
    """vLLM's `GenerateResponse`."""

    def finished(self, body: Json) -> Json:
        kept = {name: value for name, value in body.items() if name not in ("id", "object")}
        return {"request_id": self.answer.request_id, **kept, "prompt_logprobs": None, "kv_transfer_params": None}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        async for chunk in super().chunks():
            yield {"request_id": self.answer.request_id, "choices": chunk["choices"], "usage": chunk.get("usage")}

    def choice(self, index: int, delta: Delta) -> Json:
        content = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(delta.ids, delta.logprobs, strict=True)
        ]
        return {"index": index, "finish_reason": delta.finish, "logprobs": {"content": content},
                "token_ids": list(delta.ids), "policy_versions": list(delta.versions)}  # fmt: skip

    def parts(self, index: int, delta: Delta) -> Sequence[Json]:
        return [self.choice(index, delta)] if self.shows(delta) else ()


def chat(service: Service, body: Body) -> ChatReply:
    """`POST /v1/chat/completions`."""
    sampled = {name: value for name, value in body.items() if name != "response_format"}
    settings = read_settings(sampled, context=service.pump.context, vocab_size=service.chat.vocab_size)
    prompt = service.chat.prompt(body)
    grammar = grammar_of(body, service.chat, prompt.tools)
    if grammar is not None:
        service.check_grammar(grammar)
    service.check_length(prompt.ids, "messages")
    turns = service.begin(prompt.ids, settings, live=settings.stream and not prompt.tools, grammar=grammar)
    answer = Answer(
        kind="chat.completion", prefix="chatcmpl", model=service.name, settings=settings, prompt=prompt.ids,
        token=service.chat.token,
    )  # fmt: skip
    return ChatReply(
        turns=turns, answer=answer, chunk_kind="chat.completion.chunk", voice=service.chat, tools=prompt.tools
    )


def completions(service: Service, body: Body) -> CompletionReply:
    """`POST /v1/completions`."""
    settings = read_settings(body, context=service.pump.context, vocab_size=service.chat.vocab_size, default_max=16)
    prompt = _prompt(service, body.get("prompt"))
    service.check_length(prompt, "prompt")
    answer = Answer(kind="text_completion", prefix="cmpl", model=service.name, settings=settings, prompt=prompt,
                    token=service.chat.token)  # fmt: skip
    turns = service.begin(prompt, settings, live=settings.stream)
    return CompletionReply(turns=turns, answer=answer, chunk_kind="text_completion")


def generate(service: Service, body: Body) -> GenerateReply:
    """`POST /inference/v1/generate`."""
    if body.get("features") is not None or body.get("content_parts") is not None:
        raise Refusal("features: this policy reads tokens only; leave it out", param="features")
    sampling = body.get("sampling_params")
    if not isinstance(sampling, Mapping):
        raise refuse("sampling_params", sampling, "an object such as {'max_tokens': 64, 'temperature': 1.0}")
    outer = {name: body.get(name) for name in ("stream", "stream_options")}
    settings = read_settings({**sampling, **outer}, context=service.pump.context, vocab_size=service.chat.vocab_size)
    settings = replace(settings, logprobs=True, return_token_ids=True)
    prompt = token_ids(body.get("token_ids"), "token_ids", service.chat.vocab_size)
    service.check_length(prompt, "token_ids")
    answer = Answer(
        kind="generate", prefix="gen", model=service.name, settings=settings, prompt=prompt, token=service.chat.token
    )
    request_id = body.get("request_id")
    if isinstance(request_id, str) and request_id:
        answer = replace(answer, request_id=request_id)
    return GenerateReply(turns=service.begin(prompt, settings, live=False), answer=answer, chunk_kind="generate")


def _prompt(service: Service, value: Any) -> tuple[int, ...]:
    """A text, which is encoded with control tokens switched off, or token ids; as a list of one of them too."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return service.chat.renderer.encode(value)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return token_ids(value, "prompt", service.chat.vocab_size)
    raise refuse("prompt", value, "one text or one list of token ids")


def _finish(delta: Delta, message: Mapping[str, Any]) -> str | None:
    return "tool_calls" if message.get("tool_calls") and delta.finish == "stop" else delta.finish
