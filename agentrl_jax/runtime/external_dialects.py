"""How inference servers are asked for tokens, how their answers read, and how they load new params."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Body = Mapping[str, Any]
Reload = Callable[[str, int], Iterable[tuple[str, Body]]]  # (directory, version) -> the POSTs (path, body), in order
_PLACEHOLDER = -9999.0  # what vLLM sends where it computed no log-prob
# Said aloud: what is left out a server may take from the model's generation_config.json, which often cuts.
_WHOLE = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


class Asked(NamedTuple):
    """One turn, as a dialect needs it."""

    model: str | None
    ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]


class Turn(NamedTuple):
    """What an answer says. `versions` is None where the server does not tell which params sampled."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...] | None
    stopped: bool  # by a stop id, not by a limit


class BadAnswer(ValueError):
    """An answer that lacks what training needs; the message says which option the server wants."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """`ask(turn) -> (path, JSON body)`; `read(JSON) -> Turn`, which raises `BadAnswer`."""

    name: str
    ask: Callable[[Asked], tuple[str, Body]]
    read: Callable[[Any], Turn]


def _ask_generate(asked: Asked) -> tuple[str, Body]:
    sampling = {
        "max_tokens": asked.max_tokens, "temperature": asked.temperature, "seed": asked.seed, "logprobs": 1,
        "stop_token_ids": list(asked.stop_ids), "skip_special_tokens": False, **_WHOLE,
    }  # fmt: skip
    return "/inference/v1/generate", _named(asked, {"token_ids": list(asked.ids), "sampling_params": sampling})


def _read_generate(answer: Any) -> Turn:
    choice = _choice(answer)
    ids = _ids(choice.get("token_ids"), "choices[0].token_ids")
    content = (choice.get("logprobs") or {}).get("content")
    if content is None:
        raise BadAnswer("the answer holds no logprobs; a vLLM server must not be started with --max-logprobs 0")
    logprobs = _logprobs([entry.get("logprob") for entry in content], ids)
    return Turn(ids, logprobs, _versions(choice, ids), choice.get("finish_reason") == "stop")


def _ask_completions(asked: Asked) -> tuple[str, Body]:
    body = {
        "prompt": list(asked.ids), "max_tokens": asked.max_tokens, "temperature": asked.temperature,
        "seed": asked.seed, "logprobs": 1, "stop_token_ids": list(asked.stop_ids), "skip_special_tokens": False,
        "return_token_ids": True, "return_tokens_as_token_ids": True, **_WHOLE,
    }  # fmt: skip
    return "/v1/completions", _named(asked, body)


def _read_completions(answer: Any) -> Turn:
    choice = _choice(answer)
    missing = "choices[0].token_ids: it does not know return_token_ids; vLLM has it from 0.10.2 on"
    ids = _ids(choice.get("token_ids"), missing)
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if values is None:
        raise BadAnswer("the answer holds no logprobs; a vLLM server must not be started with --max-logprobs 0")
    return Turn(ids, _logprobs(values, ids), _versions(choice, ids), choice.get("finish_reason") == "stop")


def _ask_sglang(asked: Asked) -> tuple[str, Body]:
    sampling = {
        "max_new_tokens": asked.max_tokens, "temperature": asked.temperature, "sampling_seed": asked.seed % 2**31,
        "stop_token_ids": list(asked.stop_ids), "skip_special_tokens": False, "no_stop_trim": True,
        **_WHOLE,
    }  # fmt: skip
    return "/generate", {"input_ids": list(asked.ids), "sampling_params": sampling, "return_logprob": True}


def _read_sglang(answer: Any) -> Turn:
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    rows = meta.get("output_token_logprobs") if isinstance(meta, Mapping) else None
    if rows is None:
        raise BadAnswer("the answer holds no meta_info.output_token_logprobs; expected SGLang's own /generate")
    ids = _ids([row[1] for row in rows], "")
    finish = (meta or {}).get("finish_reason") or {}
    return Turn(ids, _logprobs([row[0] for row in rows], ids), None, finish.get("type") == "stop")


GENERATE = Dialect(name="generate", ask=_ask_generate, read=_read_generate)
COMPLETIONS = Dialect(name="completions", ask=_ask_completions, read=_read_completions)
SGLANG = Dialect(name="sglang", ask=_ask_sglang, read=_read_sglang)


def reload_ours(directory: str, version: int) -> Iterable[tuple[str, Body]]:
    """`agentrl serve`: `POST /v1/weights/reload`."""
    return [("/v1/weights/reload", {"path": directory, "policy_version": version})]


def reload_vllm(directory: str, version: int) -> Iterable[tuple[str, Body]]:
    """vLLM started with `VLLM_SERVER_DEV_MODE=1`: load in place, then forget the prefixes of the old params."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
    return [("/collective_rpc", load), ("/reset_prefix_cache", {})]


def reload_sglang(directory: str, version: int) -> Iterable[tuple[str, Body]]:
    """SGLang: `POST /update_weights_from_disk`, which flushes the prefix cache itself."""
    return [("/update_weights_from_disk", {"model_path": directory})]


def _named(asked: Asked, body: dict[str, Any]) -> Body:
    return body if asked.model is None else {"model": asked.model, **body}


def _choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise BadAnswer(f"expected an answer with one choice, got {answer!r:.100}")
    return choices[0]


def _ids(value: Any, missing: str) -> tuple[int, ...]:
    if value is None:
        raise BadAnswer(f"the answer holds no token ids ({missing})")
    if not isinstance(value, list) or not all(type(index) is int and index >= 0 for index in value):
        raise BadAnswer(f"token ids: expected a list of integers, got {value!r:.80}")
    return tuple(value)


def _logprobs(values: Sequence[Any], ids: Sequence[int]) -> tuple[float, ...]:
    if len(values) != len(ids):
        raise BadAnswer(f"{len(ids)} tokens came with {len(values)} log-probs")
    if not all(isinstance(value, int | float) and math.isfinite(value) and value <= 1e-6 for value in values):
        raise BadAnswer("log-probs: expected finite numbers of at most 0")
    if any(value == _PLACEHOLDER for value in values):
        raise BadAnswer("a log-prob is vLLM's placeholder -9999; start it with --logprobs-mode processed_logprobs")
    return tuple(map(float, values))


def _versions(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[int, ...] | None:
    versions = choice.get("policy_versions")
    if versions is None:
        return None
    if not isinstance(versions, list) or len(versions) != len(ids):
        raise BadAnswer("policy_versions: expected one a token")
    return tuple(map(int, versions))
