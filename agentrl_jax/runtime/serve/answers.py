"""The JSON of answers: OpenAI's shapes, vLLM's `token_ids` and `prompt_token_ids`, and `policy_versions` of ours."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_jax.runtime.serve.settings import Settings
from agentrl_jax.runtime.serve.text import Delta

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the parts of one answer have in common: `kind` is OpenAI's `object`, `prefix` starts the id."""

    kind: str
    prefix: str
    model: str
    settings: Settings
    prompt: tuple[int, ...]
    token: Callable[[int], str]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Json], counts: Sequence[int]) -> Json:
        return {**self._frame(self.kind), "choices": list(choices), "usage": self.usage(sum(counts))}

    def chunk(self, choices: Sequence[Json], *, kind: str, **more: Any) -> Json:
        return {**self._frame(kind), "choices": list(choices), **more}

    def usage(self, completion: int) -> Json:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def tokens(self, delta: Delta) -> Json:
        """The fields of a choice that speak of its tokens, where the request asked for them."""
        if not self.settings.return_token_ids:
            return {}
        return {"token_ids": list(delta.ids), "policy_versions": list(delta.versions)}

    def chat_logprobs(self, delta: Delta) -> Json | None:
        """OpenAI's chat form; only the sampled token has an entry, so `top_logprobs` is empty."""
        if not self.settings.logprobs:
            return None
        entries = []
        for index, logprob in zip(delta.ids, delta.logprobs, strict=True):
            token = self.name(index)
            entries.append({"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}

    def completion_logprobs(self, delta: Delta) -> Json | None:
        """OpenAI's older form, of parallel lists."""
        if not self.settings.logprobs:
            return None
        names = [self.name(index) for index in delta.ids]
        return {"tokens": names, "token_logprobs": list(delta.logprobs), "top_logprobs": None, "text_offset": []}

    def name(self, index: int) -> str:
        return f"token_id:{index}" if self.settings.tokens_as_ids else self.token(index)

    def _frame(self, kind: str) -> Json:
        return {
            "id": f"{self.prefix}-{self.request_id}", "object": kind, "created": self.created, "model": self.model
        }  # fmt: skip
