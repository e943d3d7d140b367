"""A trajectory as a person reads it: the text of every token, who produced it, and its credit."""

from __future__ import annotations

from typing import Any

import tokenizers

from agentrl_jax.rollout.records import Trajectory


def transcript(t: Trajectory, tokenizer: tokenizers.Tokenizer, *, reward: float, advantage: float) -> dict[str, Any]:
    """One row of transcripts.jsonl. `tokens` is [text, source, turn, log-prob, advantage] a token."""
    texts = [
        tokenizer.decode([token], skip_special_tokens=False) or (tokenizer.id_to_token(token) or "")
        for token in t.tokens
    ]
    columns = zip(texts, t.sources, t.turn_ids, t.behavior_logprobs, t.action_mask, strict=True)
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
            [text, int(source), turn, round(logprob, 4) if acted else None, round(advantage, 4) if acted else 0.0]
            for text, source, turn, logprob, acted in columns
        ],
    }
