"""Manners: every call is answered, `close` always closes, nothing is left behind, records travel between processes."""

from __future__ import annotations

import gc
import inspect
import json
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from agentrl_jax.protocol import Action, Environment, Observation, Snapshot, Status, StopReason, Task, ToolCall

from ..transcripts import action_of, observation_hash, texts
from . import agents
from .cases import Case, Violation, require, scripts


def close_is_safe(case: Case) -> str:
    """`close` may be called twice, at any moment: before `reset`, in the middle, after an exception or a cancellation
    within `reset` and `step`; `reset` gives the first observation again."""
    cancelled = 0
    for task in case.tasks[:1]:
        fresh = case.suite.make()
        fresh.close()
        fresh.close()
        (_, script), *_ = scripts(case)
        first = next(iter(script(task)), "")
        environment = case.suite.make()
        try:
            opening = observation_hash(environment.reset(task, case.seed))
            environment.step(action_of(first))
            again = observation_hash(environment.reset(task, case.seed))
            require(again == opening, task, "a second reset gives another first observation")
            environment.step(action_of(first))
        finally:
            environment.close()
            environment.close()
        for share in (0.0, 0.5, 1.0):
            cancelled += _cancel(case, task, lambda one, task=task: one.reset(task, case.seed), share, opened=False)
            cancelled += _cancel(case, task, lambda one, first=first: one.step(action_of(first)), share, opened=True)
    return f"closed twice; cancelled in {cancelled} places"


def nothing_is_left_behind(case: Case) -> str:
    """A closed episode leaves no process, thread or open file; what is shared by instances may stay after the first."""
    task, (_, script) = case.tasks[0], scripts(case)[0]
    counts = []
    for last in (False, False, True):
        agents.play(case.suite, task, script(task), case.seed)
        if last:
            gc.collect()
        counts.append({"processes": _children(), "threads": threading.active_count(), "open files": _descriptors()})
    grown = [
        f"{name} {counts[0][name]} -> {counts[2][name]}" for name in counts[0] if counts[2][name] > counts[0][name]
    ]
    require(not grown, task, f"each episode leaves something behind: {', '.join(grown)}")
    return ", ".join(f"{value} {name}" for name, value in counts[2].items())


def records_travel(case: Case) -> str:
    """Tasks, specs, observations, snapshots, verdicts and the reference pickle; tasks survive JSON, as receipts hold
    them, and give the same transcript after it."""
    suite = case.suite
    for value in (suite.spec, case.ref, *case.tasks):
        require(pickle.loads(pickle.dumps(value)) == value, None, f"{value!r:.60} changes when it is pickled")
    json.dumps([dict(tool.parameters) for tool in suite.spec.tools])
    (_, script), *_ = scripts(case)
    for task in case.tasks:
        played = agents.play(suite, task, script(task), case.seed)
        for value in (*played.observations, *played.actions, played.final, played.verdict):
            require(pickle.loads(pickle.dumps(value)) == value, task, f"{value!r:.60} changes when it is pickled")
        json.dumps([dict(played.verdict.diagnostics), list(played.verdict.evidence)])
        texts(played.observations).encode()  # what does not encode cannot be read by a tokenizer
        thawed = replace(task, data=json.loads(json.dumps(dict(task.data))))
        again = agents.play(suite, thawed, script(task), case.seed)
        require(again.transcript == played.transcript, task, "the task, read back from JSON, gives another transcript")
        require(again.verdict == played.verdict, task, "the task, read back from JSON, is judged differently")
    return f"{len(case.tasks)} tasks"


def bad_calls_are_answered(case: Case) -> str:
    """Unknown tools, missing, extra and wrongly typed arguments and unreadable turns are invalid actions that say
    something; nothing that a policy can write raises, in a step or in the verifier."""
    task, rng = case.tasks[0], random.Random(case.seed)
    tools = case.suite.spec.tools
    bad = [("an unknown tool", action_of(ToolCall(name="no_such_tool", arguments={"x": 1})))]
    bad += [("an unreadable turn", Action(text="call =", error="expected key=value"))]
    bad += [(name, action_of(call)) for tool in tools for name, call in agents.wrong_calls(tool, rng)]
    odd = [("plain text", Action(text="I would rather talk.")), ("empty text", Action(text=""))]
    odd += [(name, action_of(call)) for tool in tools for name, call in agents.strange_calls(tool, rng)]
    environment = case.suite.make()
    try:
        over, initial, taken = True, None, []
        for name, action in (*bad, *odd):
            if over:
                _judge(case, task, environment, initial, taken)
                environment.reset(task, case.seed)
                initial, taken = environment.snapshot(), []
            taken.append(action)
            answer = _step(environment, action, task, name)
            over = answer.terminated or answer.truncated
            if (name, action) in bad:
                require(answer.status is Status.INVALID_ACTION, task, f"{name} is answered with status {answer.status}")
                require(any(message.content for message in answer.content), task, f"{name} is answered with nothing")
                require(not answer.terminated, task, f"{name} ends the task")
            _encodes(answer, task, name)
        _judge(case, task, environment, initial, taken)
    finally:
        environment.close()
    return f"{len(bad)} bad calls, {len(odd)} strange ones"


