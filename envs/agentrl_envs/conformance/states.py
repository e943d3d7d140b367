"""States: episodes repeat, snapshots restore, forks are alone, and an end is an end."""

from __future__ import annotations

import itertools
import pickle
import random

from agentrl_jax.protocol import Action, Environment, Status, Task

from ..transcripts import action_of
from . import agents, elsewhere
from .cases import Case, Inapplicable, Violation, difference, forkable, require, scripts


def same_seed_same_transcript(case: Case) -> str:
    """The same task, seed and actions give the same observations and states, in another instance too."""
    turns = 0
    for task, (name, script) in itertools.product(case.tasks, scripts(case)):
        one, two = (agents.play(case.suite, task, script(task), case.seed, every_state=True) for _ in range(2))
        where = difference(one.transcript, two.transcript, len(one.observations))
        require(where is None, task, f"{name}, played twice, differs at {where}")
        require(one.verdict == two.verdict, task, f"{name}, played twice, is judged in two ways")
        turns += len(one.actions)
    return f"{turns} turns twice"


def other_process_same_transcript(case: Case) -> str:
    """A fresh process in another folder, with another hash seed, gives the same transcript."""
    here = [_elsewhere(case).digest_of(case.suite, task, case.seed) for task in case.tasks]
    there = _elsewhere(case).digests
    for task, ours, theirs in zip(case.tasks, here, there, strict=True):
        require(ours == theirs, task, "another process sees other observations, states or tasks")
    return f"{len(there)} tasks"


def no_jax_is_imported(case: Case) -> str:
    """Loading the suite and playing in it imports no JAX: a worker must stay small and off the accelerator."""
    found = _elsewhere(case).loaded
    if found:
        raise Violation(f"a process that played in it has imported {', '.join(found)}")
    return "a fresh process"


def restore_is_exact(case: Case) -> str:
    """A snapshot restores into any instance: the same hash, then the same observations and states to the end."""
    forkable(case)
    points = 0
    for task, (_, script) in itertools.product(case.tasks, scripts(case)[:1]):
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
    forkable(case)
    for task, (_, script) in itertools.product(case.tasks, scripts(case)[:1]):
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
                require(other.snapshot().hash == snapshot.hash, task, f"what a fork does changes {name}")
            require(agents.go_on(two, turns[cut:]) == first, task, "two forks that do the same come to different ends")
            one.close()
            require(agents.go_on(origin, turns[cut:]) == first, task, "a closed fork changes what it was forked from")
        finally:
            for environment in (origin, one, two):
                environment.close()
    return f"{len(case.tasks)} states, two forks each"


def hash_tells_states_apart(case: Case) -> str:
    """A state hash is a function of the state, and states with equal hashes answer alike."""
    forkable(case)
    compared = 0
    for task in case.tasks:
        (_, script), *_ = scripts(case)
        environment = case.suite.make()
        try:
            environment.reset(task, case.seed)
            start = environment.snapshot()
            require(environment.snapshot().hash == start.hash, task, "two snapshots of one state have different hashes")
            agents.go_on(environment, list(script(task)))
            end = environment.snapshot()
            require(environment.snapshot().hash == end.hash, task, "two snapshots of one state have different hashes")
            if start.hash == end.hash:
                futures = []
                for snapshot in (start, end):
                    environment.restore(snapshot)
                    futures.append(agents.go_on(environment, list(script(task))))
                require(futures[0] == futures[1], task, "two states of one hash answer differently")
            compared += 1
        finally:
            environment.close()
    return f"{compared} episodes"


def nothing_happens_after_the_end(case: Case) -> str:
    """Once terminated, every action is an invalid action, answered as terminated, and the state stays as it is."""
    ended = 0
    for task, (_, script) in itertools.product(case.tasks, scripts(case)[:1]):
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
                require(answer.terminated, task, f"{shown} is answered as if the task went on")
                require(answer.status is Status.INVALID_ACTION, task, f"{shown} has status {answer.status}")
                require(environment.snapshot().hash == before, task, f"{shown} changes the state")
        finally:
            environment.close()
    if not ended:
        raise Inapplicable("no script came to an end")
    return f"{ended} ended episodes"


def ends_are_honest(case: Case) -> str:
    """Only the end is called one: no first observation, never terminated and truncated at once, never taken back."""
    for task, (name, script) in itertools.product(case.tasks, scripts(case)):
        environment = case.suite.make()
        try:
            seen = [environment.reset(task, case.seed)]
            require(not (seen[0].terminated or seen[0].truncated), task, "reset answers that the task is over")
            require(bool(seen[0].content), task, "reset says nothing")
            for item in [*itertools.islice(script(task), 64), "", ""]:
                seen.append(environment.step(action_of(item)))
                last, one_before = seen[-1], seen[-2]
                require(not (last.terminated and last.truncated), task, f"{name}: terminated and truncated at once")
                taken_back = (one_before.terminated and not last.terminated) or (
                    one_before.truncated and not (last.truncated or last.terminated)
                )
                require(not taken_back, task, f"{name}: the end is taken back one action later")
        finally:
            environment.close()
    return f"{len(case.tasks)} tasks"


def _elsewhere(case: Case) -> elsewhere.Elsewhere:
    if case.ref is None:
        raise Inapplicable("the suite has no name by which another process could load it")
    return elsewhere.visit(case.ref, case.tasks, case.seed)


def _check_restore(case: Case, task: Task, used: Environment, kept: Environment, turns: list, cut: int) -> None:
    used.reset(task, case.seed)
    agents.go_on(used, turns[:cut])
    snapshot = pickle.loads(pickle.dumps(used.snapshot()))
    kept.restore(snapshot)
    require(kept.snapshot().hash == snapshot.hash, task, f"restored after turn {cut}, the state has another hash")
    expected, got = (agents.go_on(environment, turns[cut:]) for environment in (used, kept))
    require(expected[0] == got[0], task, f"restored after turn {cut}, it gives other observations")
    require(expected[1] == got[1], task, f"restored after turn {cut}, it comes to another state")
