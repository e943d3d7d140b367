"""Why an episode is not finished: an answer never given is not a wrong answer.

Both score False - the policy could have caused either, and whatever leaves the batch is a way out that it can learn -
but a verdict says which of the two it measured.
"""

from __future__ import annotations

from agentrl_jax.protocol import StopReason

LIMITS = (StopReason.BUDGET, StopReason.TOKEN_CAP, StopReason.LOW_EVIDENCE)


def unfinished(finished: bool, stop: StopReason | None) -> str:
    """The diagnostic `unfinished`: empty where the policy finished, else what ended the episode before it had."""
    return "" if finished else str(stop or "unknown")


def never(what: str, stop: StopReason | None) -> str:
    """`no answer` and the like, with the reason: cut by a limit, or the policy's own choice."""
    if stop in LIMITS:
        return f"no {what}: cut by a limit ({stop})"
    return f"no {what}: the policy stopped before" if stop is StopReason.EARLY_STOP else f"no {what}"
