"""What an episode in an environment looks like from outside, as hashes: for conformance, forks and replay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from agentrl_jax.protocol import Action, Observation, ToolCall


def observation_hash(observation: Observation) -> str:
    """A hash of what the policy can see of an observation: messages, status and end flags; never its latency."""
    seen = [
        [[message.role, message.content] for message in observation.content],
        str(observation.status),
        observation.terminated,
        observation.truncated,
    ]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()[:32]


def action_of(item: ToolCall | str) -> Action:
    """A turn of a script as the action that a policy would have taken: one call, or plain text."""
    if isinstance(item, str):
        return Action(text=item)
    return Action(text=f"{item.name} {json.dumps(dict(item.arguments), default=str)}", calls=(item,))


def action_to_json(action: Action) -> dict:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in action.calls]
    return {"text": action.text, "calls": calls, "error": action.error}


def action_from_json(data: dict) -> Action:
    calls = tuple(ToolCall(name=call["name"], arguments=call["arguments"]) for call in data["calls"])
    return Action(text=data["text"], calls=calls, error=data["error"])


def texts(observations: Iterable[Observation]) -> str:
    """Everything that observations say, a message a line."""
    return "\n".join(message.content for observation in observations for message in observation.content)
