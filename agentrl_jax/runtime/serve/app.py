"""The routes, as an ASGI application.

| route | what it speaks |
| --- | --- |
| `POST /v1/chat/completions` | OpenAI chat: streaming, tools, stop, seed, n, logprobs, `return_token_ids` |
| `POST /v1/completions` | OpenAI completions: a text or token ids |
| `POST /inference/v1/generate` | token ids in, token ids and log-probs out, as vLLM and verifiers speak it |
| `GET /v1/models`, `GET /health` | the one policy with its `max_model_len` and `policy_version`; 200 while it samples |
| `POST /v1/weights/reload` | `{"path": checkpoint, "policy_version": n or absent}` -> `{"policy_version": n}` |

A request's tokens follow from its seed and its ids alone, never from its neighbours. Log-probs are those of the
distribution that was sampled from, temperature included. Where `max_tokens` exceeds what the context still holds, the
turn ends there with `finish_reason` "length". A client that goes away cancels its request. A reload takes effect
between two dispatches: requests in flight keep their tokens, and `policy_versions` has the version of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl_jax.runtime.serve.fields import Refusal, given, integer, refuse
from agentrl_jax.runtime.serve.routes import Reply, chat, completions, generate
from agentrl_jax.runtime.serve.service import Service

LARGEST_BODY = 64 << 20  # bytes
T = TypeVar("T")


def build(service: Service) -> Starlette:
    """The application. The pump of `service` is started and stopped with it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.pump.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.pump.stop)

    def post(ask: Callable[[Service, Mapping[str, Any]], Reply]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = await _body(service, request)
            service.check_model(body)
            reply = ask(service, body)
            if reply.stream:
                return _EventStream(reply)
            with reply.turns:
                return JSONResponse(await _unless_gone(request, reply.whole()))

        return answer

    async def models(request: Request) -> Response:
        _check_key(service, request)
        card = {
            "id": service.name, "object": "model", "created": service.created, "owned_by": "agentrl-jax",
            "max_model_len": service.pump.context, "policy_version": service.pump.version,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def health(_: Request) -> Response:
        alive = service.pump.alive
        return JSONResponse({"status": "ok" if alive else "broken"}, status_code=200 if alive else 503)

    async def reload(request: Request) -> Response:
        body = await _body(service, request)
        _, path = given(body, "path")
        if not isinstance(path, str) or not path:
            raise refuse("path", path, "the path of a checkpoint on the server's machine")
        version = await service.reload(path, integer(body, "policy_version", default=None, low=0))
        return JSONResponse({"policy_version": version})

    routes = [
        Route("/v1/chat/completions", post(chat), methods=["POST"]),
        Route("/v1/completions", post(completions), methods=["POST"]),
        Route("/inference/v1/generate", post(generate), methods=["POST"]),
        Route("/v1/weights/reload", reload, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    handlers: dict[Any, Any] = {Refusal: _refused, HTTPException: _http, ClientDisconnect: _gone}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def _body(service: Service, request: Request) -> Mapping[str, Any]:
    """The JSON object of a request. Its content type must say so: a page in a browser can send other types anywhere."""
    _check_key(service, request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(f"content-type {kind!r}: expected application/json", code="invalid_content_type")
    raw = bytearray()
    async for part in request.stream():
        raw += part
        if len(raw) > LARGEST_BODY:
            raise Refusal(f"the body is longer than {LARGEST_BODY} bytes", status=413, code="body_too_large")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise Refusal(f"the body is {type(body).__name__}; expected a JSON object", code="invalid_json")
    return body


def _check_key(service: Service, request: Request) -> None:
    if service.api_key is not None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), service.api_key.encode()):
            raise Refusal("the API key is missing or wrong", status=401, code="invalid_api_key")


class _EventStream(StreamingResponse):
    """A reply in chunks. However it ends, before the first chunk too, what still samples for it is cancelled."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(_events(reply), media_type="text/event-stream")
        self._turns = reply.turns

    async def __call__(self, *arguments: Any) -> None:
        with self._turns:
            await super().__call__(*arguments)


async def _events(reply: Reply) -> AsyncIterator[bytes]:
    """Server-sent events, `[DONE]` last. What fails once the answer has begun becomes its last event."""
    try:
        async with contextlib.aclosing(reply.chunks()) as chunks:
            async for chunk in chunks:
                yield _event(chunk)
    except Refusal as refusal:
        yield _event(refusal.body())
    yield b"data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled where the client goes away first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refused(_: Request, refusal: Refusal) -> Response:
    headers = {"retry-after": "1"} if refusal.status == 429 else None
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=headers)


async def _http(request: Request, error: HTTPException) -> Response:
    refusal = Refusal(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(refusal.body(), status_code=error.status_code, headers=error.headers)


async def _gone(*_: Any) -> Response:
    return Response(status_code=499)  # nobody reads it
