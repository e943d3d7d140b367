"""Reading a JSON body field by field. What is wrong becomes a `Refusal`: OpenAI's error object and a status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Body = Mapping[str, Any]


class Refusal(Exception):
    """A request that is not served: `status` and OpenAI's `{"error": {message, type, param, code}}`."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, given: Any, expected: str) -> Refusal:
    return Refusal(f"{param}: expected {expected}, got {given!r:.80}", param=param, code="invalid_value")


def given(body: Body, *names: str) -> tuple[str, Any]:
    """The first of `names` that the body has a value for (null counts as absent), and the value; else None."""
    for name in names:
        if body.get(name) is not None:
            return name, body[name]
    return names[0], None


def integer(body: Body, *names: str, default: int | None, low: int, high: int = 2**63 - 1) -> Any:
    """An integer within [low, high] under the first name that is there."""
    name, value = given(body, *names)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f"at least {low}" if high == 2**63 - 1 else f"from {low} to {high}"
        raise refuse(name, value, f"an integer, {bounds}")
    return value


def number(body: Body, name: str, *, default: float, low: float, high: float) -> float:
    """A finite number within [low, high]."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refuse(name, value, "a number")
    if not low <= value <= high:
        raise refuse(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return bool(value)


def token_ids(value: Any, param: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids of the served vocabulary."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise refuse(param, value, "a list of token ids")
    for index, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise refuse(f"{param}[{index}]", token, f"a token id from 0 to {vocab_size - 1}")
    return tuple(value)


def neutral(body: Body, allowed: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a setting that would change what is sampled and that this server does not compute.

    `allowed[name]` are the values that ask for nothing; null and an absent field always do.
    """
    for name, values in allowed.items():
        value = body.get(name)
        if value is not None and value not in values:
            instead = f", or give {values[0]!r}" if values else ""
            raise Refusal(f"{name}={value!r:.60}: not served here; leave it out{instead}",
                          param=name, code="unsupported_parameter")  # fmt: skip
