"""What must hold of every environment: one function each, over a `Case`. It returns what it measured, in a few words.

It raises `Violation` where the property does not hold, `Inapplicable` where the environment has nothing to hold it to.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from agentrl_jax.protocol import Action, Environment, EnvironmentRef, Observation, Status, Suite, Task, ToolCall

from ..transcripts import action_of, observation_hash, texts
from . import agents, elsewhere

SPLITS = ("train", "validation", "heldout")
MARK, NUMBER = "canary7q3x", 918273645


class Violation(AssertionError):
    """The property does not hold; the message is one line for the author."""


class Inapplicable(Exception):
    """There is nothing to hold the property to; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An environment and the tasks it is held to. `ref` None: it has no name, so nothing is tried in another process."""

    suite: Suite
    tasks: tuple[Task, ...]
    ref: EnvironmentRef | None = None
    seed: int = 0
    splits: Mapping[str, tuple[Task, ...]] = field(default_factory=dict)


Property = Callable[[Case], str]


def reference_scores_full(case: Case) -> str:
    """The reference solution succeeds on every task, within the budget, and ends it."""
    solve = _solve(case)
    budget = case.suite.spec.budget
    writing = {tool.name for tool in case.suite.spec.tools if tool.writes}
    for task in case.tasks:
        script = list(solve(task))
        played = agents.play(case.suite, task, script, case.seed)
        _require(played.verdict.success, task, f"the reference solution did not succeed: {_why(played)}")
        _require(played.observations[-1].terminated, task, "the reference solution's last turn does not end the task")
        _require(len(played.actions) == len(script), task, "the task is over before the reference solution is")
        calls = [item for item in script if isinstance(item, ToolCall)]
        writes = sum(call.name in writing for call in calls)
        for name, spent, limit in (
            ("steps", len(script), budget.steps), ("tool_calls", len(calls), budget.tool_calls),
            ("write_actions", writes, budget.write_actions),
        ):  # fmt: skip
            _require(spent <= limit, task, f"the reference solution takes {spent} {name}, the budget allows {limit}")
    return f"{len(case.tasks)} tasks"


def null_agent_fails(case: Case) -> str:
    """Stopping at once, saying nothing, and finishing at once are no success."""
    return _none_succeeds(case, lambda task, opening: agents.idle_scripts(case.suite))


def random_agent_fails(case: Case) -> str:
    """Well-formed random calls raise nothing and succeed no oftener than the suite says that luck does."""
    lucky = total = 0
    for task, attempt in itertools.product(case.tasks, range(2)):
        rng = random.Random(f"{case.seed}/{task.id}/{attempt}")
        lucky += agents.play(case.suite, task, agents.random_script(case.suite, rng), case.seed).verdict.success
        total += 1
    allowed = case.suite.chance
    if lucky > allowed * total + 3 * (allowed * (1 - allowed) * total) ** 0.5:
        raise Violation(f"{lucky} of {total} random episodes succeeded; the suite says that chance={allowed:g}")
    return f"{lucky} of {total} episodes succeeded, chance={allowed:g}"


def attackers_fail(case: Case) -> str:
    """No script that tries to be scored without solving the task succeeds: conformance's own, and the suite's."""
    return _none_succeeds(case, lambda task, opening: agents.attack_scripts(case.suite, task, opening))


def same_seed_same_transcript(case: Case) -> str:
    """The same task, seed and actions give the same observations and states, in another instance too."""
    turns = 0
    for task, (name, script) in itertools.product(case.tasks, _scripts(case)):
        one, two = (agents.play(case.suite, task, script(task), case.seed) for _ in range(2))
        where = _difference(one.transcript, two.transcript, len(one.observations))
        _require(where is None, task, f"{name}, played twice, differs at {where}")
        _require(one.verdict == two.verdict, task, f"{name}, played twice, is judged in two ways")
        turns += len(one.actions)
    return f"{turns} turns twice"


def other_process_same_transcript(case: Case) -> str:
    """A fresh process in another folder, with another hash seed, gives the same transcript."""
    here = [_elsewhere(case).digest_of(case.suite, task, case.seed) for task in case.tasks]
    there = _elsewhere(case).digests
    for task, ours, theirs in zip(case.tasks, here, there, strict=True):
        _require(ours == theirs, task, "another process sees other observations, states or tasks")
    return f"{len(there)} tasks"


def no_jax_is_imported(case: Case) -> str:
    """Loading the suite and playing in it imports no JAX: a worker must stay small and off the accelerator."""
    found = _elsewhere(case).loaded
    if found:
        raise Violation(f"a process that played in it has imported {', '.join(found)}")
    return "a fresh process"


def restore_is_exact(case: Case) -> str:
    """A snapshot restores into any instance: the same hash, then the same observations and states to the end."""
    _forkable(case)
    points = 0
    for task, (_, script) in itertools.product(case.tasks, _scripts(case)[:1]):
        turns = list(script(task))
        used, kept = case.suite.make(), case.suite.make()
        try:
            kept.reset(case.tasks[-1], case.seed + 1)  # restored into below: what an instance held before is gone
            used.reset(task, case.seed)
            for cut in sorted({0, len(turns) // 2, max(len(turns) - 1, 0)}):
                _check_restore(case, task, used, kept, turns, cut)
                points += 1
        finally:
            used.close()
            kept.close()
    return f"{points} snapshots"


def siblings_are_isolated(case: Case) -> str:
    """Two forks of one state see neither each other nor what they were forked from."""
    _forkable(case)
    for task, (_, script) in itertools.product(case.tasks, _scripts(case)[:1]):
        turns = list(script(task))
        cut = len(turns) // 2
        origin, one, two = (case.suite.make() for _ in range(3))
        try:
            origin.reset(task, case.seed)
            agents.go_on(origin, turns[:cut])
            snapshot = origin.snapshot()
            one.restore(snapshot)
            two.restore(snapshot)
            first = agents.go_on(one, turns[cut:])
            for name, other in (("its sibling", two), ("what it was forked from", origin)):
                _require(other.snapshot().hash == snapshot.hash, task, f"what a fork does changes {name}")
            _require(agents.go_on(two, turns[cut:]) == first, task, "two forks that do the same come to different ends")
            one.close()
            _require(agents.go_on(origin, turns[cut:]) == first, task, "a closed fork changes what it was forked from")
        finally:
            for environment in (origin, one, two):
                environment.close()
    return f"{len(case.tasks)} states, two forks each"


def hash_tells_states_apart(case: Case) -> str:
    """A state hash is a function of the state, and states with equal hashes answer alike."""
    _forkable(case)
    compared = 0
    for task in case.tasks:
        (_, script), *_ = _scripts(case)
        environment = case.suite.make()
        try:
            environment.reset(task, case.seed)
            start = environment.snapshot()
            _require(environment.snapshot().hash == start.hash, task, "two snapshots of one state have different hashes")
            agents.go_on(environment, list(script(task)))
            end = environment.snapshot()
            _require(environment.snapshot().hash == end.hash, task, "two snapshots of one state have different hashes")
            if start.hash == end.hash:
                futures = []
                for snapshot in (start, end):
                    environment.restore(snapshot)
                    futures.append(agents.go_on(environment, list(script(task))))
                _require(futures[0] == futures[1], task, "two states of one hash answer differently")
            compared += 1
        finally:
            environment.close()
    return f"{compared} episodes"


def nothing_happens_after_the_end(case: Case) -> str:
    """Once terminated, every action is an invalid action, answered as terminated, and the state stays as it is."""
    ended = 0
    for task, (_, script) in itertools.product(case.tasks, _scripts(case)[:1]):
        environment = case.suite.make()
        try:
            environment.reset(task, case.seed)
            agents.go_on(environment, list(script(task)))
            rng = random.Random(case.seed)
            probes = [action_of(agents.random_call(tool, rng)) for tool in case.suite.spec.tools]
            probes += [Action(text="again"), Action(text="again =", error="unreadable")]
            before = environment.snapshot().hash
            over = environment.step(probes[0])
            if not over.terminated:
                continue
            ended += 1
            for probe in probes:
                answer = environment.step(probe)
                shown = f"after the end, {probe.text[:60]!r}"
                _require(answer.terminated, task, f"{shown} is answered as if the task went on")
                _require(answer.status is Status.INVALID_ACTION, task, f"{shown} has status {answer.status}")
                _require(environment.snapshot().hash == before, task, f"{shown} changes the state")
        finally:
            environment.close()
    if not ended:
        raise Inapplicable("no script came to an end")
    return f"{ended} ended episodes"


def ends_are_honest(case: Case) -> str:
    """Only the end is called one: no first observation, never terminated and truncated at once, never taken back."""
    for task, (name, script) in itertools.product(case.tasks, _scripts(case)):
        environment = case.suite.make()
        try:
            seen = [environment.reset(task, case.seed)]
            _require(not (seen[0].terminated or seen[0].truncated), task, "reset answers that the task is over")
            _require(bool(seen[0].content), task, "reset says nothing")
            for item in [*itertools.islice(script(task), 64), "", ""]:
                seen.append(environment.step(action_of(item)))
                last, one_before = seen[-1], seen[-2]
                _require(not (last.terminated and last.truncated), task, f"{name}: terminated and truncated at once")
                taken_back = (one_before.terminated and not last.terminated) or (
                    one_before.truncated and not (last.truncated or last.terminated)
                )
                _require(not taken_back, task, f"{name}: the end is taken back one action later")
        finally:
            environment.close()
    return f"{len(case.tasks)} tasks"


def close_is_safe(case: Case) -> str:
    """`close` may be called twice, at any moment: before `reset`, in the middle, after an exception or a cancellation
    within `reset` and `step`; `reset` gives the first observation again."""
    cancelled = 0
    for task in case.tasks[:1]:
        fresh = case.suite.make()
        fresh.close()
        fresh.close()
        (_, script), *_ = _scripts(case)
        first = next(iter(script(task)), "")
        environment = case.suite.make()
        try:
            opening = observation_hash(environment.reset(task, case.seed))
            environment.step(action_of(first))
            again = observation_hash(environment.reset(task, case.seed))
            _require(again == opening, task, "a second reset gives another first observation")
            environment.step(action_of(first))
        finally:
            environment.close()
            environment.close()
        for share in (0.0, 0.5, 1.0):
            cancelled += _cancel(case, task, lambda one, task=task: one.reset(task, case.seed), share, opened=False)
            cancelled += _cancel(case, task, lambda one: one.step(action_of(first)), share, opened=True)
    return f"closed twice; cancelled in {cancelled} places"


def nothing_is_left_behind(case: Case) -> str:
    """A closed episode leaves no process, thread or open file; what is shared by instances may stay after the first."""
    task, (_, script) = case.tasks[0], _scripts(case)[0]
    counts = []
    for _ in range(3):
        agents.play(case.suite, task, script(task), case.seed)
        gc.collect()
        counts.append({"processes": _children(), "threads": threading.active_count(), "open files": _descriptors()})
    grown = [f"{name} {counts[0][name]} -> {counts[2][name]}" for name in counts[0] if counts[2][name] > counts[0][name]]
    _require(not grown, task, f"each episode leaves something behind: {', '.join(grown)}")
    return ", ".join(f"{value} {name}" for name, value in counts[2].items())


def records_travel(case: Case) -> str:
    """Tasks, specs, observations, snapshots, verdicts and the reference pickle; tasks survive JSON, as receipts hold
    them, and give the same transcript after it."""
    suite = case.suite
    for value in (suite.spec, case.ref, *case.tasks):
        _require(pickle.loads(pickle.dumps(value)) == value, None, f"{value!r:.60} changes when it is pickled")
    json.dumps([dict(tool.parameters) for tool in suite.spec.tools])
    (_, script), *_ = _scripts(case)
    for task in case.tasks:
        played = agents.play(suite, task, script(task), case.seed)
        for value in (*played.observations, *played.actions, played.final, played.verdict):
            _require(pickle.loads(pickle.dumps(value)) == value, task, f"{value!r:.60} changes when it is pickled")
        json.dumps([dict(played.verdict.diagnostics), list(played.verdict.evidence)])
        texts(played.observations).encode()  # what does not encode cannot be read by a tokenizer
        thawed = replace(task, data=json.loads(json.dumps(dict(task.data))))
        again = agents.play(suite, thawed, script(task), case.seed)
        _require(again.transcript == played.transcript, task, "the task, read back from JSON, gives another transcript")
        _require(again.verdict == played.verdict, task, "the task, read back from JSON, is judged differently")
    return f"{len(case.tasks)} tasks"


def bad_calls_are_answered(case: Case) -> str:
    """Unknown tools, missing, extra and wrongly typed arguments and unreadable turns are invalid actions that say
    something; nothing that a policy can write raises."""
    task, rng = case.tasks[0], random.Random(case.seed)
    tools = case.suite.spec.tools
    bad = [("an unknown tool", action_of(ToolCall(name="no_such_tool", arguments={"x": 1})))]
    bad += [("an unreadable turn", Action(text="call =", error="expected key=value"))]
    bad += [(name, action_of(call)) for tool in tools for name, call in agents.wrong_calls(tool, rng)]
    odd = [("plain text", Action(text="I would rather talk.")), ("empty text", Action(text=""))]
    odd += [(name, action_of(call)) for tool in tools for name, call in agents.strange_calls(tool, rng)]
    environment = case.suite.make()
    try:
        over = True
        for name, action in (*bad, *odd):
            if over:
                environment.reset(task, case.seed)
            answer = _step(environment, action, task, name)
            over = answer.terminated or answer.truncated
            if (name, action) in bad:
                _require(answer.status is Status.INVALID_ACTION, task, f"{name} is answered with status {answer.status}")
                _require(any(message.content for message in answer.content), task, f"{name} is answered with nothing")
                _require(not answer.terminated, task, f"{name} ends the task")
            _encodes(answer, task, name)
    finally:
        environment.close()
    return f"{len(bad)} bad calls, {len(odd)} strange ones"


def calls_are_answered_in_order(case: Case) -> str:
    """Several calls in one action get one tool message each, in order, and do what they do one by one."""
    compared = 0
    for task in case.tasks:
        calls = [item for item in _scripts(case)[0][1](task) if isinstance(item, ToolCall)][:12]
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
        _require(len(got) == len(asked), task, f"{len(asked)} calls in one action got {len(got)} tool messages")
        alone = [message.content for seen in single.observations[1:] for message in seen.content if message.role == "tool"]
        _require(got[:-1] == alone, task, "calls in one action are answered otherwise than one by one")
        _require(answer.status is Status.INVALID_ACTION, task, f"an unknown tool among calls has status {answer.status}")
        compared += len(asked)
    return f"{compared} calls"


def splits_are_disjoint(case: Case) -> str:
    """Tasks are distinct, splits share none (by id, and by what is asked together with how it is solved), the same
    seed draws the same tasks, and an unknown split is an error that names the known ones."""
    where: dict[tuple[str, str], str] = {}
    for split, tasks in case.splits.items():
        for task in tasks:
            _require(task.split == split, task, f"a task of {split!r} says that it is of {task.split!r}")
            for key in (("id", task.id), ("content", _content(case, task))):
                _require(key not in where, task, f"a second task with this {key[0]}: one is in {where.get(key)!r}")
                where[key] = split
        again = case.suite.tasks(split, len(tasks), case.seed)
        _require(tuple(again) == tuple(tasks), None, f"the tasks of {split!r} differ when drawn twice with one seed")
    try:
        case.suite.tasks("no_such_split", 1, 0)
    except ValueError as error:
        _require("heldout" in str(error), None, f"an unknown split's error names no known one: {error}")
    else:
        raise Violation("an unknown split is no error")
    return ", ".join(f"{len(tasks)} {split}" for split, tasks in case.splits.items())


def hidden_data_stays_hidden(case: Case) -> str:
    """What the policy must not see is replaced by a canary, the episode is played as before, and nothing shows it.

    Hidden are the fields of `task.data` that `Suite.hidden` names; where it names none, the values that the reference
    solution's finishing calls consist of.
    """
    watched = 0
    for task, (_, script) in itertools.product(case.tasks, _scripts(case)[:1]):
        turns = list(script(task))
        spoken = {_plain(value) for item in turns if _finishes(case, item) for value in _leaves(item.arguments)}
        for path in _hidden(case, task, " ".join(spoken)):
            marked, shown = _with_canary(task, path)
            try:
                seen = _watch(case, marked, turns)
            except Exception:
                continue  # the environment cannot live with the canary: this place tells nothing
            watched += 1
            name = ".".join(map(str, path))
            _require(shown not in seen, task, f"task.data[{name}] is hidden, yet the policy is shown it")
    if not watched:
        raise Inapplicable("no value of task.data is the answer as it stands, and Suite.hidden names none")
    return f"{watched} hidden values"


def verdicts_are_measurements(case: Case) -> str:
    """Judging twice gives the same; outcome and quality are None or from 0 to 1; what was not done is no success."""
    for task, (name, script) in itertools.product(case.tasks, _scripts(case)):
        played = agents.play(case.suite, task, script(task), case.seed)
        again = case.suite.verify(task, played.initial, played.actions, played.final)
        _require(again == played.verdict, task, f"{name}, judged twice, gets two verdicts")
        for field_name in ("outcome", "quality"):
            score = getattr(again, field_name)
            fine = score is None or (isinstance(score, bool | int | float) and 0.0 <= score <= 1.0)
            _require(fine, task, f"{name}: {field_name}={score!r}; expected None or a number from 0 to 1")
    return f"{len(case.tasks)} tasks"


PROPERTIES: tuple[Property, ...] = (
    reference_scores_full, null_agent_fails, random_agent_fails, attackers_fail, same_seed_same_transcript,
    other_process_same_transcript, restore_is_exact, siblings_are_isolated, hash_tells_states_apart,
    nothing_happens_after_the_end, ends_are_honest, close_is_safe, nothing_is_left_behind, records_travel,
    no_jax_is_imported, bad_calls_are_answered, calls_are_answered_in_order, splits_are_disjoint,
    hidden_data_stays_hidden, verdicts_are_measurements,
)  # fmt: skip


def _require(holds: bool, task: Task | None, reason: str) -> None:
    if not holds:
        raise Violation(f"{task.id}: {reason}" if task is not None else reason)


def _solve(case: Case) -> Callable[[Task], Sequence[ToolCall | str]]:
    if case.suite.solve is None:
        raise Inapplicable("the suite has no reference solution")
    return case.suite.solve


def _scripts(case: Case) -> list[tuple[str, Callable[[Task], Any]]]:
    """What to play: the reference solution first, where there is one, and random calls."""

    def at_random(task: Task) -> list[ToolCall]:
        return list(agents.random_script(case.suite, random.Random(f"{case.seed}/{task.id}")))

    solve = case.suite.solve
    return [*([("the reference solution", solve)] if solve is not None else []), ("a random agent", at_random)]


def _why(played: agents.Played) -> str:
    broken = [f"{check.name} broken ({check.evidence[:80]})" for check in played.verdict.constraints if not check.passed]
    said = texts(played.observations[-1:]).replace("\n", " ")
    return "; ".join([*broken, f"outcome {played.verdict.outcome}", f"last answer {said[:80]!r}"])


def _none_succeeds(case: Case, scripts: Callable[[Task, Observation], Mapping[str, agents.Script]]) -> str:
    names: set[str] = set()
    for task in case.tasks:
        opening = agents.play(case.suite, task, [], case.seed).observations[0]
        for name, script in scripts(task, opening).items():
            played = agents.play(case.suite, task, script, case.seed)
            _require(not played.verdict.success, task, f"{name!r} succeeds")
            names.add(name)
    if not names:
        raise Inapplicable("no tool finishes the task, and Suite.attacks names none")
    return f"{len(names)} scripts"


def _difference(one: Sequence[str], two: Sequence[str], observations: int) -> str | None:
    for index, (left, right) in enumerate(itertools.zip_longest(one, two)):
        if left != right:
            kind, turn = ("observation", index) if index < observations else ("state", index - observations)
            return f"the {kind} after {'reset' if turn == 0 else f'turn {turn}'}"
    return None


def _elsewhere(case: Case) -> elsewhere.Elsewhere:
    if case.ref is None:
        raise Inapplicable("the suite has no name by which another process could load it")
    return elsewhere.visit(case.ref, case.tasks, case.seed)


def _forkable(case: Case) -> None:
    if case.suite.spec.fork == "none":
        raise Inapplicable("the environment says fork='none'")


def _check_restore(case: Case, task: Task, used: Environment, kept: Environment, turns: list, cut: int) -> None:
    used.reset(task, case.seed)
    agents.go_on(used, turns[:cut])
    snapshot = pickle.loads(pickle.dumps(used.snapshot()))
    kept.restore(snapshot)
    _require(kept.snapshot().hash == snapshot.hash, task, f"restored after turn {cut}, the state has another hash")
    expected, got = (agents.go_on(environment, turns[cut:]) for environment in (used, kept))
    _require(expected[0] == got[0], task, f"restored after turn {cut}, it gives other observations")
    _require(expected[1] == got[1], task, f"restored after turn {cut}, it comes to another state")


class _Cancelled(BaseException):
    """What a deadline or Ctrl-C raises in the middle of a call."""


def _cancel(case: Case, task: Task, call: Callable[[Environment], Any], share: float, *, opened: bool) -> bool:
    """Cancels `call` at a share of the function calls within the environment's own package, then closes twice.
    Returns whether it was cancelled."""

    def run(stop_at: int | None) -> tuple[int, bool]:
        environment, count, cancelled = case.suite.make(), 0, False
        module = sys.modules[type(environment).__module__]
        folder = str(Path(getattr(module, "__file__", None) or __file__).parent)

        def trace(frame: FrameType, event: str, _: Any) -> None:
            nonlocal count
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


def _content(case: Case, task: Task) -> str:
    """What a task asks and how it is solved: two tasks that share both are one task."""
    opening = agents.play(case.suite, task, [], case.seed).observations[0]
    solution = [repr(item) for item in case.suite.solve(task)] if case.suite.solve else [json.dumps(dict(task.data))]
    return observation_hash(opening) + "".join(solution)


def _finishes(case: Case, item: ToolCall | str) -> bool:
    return isinstance(item, ToolCall) and item.name in case.suite.spec.budget.finishing


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _paths(item, (*path, key))]
    if isinstance(value, list | tuple):
        return [found for index, item in enumerate(value) for found in _paths(item, (*path, index))]
    return [path] if isinstance(value, str | int | float) and not isinstance(value, bool) else []


def _plain(value: Any) -> str:
    return " ".join(str(value).split()).lower()


def _hidden(case: Case, task: Task, spoken: str) -> list[tuple]:
    """Where in `task.data` the canaries go."""
    if case.suite.hidden:
        return [path for path in _paths(task.data) if path[0] in case.suite.hidden][:16]
    answer = [path for path in _paths(task.data) if (plain := _plain(_at(task.data, path))) and plain in spoken]
    return answer[:16]


def _at(value: Any, path: tuple) -> Any:
    for key in path:
        value = value[key]
    return value


def _with_canary(task: Task, path: tuple) -> tuple[Task, str]:
    """The task with another value at `path`, and the text by which it would be known."""
    canary: Any = MARK if isinstance(_at(task.data, path), str) else NUMBER

    def put(value: Any, rest: tuple) -> Any:
        if not rest:
            return canary
        if isinstance(value, Mapping):
            return {key: put(item, rest[1:]) if key == rest[0] else item for key, item in value.items()}
        return [put(item, rest[1:]) if index == rest[0] else item for index, item in enumerate(value)]

    return replace(task, data=put(task.data, path)), str(canary)


def _watch(case: Case, task: Task, turns: list) -> str:
    """All that a policy is shown: the first messages, answers to bad calls, and the episode."""
    environment = case.suite.make()
    try:
        seen = [environment.reset(task, case.seed)]
        for probe in (Action(text="?", error="unreadable"), action_of(ToolCall(name="no_such_tool")), *map(action_of, turns)):
            seen.append(environment.step(probe))
            if seen[-1].terminated or seen[-1].truncated:
                break
    finally:
        environment.close()
    return texts(seen)
