"""A trajectory as a person reads it: the text of every token, who produced it, and its credit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers

from agentrl_jax.rollout.records import Trajectory


def transcript(
    t: Trajectory, tokenizer: tokenizers.Tokenizer, *, reward: float, advantage: float,
    per_turn: Sequence[float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One row of transcripts.jsonl. `tokens` is [text, source, turn, log-prob, advantage] a token.

    `per_turn`: what each turn is due beside the trajectory's `advantage`.
    """
    texts = [
        tokenizer.decode([token], skip_special_tokens=False) or (tokenizer.id_to_token(token) or "")
        for token in t.tokens
    ]
    columns = zip(texts, t.sources, t.turn_ids, t.behavior_logprobs, t.action_mask, strict=True)
    own = dict(enumerate(per_turn or ()))
    return {
        "task": t.task.id,
        "kind": t.task.kind,
        "member": t.member,
        "reward": round(reward, 4),
        "advantage": round(advantage, 4),
        "success": t.success,
        "violated": t.violated,
        "stop": str(t.stop),
        "cause": None if t.attribution is None else str(t.attribution.cause),
        "tokens": [
            [
                text,
                int(source),
                turn,
                round(logprob, 4) if acted else None,
                round(advantage + own.get(turn, 0.0), 4) if acted else 0.0,
            ]
            for text, source, turn, logprob, acted in columns
        ],
    }
