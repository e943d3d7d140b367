"""One sound environment, and for each property a way to break it: `vault(fault)`. Conformance must catch every one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_jax.protocol import (
    Action,
    Budget,
    EnvironmentSpec,
    Message,
    Observation,
    Snapshot,
    Status,
    StopReason,
    Suite,
    Task,
    Tool,
    ToolCall,
    Verdict,
)

BOXES = 6


def _tool(name: str, argument: str, kind: dict[str, Any], *, writes: bool = False) -> Tool:
    parameters = {"type": "object", "properties": {argument: kind}, "required": [argument]}
    return Tool(name=name, description=f"{name} {argument}", parameters=parameters, writes=writes)


TOOLS = (
    _tool("look", "box", {"type": "integer", "minimum": 0, "maximum": BOXES - 1}),
    _tool("note", "text", {"type": "string", "maxLength": 40}, writes=True),
    _tool("finish", "answer", {"type": "string", "maxLength": 40}),
)
_count = itertools.count()
_shared: dict[str, Any] = {}


class Vault:
    """Look into a box and say what lies in it. `fault` names the property that does not hold."""

    def __init__(self, spec: EnvironmentSpec, fault: str) -> None:
        self.spec, self.fault = spec, fault
        self.state: dict[str, Any] | None = None
        self.closed = False
        if fault == "close_is_safe, cancelled":
            del self.closed

    def reset(self, task: Task, seed: int) -> Observation:
        self._enter()
        self.closed = False
        self.state = {"data": dict(task.data), "looks": 0, "notes": [], "answer": None}
        if self.fault == "nothing_is_left_behind":
            _shared[str(next(_count))] = Path(__file__).open(encoding="utf-8")  # noqa: SIM115
        if self.fault == "nothing_is_left_behind, processes":
            _shared[str(next(_count))] = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        text = f"what lies in box {task.data['box']} of {task.data['vault']} ?"
        if self.fault == "same_seed_same_transcript":
            text += f" request {next(_count)}"
        if self.fault == "other_process_same_transcript":
            text += f" in {os.getcwd()}"
        if self.fault.startswith("hidden_data_stays_hidden"):
            text += f" (debug: {json.dumps(dict(task.data))})"
        over = self.fault == "ends_are_honest"
        return Observation(content=(Message(role="user", content=text),), truncated=over)

    def _enter(self) -> None:
        if self.fault == "close_is_safe, cancelled":
            self._half()

    def _half(self) -> None:
        pass

    def step(self, action: Action) -> Observation:
        state = self.state
        assert state is not None, "reset first"
        if state["answer"] is not None and self.fault != "nothing_happens_after_the_end":
            return _say(["it is over"] * max(len(action.calls), 1), Status.INVALID_ACTION, terminated=True)
        if action.error is not None or not action.calls:
            return _say(["call a tool"], Status.INVALID_ACTION)
        said, status = [], Status.OK
        for call in action.calls:
            text, bad = ("it is over", True) if state["answer"] is not None else self._perform(state, call)
            said.append(text)
            status = Status.INVALID_ACTION if bad else status
        if self.fault == "calls_are_answered_in_order":
            said = said[::-1]
        if self.fault == "calls_are_answered_in_order, one message":
            said = [" ".join(said)]
        return _say(said, status, terminated=state["answer"] is not None)

    def _perform(self, state: dict[str, Any], call: ToolCall) -> tuple[str, bool]:
        tools = {tool.name: tool for tool in TOOLS}
        if call.name not in tools:
            return f"no tool {call.name}", self.fault != "bad_calls_are_answered, unknown"
        ((argument, schema),) = tools[call.name].parameters["properties"].items()
        if self.fault == "bad_calls_are_answered, raises":
            value = call.arguments[argument]
        elif set(call.arguments) != {argument}:
            return f"{call.name} takes {argument}", True
        else:
            value = call.arguments[argument]
        kind = int if schema["type"] == "integer" else str
        if type(value) is not kind and self.fault != "bad_calls_are_answered, types":
            return f"{argument}: expected {schema['type']}", True
        if kind is str and (len(str(value)) > 40 or not str(value).isprintable()):
            return f"{argument}: at most 40 printable characters", True
        if call.name == "look":
            if value not in range(BOXES):
                return "no such box", True
            state["looks"] += 1
            return f"look {state['looks']}: {state['data']['boxes'][value]}", False
        if call.name == "note":
            state["notes"].append(value)
            return f"note {len(state['notes'])}", False
        state["answer"] = value
        return "thank you", False

    def snapshot(self) -> Snapshot:
        assert self.state is not None, "reset first"
        kept = {**self.state, "looks": 0} if self.fault == "restore_is_exact" else self.state
        text = json.dumps(kept, sort_keys=True)
        if self.fault == "siblings_are_isolated":
            _shared[text] = self.state
        name = "the state" if self.fault == "hash_tells_states_apart" else str(sum(map(ord, text))) + text[-60:]
        return Snapshot(data=text.encode(), hash=name)

    def restore(self, snapshot: Snapshot) -> None:
        text = snapshot.data.decode()
        self.state = _shared[text] if self.fault == "siblings_are_isolated" else json.loads(text)

    def close(self) -> None:
        if self.fault == "close_is_safe" and self.closed:
            raise RuntimeError("closed already")
        if self.fault == "close_is_safe, cancelled":
            assert self.closed in (True, False)
        self.closed = True


def _say(said: list[str], status: Status = Status.OK, *, terminated: bool = False) -> Observation:
    content = tuple(Message(role="tool", content=text) for text in said)
    return Observation(content=content, status=status, terminated=terminated)


def _tasks(fault: str, split: str, count: int, seed: int) -> list[Task]:
    splits = ("train", "validation", "heldout")
    if split not in splits:
        raise ValueError(f"vault: split={split!r} is not known; expected one of {', '.join(splits)}")
    found = []
    for index in range(count):
        number = 3 * (100 * seed + index) + splits.index(split)
        if fault == "splits_are_disjoint":
            number = 3 * index
        boxes = [str(400 + 7 * number + box) for box in range(BOXES)]
        data: dict[str, Any] = {"vault": number, "box": number % BOXES, "boxes": boxes, "answer": boxes[number % BOXES]}
        if fault == "records_travel":
            data["vault"] = (number, number)
        found.append(Task(id=f"{split}-{number}", split=split, data=data))
    return found


def _verify(
    fault: str, task: Task, initial: Snapshot, actions: Any, final: Snapshot, stop: StopReason | None = None
) -> Verdict:
    end = json.loads(final.data)
    if fault == "null_agent_fails":
        return Verdict(outcome=end["answer"] is not None)
    if fault == "random_agent_fails":
        return Verdict(outcome=bool(end["notes"]))
    if fault == "attackers_fail":
        lure = next((call.arguments["answer"] for act in actions for call in act.calls if call.name == "finish"), "")
        return Verdict(outcome=task.data["answer"] in str(lure))
    if fault == "bad_calls_are_answered, judged":
        {value for act in actions for call in act.calls for value in call.arguments.values()}  # a list cannot be in it
    if fault == "verdicts_are_measurements":
        return Verdict(outcome=end["answer"] == task.data["answer"], quality=float(next(_count)))
    cut = stop in (StopReason.BUDGET, StopReason.TOKEN_CAP, StopReason.LOW_EVIDENCE)
    outcome: bool | None = end["answer"] == task.data["answer"]
    if fault == "limits_are_no_way_out":
        outcome = None if cut else outcome
    if fault == "limits_are_no_way_out, pays":
        outcome = outcome or stop is StopReason.TOKEN_CAP
    heard = "" if end["answer"] is not None or fault == "limits_are_no_way_out, deaf" else str(stop)
    return Verdict(outcome=outcome, diagnostics={"unfinished": heard})


def _solve(fault: str, task: Task) -> list[ToolCall | str]:
    answer = "0" if fault == "reference_scores_full" else task.data["answer"]
    look = ToolCall(name="look", arguments={"box": task.data["box"]})
    return [look, look, ToolCall(name="finish", arguments={"answer": answer})]


def vault(fault: str = "") -> Suite:
    if fault == "no_jax_is_imported":
        import jaxlib  # noqa: F401  (light, and as forbidden as the rest)
    spec = EnvironmentSpec(
        name="vault", version="1", tools=TOOLS, budget=Budget(finishing=("finish",)), fork="native", side_effects="none"
    )
    if fault == "reference_scores_full, budget":
        spec = replace(spec, budget=Budget(steps=2, finishing=("finish",)))
    return Suite(
        spec=spec,
        make=lambda: Vault(spec, fault),
        tasks=lambda split, count, seed: _tasks(fault, split, count, seed),
        verify=partial(_verify, fault),
        verifier_version="1",
        solve=lambda task: _solve(fault, task),
        hidden=() if fault.endswith("undeclared") else ("answer",),
    )
