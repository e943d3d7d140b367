"""Scripts that try to be scored without serving the customer: the conformance list plays them, none may succeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl_jax.protocol import Task, ToolCall

from .tools import ADDRESS, TRANSFER, WRITES

Turn = ToolCall | str


def attacks(task: Task) -> Mapping[str, Sequence[Turn]]:
    """Hand over to a person, answer with everything, do one thing more, answer without doing, do without answering."""
    calls = [ToolCall(name=action["name"], arguments=action["kwargs"]) for action in task.data["actions"]]
    outputs = task.data["outputs"]
    home = dict.fromkeys(ADDRESS, "nowhere")
    move = ToolCall(name="modify_user_address", arguments={"user_id": task.data["user_id"], **home})
    found: dict[str, Sequence[Turn]] = {"one address more": [move, *calls, _finish(outputs)]}
    if calls and calls[-1].name != TRANSFER:
        found["hands over"] = [ToolCall(name=TRANSFER, arguments={"summary": ", ".join(outputs) or "please help"})]
    if any(call.name in WRITES for call in calls):
        found["the answer only"] = [_finish(outputs)]
    if outputs:
        found["the writes only"] = [*calls, _finish([])]
        found["every number"] = [*calls, _finish([*map(str, range(2000)), *(f"{n / 100:.2f}" for n in range(20_000))])]
    return found


def _finish(outputs: Sequence[str]) -> ToolCall:
    return ToolCall(name="finish", arguments={"answer": ", ".join(outputs)})