def _judge(
    case: Case, task: Task, environment: Environment, initial: Snapshot | None, actions: Sequence[Action]
) -> None:
    """An episode of odd calls is judged like any other."""
    if initial is None:
        return
    try:
        for stop in (StopReason.EARLY_STOP, StopReason.TOKEN_CAP):
            case.suite.judge(task, initial, actions, environment.snapshot(), stop)
    except Exception as error:
        last = f"{actions[-1].calls or actions[-1].text!r}"
        require(False, task, f"the verifier raises {type(error).__name__} after calls such as {last:.200}: {error}")


def calls_are_answered_in_order(case: Case) -> str:
    """Several calls in one action get one tool message each, in order, and do what they do one by one."""
    compared = 0
    for task in case.tasks:
        calls = [item for item in scripts(case)[0][1](task) if isinstance(item, ToolCall)][:12]
        if len(calls) < 2:
            calls = [agents.random_call(tool, random.Random(case.seed)) for tool in case.suite.spec.tools[:2]] * 2
        single = agents.play(case.suite, task, calls, case.seed)
        environment = case.suite.make()
        try:
            environment.reset(task, case.seed)
            asked = (*calls[: len(single.actions)], ToolCall(name="no_such_tool"))
            answer = environment.step(Action(text="", calls=asked))
        finally:
            environment.close()
        got = [message.content for message in answer.content if message.role == "tool"]
        require(len(got) == len(asked), task, f"{len(asked)} calls in one action got {len(got)} tool messages")
        alone = [
            message.content for seen in single.observations[1:] for message in seen.content if message.role == "tool"
        ]
        require(got[:-1] == alone, task, "calls in one action are answered otherwise than one by one")
        require(answer.status is Status.INVALID_ACTION, task, f"an unknown tool among calls has status {answer.status}")
        compared += len(asked)
    return f"{compared} calls"


class _Cancelled(BaseException):
    """What a deadline or Ctrl-C raises in the middle of a call."""


def _cancel(case: Case, task: Task, call: Callable[[Environment], Any], share: float, *, opened: bool) -> bool:
    """Cancels `call` at a share of the function calls within the environment's own package, then closes twice.
    Returns whether it was cancelled."""

    def run(stop_at: int | None) -> tuple[int, bool]:
        environment, count, cancelled = case.suite.make(), 0, False
        module = sys.modules.get(type(environment).__module__)
        file = getattr(module, "__file__", None)
        folder = str(Path(file).parent) if file else type(environment).step.__code__.co_filename

        def trace(frame: FrameType, event: str, _: Any) -> None:
            nonlocal count
            if frame.f_code.co_flags & inspect.CO_GENERATOR:  # raised where one is put away, it would reach nobody
                return
            if event == "call" and frame.f_code.co_filename.startswith(folder):
                count += 1
                if count == stop_at:
                    raise _Cancelled

        try:
            if opened:
                environment.reset(task, case.seed)
            before = sys.gettrace()
            sys.settrace(trace)  # type: ignore[arg-type]
            try:
                call(environment)
            except _Cancelled:
                cancelled = True
            finally:
                sys.settrace(before)
        finally:
            environment.close()
            environment.close()
        return count, cancelled

    total, _ = run(None)
    return run(1 + int(share * (total - 1)))[1] if total else False


def _children() -> int:
    """Child processes of this one, ended ones that nobody has waited for too."""
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _step(environment: Environment, action: Action, task: Task, name: str) -> Observation:
    try:
        return environment.step(action)
    except Exception as error:
        raise Violation(f"{task.id}: {name} raises {type(error).__name__}: {error}"[:300]) from error


def _encodes(answer: Observation, task: Task, name: str) -> None:
    try:
        texts([answer]).encode()
    except UnicodeEncodeError:
        raise Violation(f"{task.id}: {name} is answered with text that no tokenizer can read") from None
