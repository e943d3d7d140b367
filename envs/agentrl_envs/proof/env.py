"""The environment: a problem and the numbered facts derived so far."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from agentrl_jax.protocol import Action, EnvironmentSpec, Message, Observation, Snapshot, Status, Task, ToolCall

from ..answering import Reply, answer
from . import show
from .checker import Problem, StepError
from .facts import Move, as_json, derive, from_json
from .metamath import Symbols
from .syntax import Grammar
from .tasks import Options, problem_from, proof_of

PUBLIC = ("database", "label", "limit", "hypotheses", "goal")  # what of a task's data the environment needs


class ProofEnvironment:
    """Everything follows from the task; the episode's seed changes nothing.

    The state is the list of moves: facts are derived from it, and derived again when a snapshot is restored.
    """

    def __init__(self, spec: EnvironmentSpec, options: Options) -> None:
        self.spec = spec
        self._options = options
        self._problem: Problem | None = None
        self._grammar: Grammar | None = None
        self._shown: dict[str, Any] = {}
        self._moves: list[Move] = []
        self._facts: list[Symbols] = []
        self._wanted: list[str] = []  # hashes of the reference's facts that are not derived yet
        self._finished = False

    def reset(self, task: Task, seed: int) -> Observation:
        self._begin({name: task.data[name] for name in PUBLIC})
        problem, grammar = self._open()
        facts: list[Symbols] = []
        for move in proof_of(task):
            facts.append(derive(problem, grammar, facts, move))
        self._wanted = sorted({_mark(fact) for fact in facts})
        return Observation(content=(Message(role="user", content=show.opening(problem)),))

    def _begin(self, shown: Mapping[str, Any]) -> None:
        self.close()
        self._shown = dict(shown)
        self._problem = problem_from(shown)
        self._grammar = Grammar(self._problem)

    def step(self, action: Action) -> Observation:
        self._open()
        return answer(action, self.spec.tools, self._execute, lambda: self._finished)

    def _execute(self, call: ToolCall) -> Reply:
        problem, _ = self._open()
        arguments: Mapping[str, Any] = call.arguments
        if call.name == "apply":
            return self._apply(arguments["step"], arguments.get("uses"), arguments.get("values", {}))
        if call.name == "undo":
            left = max(0, len(self._facts) - arguments["count"])
            del self._facts[left:], self._moves[left:]
            return Reply(show.state(problem, self._facts))
        if call.name == "find":
            return Reply(show.find(problem, arguments["text"]))
        if call.name == "goal":
            return Reply(show.state(problem, self._facts))
        self._finished = True
        return Reply("submitted", terminated=True)

    def _apply(self, label: str, uses: list[int] | None, values: Mapping[str, str]) -> Reply:
        problem, grammar = self._open()
        if len(self._facts) >= self._options.facts:
            return Reply(f"there are {len(self._facts)} facts, no more fit: undo some, or submit", Status.DENIED)
        if uses is None:
            needed = show.facts_needed(problem, label)
            uses = list(range(len(self._facts) - needed + 1, len(self._facts) + 1))
        move = Move(label, tuple(use - 1 for use in uses), tuple(sorted(values.items())))
        try:
            fact = derive(problem, grammar, self._facts, move)
        except StepError as error:
            return Reply(f"does not apply: {error}", Status.DENIED, gain=0.0)
        self._facts.append(fact)
        self._moves.append(move)
        gain = float(_mark(fact) in self._wanted)
        if gain:
            self._wanted.remove(_mark(fact))
        reached = " -- this is the goal: submit" if fact == problem.goal else ""
        return Reply(f"{len(self._facts)}: {' '.join(fact)}{reached}", gain=gain)

    def snapshot(self) -> Snapshot:
        self._open()
        content = json.dumps(
            {"shown": self._shown, "moves": as_json(self._moves), "wanted": self._wanted, "finished": self._finished},
            sort_keys=True,
        ).encode()
        return Snapshot(data=content, hash=hashlib.sha256(content).hexdigest())

    def restore(self, snapshot: Snapshot) -> None:
        state = json.loads(snapshot.data)
        self._begin(state["shown"])
        problem, grammar = self._open()
        for move in from_json(state["moves"]):
            self._facts.append(derive(problem, grammar, self._facts, move))
            self._moves.append(move)
        self._wanted, self._finished = state["wanted"], state["finished"]

    def close(self) -> None:
        self._problem = self._grammar = None
        self._shown, self._moves, self._facts, self._wanted, self._finished = {}, [], [], [], False

    def _open(self) -> tuple[Problem, Grammar]:
        if self._problem is None or self._grammar is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._problem, self._grammar


def _mark(fact: Symbols) -> str:
    return hashlib.sha256(" ".join(fact).encode()).hexdigest()[:8]
