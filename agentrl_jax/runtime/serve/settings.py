"""How one request samples: read from OpenAI's fields, or from vLLM's `SamplingParams`, which name most things alike."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_jax.runtime.serve.fields import Body, flag, given, integer, neutral, number, refuse, token_ids

MOST_CHOICES, MOST_STOPS, LONGEST_STOP = 128, 16, 256

# What would change the distribution or the tokens, and the values that ask for nothing.
_NOT_COMPUTED: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": [0, 0.0], "presence_penalty": [0, 0.0], "repetition_penalty": [1, 1.0], "logit_bias": [{}],
    "min_tokens": [0], "ignore_eos": [False], "best_of": [1], "use_beam_search": [False], "echo": [False],
    "suffix": [""], "prompt_logprobs": [], "allowed_token_ids": [], "bad_words": [[]], "structured_outputs": [],
    "guided_json": [], "response_format": [{"type": "text"}], "include_stop_str_in_output": [False],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`seed` and the token ids decide the tokens: choice i > 0 draws from the key (seed, i), choice 0 from (seed,).

    `stop_strings` end the text before them; `stop_ids` end it after the id, beside the renderer's own.
    """

    max_tokens: int
    temperature: float
    top_k: int  # 0 is off
    top_p: float
    min_p: float
    seed: int
    n: int
    stop_strings: tuple[str, ...]
    stop_ids: tuple[int, ...]
    stream: bool
    logprobs: bool
    return_token_ids: bool
    tokens_as_ids: bool  # name tokens "token_id:N" in log-probs
    include_usage: bool

    def key(self, choice: int) -> tuple[int, ...]:
        return (self.seed, choice) if choice else (self.seed,)


def read_settings(body: Body, *, context: int, vocab_size: int, default_max: int | None = None) -> Settings:
    """Settings of a body. Without a limit a turn may fill the context; without a seed it gets a random one."""
    neutral(body, _NOT_COMPUTED)
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise refuse("stream_options", options, "an object")
    seed = integer(body, "seed", default=None, low=-(2**63))
    return Settings(
        max_tokens=min(
            integer(body, "max_completion_tokens", "max_tokens", default=default_max or context, low=1), context
        ),
        temperature=number(body, "temperature", default=1.0, low=0.0, high=100.0),
        top_k=max(0, integer(body, "top_k", default=0, low=-1)),
        top_p=number(body, "top_p", default=1.0, low=1e-6, high=1.0),
        min_p=number(body, "min_p", default=0.0, low=0.0, high=1.0),
        seed=secrets.randbits(62) if seed is None else seed,
        n=integer(body, "n", default=1, low=1, high=MOST_CHOICES),
        stop_strings=_stop_strings(body),
        stop_ids=token_ids(body.get("stop_token_ids") or (), "stop_token_ids", vocab_size),
        stream=flag(body, "stream"),
        logprobs=_logprobs(body),
        return_token_ids=flag(body, "return_token_ids"),
        tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
        include_usage=flag(options, "include_usage"),
    )


def _logprobs(body: Body) -> bool:
    """`true` (chat), or 0 or 1 (completions): the log-probability of the token that was sampled, and of no other."""
    wanted = body.get("logprobs")
    top = body.get("top_logprobs")
    if top not in (None, 0):
        raise refuse("top_logprobs", top, "0: only the sampled token's log-probability is computed")
    if isinstance(wanted, bool) or wanted is None:
        return bool(wanted)
    if wanted not in (0, 1):
        raise refuse("logprobs", wanted, "true, false, 0 or 1: only the sampled token's log-probability is computed")
    return True


def _stop_strings(body: Body) -> tuple[str, ...]:
    name, value = given(body, "stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise refuse(name, value, f"a text, or a list of at most {MOST_STOPS} texts")
    if any(len(stop) > LONGEST_STOP for stop in stops):
        raise refuse(name, value, f"texts of at most {LONGEST_STOP} characters")
    return tuple(stop for stop in stops if stop)
