"""A sampler that lives in another process: an inference server that takes token ids and returns ids and log-probs.

`ExternalSampler` is a `rollout.sampling.Sampler` over HTTP. A turn is one request with the whole context of its slot:
the server should cache prefixes. How a server is asked and how its answer reads is a `Dialect`; how it takes new params
is a `Reload`. Both are values of `external_dialects`: another server needs two functions, no class.

| dialect | request | start the server with |
| --- | --- | --- |
| `GENERATE` | `POST /inference/v1/generate` (ours, vLLM, prime-rl) | vLLM: `--logprobs-mode processed_logprobs` |
| `COMPLETIONS` | `POST /v1/completions` (ours, vLLM) | vLLM: `--logprobs-mode processed_logprobs` |
| `SGLANG` | `POST /generate` (SGLang) | `--enable-deterministic-inference`, or the seeds mean nothing |

Log-probs must be those of the distribution sampled from, temperature included: vLLM's default mode, `raw_logprobs`, is
that of temperature 1 and gives wrong ratios at any other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from agentrl_jax.errors import UserError
from agentrl_jax.rollout.sampling import Sample, SampleRequest, Stop
from agentrl_jax.runtime.external_dialects import (
    GENERATE,
    Asked,
    BadAnswer,
    Body,
    Dialect,
    Reload,
    Turn,
    reload_ours,
)

_GLANCE_S = 0.05  # how long one `advance` waits for a first answer
_LONGEST_WAIT_S = 5.0
_FREE_RETRIES = 64
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONNECT_S = 20.0

Export = Callable[[Any], str | Path]  # params -> the checkpoint directory it wrote, which the server can read


@dataclass
class Counters:
    """Work done so far: turns asked for, requests sent again, tokens that came back."""

    turns: int = 0
    retries: int = 0
    sampled: int = 0

    def since(self, before: Counters) -> dict[str, float]:
        """What was added after `before` was taken."""
        return {name: value - getattr(before, name) for name, value in vars(self).items()}


class ExternalSampler:
    """A `Sampler` over the server at `url`; as many requests at once as there are `slots`.

    Every request has `deadline_s`, retries included. A refused connection, a timeout, a 429 and a 5xx are tried again
    with growing waits, `attempts` times at most, as long as the run as a whole retries no more than one request in four
    (beyond the first 64 retries): a server that is down is not hammered. A turn that fails is a `Sample` with stop
    "error", never an exception. Turns are seeded from (`seed`, `SampleRequest.key`), so a repeated request gives the
    same tokens.

    `publish(params, version)` writes a checkpoint with `export` and has the server load it with `reload`. A server
    that numbers its params and has come further than `version` goes on with its own numbers; samples bear ours.
    """

    def __init__(
        self, url: str, *, slots: int, context: int, stop_ids: Sequence[int], dialect: Dialect | None = None,
        model: str | None = None, export: Export | None = None, reload: Reload | None = None, version: int = 0,
        deadline_s: float = 300.0, attempts: int = 4, reload_deadline_s: float = 600.0, api_key: str | None = None,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        self._seed = () if seed is None else (seed,)
        self._ahead: int | None = 0  # the server's version less ours; None: known at the first publication
        self._reached = 0  # the version that the server had when we connected
        self._turns = self._sampled = 0
        self._slots, self._context, self._stop_ids = slots, context, tuple(stop_ids)
        self._dialect, self._model, self._version = dialect or GENERATE, model, version
        self._export, self._reload, self._reload_deadline_s = export, reload or reload_ours, reload_deadline_s
        self._held: dict[int, tuple[int, ...]] = {}  # by slot: the tokens of its context so far
        self._pending: dict[int, concurrent.futures.Future[Sample]] = {}
        address = url.rstrip("/").removesuffix("/v1")
        self._server = _Server(address, api_key, connections=slots + 1, deadline_s=deadline_s, attempts=attempts)

    def __enter__(self) -> ExternalSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def context(self) -> int:
        return self._context

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    @property
    def version(self) -> int:
        return self._version

    @property
    def retries(self) -> int:
        """Requests that were sent again so far."""
        return self._server.retries

    @property
    def counters(self) -> Counters:
        return Counters(self._turns, self._server.retries, self._sampled)

    def cache_sizes(self) -> dict[str, int]:
        """Device functions compiled here: none."""
        return {}

    def connect(self) -> None:
        """Ask the server what it serves. Raises `UserError` naming the URL: no answer, another model, too short."""
        url = self._server.url
        try:
            answer = self._server.start(self._server.get("/v1/models", _CONNECT_S)).result()
        except _Failed as error:
            if any(f"HTTP {code}" in str(error) for code in (401, 403)):
                raise UserError(f"{url}: the server asks for a key ({error}); set AGENTRL_API_KEY") from error
            raise UserError(f"{url}: no inference server to sample from ({error}); start one there") from error
        cards = answer.get("data") if isinstance(answer, dict) else None
        cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        names = [str(card.get("id")) for card in cards]
        if self._model is not None and self._model not in names:
            raise UserError(f"{url}: serves no model {self._model!r}; expected one of {', '.join(names) or 'none'}")
        card = next((card for card in cards if self._model in (None, card.get("id"))), {})
        longest, version = card.get("max_model_len"), card.get("policy_version")
        if isinstance(longest, int) and longest < self._context:
            raise UserError(f"{url}: a context there holds {longest} tokens, fewer than the {self._context} asked for")
        if isinstance(version, int):
            self._reached, self._ahead = version, None

    def submit(self, request: SampleRequest) -> None:
        """Send a turn. Raises `ValueError` for a slot that is busy, unknown or empty, as the engine does."""
        held = self._check(request)
        ids = (*held, *request.ids)
        self._held[request.slot] = ids
        self._turns += 1
        room = self._context - len(ids)
        if room <= 0 or request.records or request.stop_strings:
            done: concurrent.futures.Future[Sample] = concurrent.futures.Future()
            done.set_result(self._unasked(request, held, room))
            self._pending[request.slot] = done
            return
        asked = self._asked(request, ids, min(request.max_tokens, room))
        self._pending[request.slot] = self._server.start(self._sample(request, asked, held, self._version))

    def advance(self) -> list[Sample]:
        """The turns that are over, in slot order; waits a moment for the first."""
        by_future = {future: slot for slot, future in self._pending.items()}
        over, _ = concurrent.futures.wait(by_future, _GLANCE_S, concurrent.futures.FIRST_COMPLETED)
        found = []
        for future in over:
            slot = by_future[future]
            sample = future.result()
            del self._pending[slot]
            self._held[slot] = (*self._held[slot], *sample.ids)
            self._sampled += len(sample.ids)
            found.append(sample)
        return sorted(found, key=lambda sample: sample.slot)

    def publish(self, params: Any, version: int) -> None:
        """Export `params` and have the server sample from them. Raises `UserError` where either cannot be done.

        What is in flight goes on; a server that does not tell the versions of its tokens has them counted as those of
        the params in force when the turn was sent.
        """
        if self._export is None:
            raise UserError("ExternalSampler.publish: no export=; give a function that writes a checkpoint directory")
        if self._ahead is None:
            self._ahead = max(0, self._reached + 1 - version)
        directory = str(self._export(params))
        for path, body in self._reload(directory, version + self._ahead):
            try:
                self._server.start(self._server.post(path, body, self._reload_deadline_s, attempts=1)).result()
            except _Failed as error:
                raise UserError(f"{self._server.url}: the server could not load {directory}: {error}") from error
        self._version = version

    def close(self) -> None:
        """Give up the turns in flight and close the connections."""
        for pending in self._pending.values():
            pending.cancel()
        self._server.close()

    def _check(self, request: SampleRequest) -> tuple[int, ...]:
        if not 0 <= request.slot < self._slots:
            raise ValueError(f"SampleRequest.slot={request.slot}: expected 0..{self._slots - 1}")
        if request.slot in self._pending:
            raise ValueError(f"SampleRequest.slot={request.slot}: still busy with an earlier turn")
        if request.max_tokens < 1:
            raise ValueError(f"SampleRequest.max_tokens={request.max_tokens}: expected at least 1")
        if request.fork_from is not None:
            return self._forked(request, request.fork_from)
        held = () if request.fresh else self._held.get(request.slot, ())
        if not (held or request.ids):
            raise ValueError(f"SampleRequest.ids is empty and slot {request.slot} holds nothing to continue")
        return held

    def _forked(self, request: SampleRequest, source: int) -> tuple[int, ...]:
        """What the fork takes up. The server finds it in its prefix cache."""
        if not request.fresh or request.share_with is not None:
            raise ValueError(
                f"SampleRequest.fork_from={source}: a fork is a fresh context that shares with nobody else"
            )
        held = self._held.get(source, ())
        if source == request.slot or source in self._pending or not held:
            raise ValueError(
                f"SampleRequest.fork_from={source}: expected another slot that is idle and holds tokens "
                f"(slot {request.slot})"
            )
        return held

    def _asked(self, request: SampleRequest, ids: tuple[int, ...], max_tokens: int) -> Asked:
        """A field that requests gain goes into `Asked` here, and into the bodies of the dialects below."""
        return Asked(
            model=self._model, ids=ids, max_tokens=max_tokens, temperature=request.temperature,
            seed=request_seed((*self._seed, *request.key)), stop_ids=(*self._stop_ids, *request.stop_ids),
        )  # fmt: skip

    def _unasked(self, request: SampleRequest, held: tuple[int, ...], room: int) -> Sample:
        if room <= 0:
            full = f"{self._context - room} tokens leave no room to sample in context={self._context}"
            return Sample(slot=request.slot, ids=(), logprobs=(), versions=(), stop="context", message=full)
        cut = "top_k, top_p, min_p and grammar need the kept set"
        what = "stop_strings are the engine's" if request.stop_strings else cut
        return self._error(request.slot, held, f"{what}, which this server does not tell; leave them out")

    async def _sample(self, request: SampleRequest, asked: Asked, held: tuple[int, ...], version: int) -> Sample:
        try:
            path, body = self._dialect.ask(asked)
            turn = self._dialect.read(await self._server.post(path, body))
            stop = _stop(turn, asked, request)
        except (BadAnswer, _Failed) as error:
            return self._error(request.slot, held, str(error))
        except Exception as error:  # whatever a server may answer is data here
            return self._error(request.slot, held, f"{type(error).__name__}: {error}")
        ahead = self._ahead or 0
        versions = (version,) * len(turn.ids) if turn.versions is None else tuple(v - ahead for v in turn.versions)
        return Sample(slot=request.slot, ids=turn.ids, logprobs=turn.logprobs, versions=versions, stop=stop)

    def _error(self, slot: int, held: tuple[int, ...], message: str) -> Sample:
        self._held[slot] = held
        reason = f"{self._server.url}: {message}"
        return Sample(slot=slot, ids=(), logprobs=(), versions=(), stop="error", message=reason)


def request_seed(key: tuple[int, ...]) -> int:
    """A 62-bit seed that depends on every number of a request's key."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class _Failed(Exception):
    """A request that got no usable answer."""


