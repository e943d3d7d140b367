"""What the routes share: the pump, the policy's voice, and the moves from a request to the deltas of its choices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl_jax.errors import UserError
from agentrl_jax.runtime.grammars import Grammars
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.fields import Body, Refusal
from agentrl_jax.runtime.serve.pump import Busy, Job, Piece, Pump, Stopped
from agentrl_jax.runtime.serve.settings import Settings
from agentrl_jax.runtime.serve.text import Cutter, Delta


@dataclass(kw_only=True)
class Service:
    """One policy, served under `name`. `load(path)` gives the sampler's params of another checkpoint of it, or raises
    `UserError`; None where params cannot be reloaded. `grammars` reads what turns are to be held to; without it such
    requests are refused."""

    pump: Pump
    chat: Chat
    name: str
    load: Callable[[str], Any] | None = None
    grammars: Grammars | None = None
    api_key: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def check_model(self, body: Body) -> None:
        """Raises a 404 where the body names another model. Without a name it is the one that is served."""
        model = body.get("model")
        if model is not None and model != self.name:
            message = f"model {model!r:.80} is not served here; there is: {self.name}"
            raise Refusal(message, status=404, param="model", code="model_not_found")

    def check_length(self, prompt: Sequence[int], param: str) -> None:
        """A prompt must leave room for one token at least."""
        if not prompt:
            raise Refusal(f"{param}: expected at least one token", param=param, code="invalid_value")
        if len(prompt) >= self.pump.context:
            raise Refusal(
                f"the context holds {self.pump.context} tokens and the prompt has {len(prompt)}; shorten it to at most "
                f"{self.pump.context - 1}, or serve with a longer --context",
                param=param,
                code="context_length_exceeded",
            )

    def check_grammar(self, grammar: str) -> None:
        """Raises a 400 where nothing here reads grammars, or this one means nothing."""
        if self.grammars is None:
            message = "this server holds no turn to a form (response_format, tool_choice); start it with --constrained"
            raise Refusal(message, code="unsupported_parameter")
        try:
            self.grammars.start(grammar)
        except ValueError as error:
            raise Refusal(str(error), code="invalid_value") from error

    def begin(self, prompt: tuple[int, ...], settings: Settings, *, live: bool, grammar: str | None = None) -> Turns:
        """Queue every choice of a request, each held to the grammar.

        Raises a 429 where the queue is full, a 503 where nothing is served.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        jobs = [
            Job(
                ids=prompt, key=settings.key(choice), max_tokens=settings.max_tokens,
                temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, min_p=settings.min_p,
                stop_ids=settings.stop_ids, grammar=grammar, tell=partial(_tell, loop, events, choice),
            )
            for choice in range(settings.n)
        ]  # fmt: skip
        decode = self.chat.renderer.decode
        cutters = [Cutter(decode, settings.stop_strings, settings.stop_ids, live=live) for _ in jobs]
        try:
            self.pump.submit(jobs)
        except Busy as error:
            raise Refusal(str(error), status=429, code="queue_full") from error
        except Stopped as error:
            raise Refusal(str(error), status=503, code="not_serving") from error
        return Turns(self.pump, jobs, cutters, events)

    async def reload(self, path: str, version: int | None) -> int:
        """Publish the params of `path`; the version that is in force when this returns."""
        if self.load is None:
            raise Refusal("this server holds fixed params; it was started without a way to load others", status=400)
        async with self.reloading:
            current = self.pump.version
            if version is not None and version <= current:
                message = f"policy_version={version}: expected more than the current {current}"
                raise Refusal(message, param="policy_version", code="invalid_value")
            try:
                params = await asyncio.to_thread(self.load, path)
                version = current + 1 if version is None else version
                await asyncio.wrap_future(self.pump.publish(params, version))
            except UserError as error:
                raise Refusal(str(error), param="path", code="invalid_value") from error
            except Stopped as error:
                raise Refusal(str(error), status=503, code="not_serving") from error
            return version


@dataclass
class Turns:
    """The choices of one request while they are sampled. As a context manager it cancels what is left at its end."""

    pump: Pump
    jobs: Sequence[Job]
    cutters: Sequence[Cutter]
    events: asyncio.Queue[tuple[int, Piece | Exception]]

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.jobs:
            self.pump.cancel(job)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, delta) as they come; a choice's last delta has `finish`. Raises `Refusal` where one failed."""
        open_choices = set(range(len(self.jobs)))
        while open_choices:
            choice, event = await self.events.get()
            if choice not in open_choices:
                continue
            if isinstance(event, ValueError):
                raise Refusal(str(event), code="invalid_value") from event
            if isinstance(event, Exception):
                raise Refusal(str(event), status=503, code="not_serving") from event
            delta = self.cutters[choice].take(event)
            if delta.finish:
                open_choices.discard(choice)
                if event.stop is None:  # cut by a stop text or id that the sampler does not know of
                    self.pump.cancel(self.jobs[choice])
            yield choice, delta

    async def whole(self) -> list[Delta]:
        """Every choice as one delta."""
        parts: list[list[Delta]] = [[] for _ in self.jobs]
        async for choice, delta in self.deltas():
            parts[choice].append(delta)
        return [_joined(deltas) for deltas in parts]


def _joined(deltas: Sequence[Delta]) -> Delta:
    ids = tuple(index for delta in deltas for index in delta.ids)
    logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs)
    versions = tuple(version for delta in deltas for version in delta.versions)
    return Delta(ids, logprobs, versions, "".join(delta.text for delta in deltas), deltas[-1].finish)


def _tell(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Any], choice: int, event: Piece | Exception) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
        loop.call_soon_threadsafe(events.put_nowait, (choice, event))
