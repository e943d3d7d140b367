"""Several calls in one turn: the environment performs those it knows, and every call gets its own result, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl_jax.protocol import Action, Message, Observation, Status, Tool
from agentrl_jax.rollout.calls import unknown_tool


def known_only(action: Action, tools: Mapping[str, Tool]) -> Action:
    """The action without the calls that name no tool. One that holds no other call is an error of the whole turn."""
    known = tuple(call for call in action.calls if call.name in tools)
    if len(known) == len(action.calls):
        return action
    if not known:
        return Action(text=action.text, error=unknown_tool(action.calls[0].name, tools))
    return replace(action, calls=known)


def with_unknown(action: Action, observation: Observation, tools: Mapping[str, Tool]) -> Observation:
    """The environment's answer to `known_only(action)`, with an error result for each other call of `action`.

    The result of call i is tool message i where the environment gave one result a call; else the errors come last.
    """
    unknown = [call.name not in tools for call in action.calls]
    if not any(unknown) or all(unknown):
        return observation
    errors = [_error(call.name, tools) for call, missing in zip(action.calls, unknown, strict=True) if missing]
    results = [message for message in observation.content if message.role == "tool"]
    if len(results) != len(unknown) - len(errors):
        content = [*observation.content, *errors]
    else:
        error, result = iter(errors), iter(results)
        content = [next(error) if missing else next(result) for missing in unknown]
        content += [message for message in observation.content if message.role != "tool"]
    status = Status.INVALID_ACTION if observation.status is Status.OK else observation.status
    return replace(observation, content=tuple(content), status=status)


def numbered(action: Action, messages: Sequence[Message], turn: int) -> tuple[Message, ...]:
    """The messages with the name and id of the call that each tool message answers, where there is one a call."""
    results = sum(message.role == "tool" for message in messages)
    if results != len(action.calls):
        return tuple(messages)
    calls = iter(enumerate(action.calls))
    named = []
    for message in messages:
        if message.role == "tool":
            index, call = next(calls)
            message = replace(message, name=call.name, call_id=f"call_{turn}_{index}")
        named.append(message)
    return tuple(named)


def _error(name: str, tools: Mapping[str, Tool]) -> Message:
    return Message(role="tool", content=f"error: {unknown_tool(name, tools)}")