class _Server:
    """Requests to one address, carried out by an event loop in a thread of its own."""

    def __init__(self, url: str, api_key: str | None, *, connections: int, deadline_s: float, attempts: int) -> None:
        self.url, self.deadline_s, self.attempts = url, deadline_s, attempts
        self.requests = self.retries = 0
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        # The address is meant as it stands: a proxy of the environment would only be in the way of a cluster's own.
        # Deadlines are ours, over all attempts: see `post`.
        self._client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, trust_env=False, timeout=None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agentrl-external", daemon=True)
        self._thread.start()

    def start(self, work: Any) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        if not self._loop.is_closed():
            self.start(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def post(self, path: str, body: Body, deadline_s: float | None = None, attempts: int | None = None) -> Any:
        """The JSON of the answer. Raises `_Failed` with the last reason."""
        return await self._ask("POST", path, body, deadline_s, attempts)

    async def get(self, path: str, deadline_s: float) -> Any:
        """The same of a GET request."""
        return await self._ask("GET", path, None, deadline_s, None)

    async def _ask(
        self, method: str, path: str, body: Body | None, deadline_s: float | None, attempts: int | None
    ) -> Any:
        self.requests += 1
        deadline_s, attempts = deadline_s or self.deadline_s, attempts or self.attempts
        reason = ""
        try:
            async with asyncio.timeout(deadline_s):
                for attempt in range(attempts):
                    answer, reason, wait_s = await self._once(method, path, body, attempt)
                    if not reason:
                        return answer
                    if attempt + 1 == attempts or not self._may_retry():
                        break
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            reason = f"no answer within {deadline_s:g} s" + (f"; before that {reason}" if reason else "")
        raise _Failed(f"{method} {path}: {reason}")

    async def _once(self, method: str, path: str, body: Body | None, attempt: int) -> tuple[Any, str, float]:
        """(answer, "", 0), or what went wrong and how long to wait. Raises `_Failed` where to ask again is no use."""
        wait_s = min(0.1 * 2.0**attempt, _LONGEST_WAIT_S)
        try:
            answer = await self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            return None, f"{type(error).__name__}: {error} (attempt {attempt + 1})", wait_s
        if answer.status_code in _RETRIED:
            reason = f"HTTP {answer.status_code} (attempt {attempt + 1}): {answer.text:.200}"
            return None, reason, _retry_after(answer, wait_s)
        if answer.status_code != 200:
            raise _Failed(f"{method} {path}: HTTP {answer.status_code}: {answer.text:.300}")
        try:
            return answer.json() if answer.content else None, "", 0.0
        except ValueError as error:
            raise _Failed(f"{method} {path}: the answer is not JSON: {answer.text:.100}") from error

    def _may_retry(self) -> bool:
        if self.retries >= _FREE_RETRIES + self.requests // 4:
            return False
        self.retries += 1
        return True

    async def _end(self) -> None:
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        await self._client.aclose()


def _retry_after(answer: httpx.Response, wait_s: float) -> float:
    try:
        return min(max(wait_s, float(answer.headers.get("retry-after", 0))), _LONGEST_WAIT_S)
    except ValueError:  # a date
        return wait_s


def _stop(turn: Turn, asked: Asked, request: SampleRequest) -> Stop:
    if not turn.ids:
        raise BadAnswer("the answer holds no token")
    if len(turn.ids) > asked.max_tokens:
        raise BadAnswer(f"asked for at most {asked.max_tokens} tokens, the answer holds {len(turn.ids)}")
    if turn.stopped:
        return "stop"
    return "length" if len(turn.ids) >= request.max_tokens else "context"
