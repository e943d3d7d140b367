"""Proofs in a Metamath database: derive facts step by step until one is the goal, and submit.

A checker of a page, `checker.py`, decides; a proof may use only what stands before the theorem. By default theorems
are generated over a small calculus that is part of the package; `source` names a database of the `metamath` set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task, Tool, ToolCall

from ..answering import tool
from . import generated, tasks, verifier
from .env import ProofEnvironment
from .tasks import SOURCES, Options

__all__ = ["SOURCES", "suite"]
VERSION = "1"
TEXT = {"type": "string", "maxLength": 2000}
TOOLS: tuple[Tool, ...] = (
    tool(
        "apply",
        "Derive a fact: a label, the numbers of the facts it uses, and values of variables these do not fix.",
        {
            "step": {"type": "string", "maxLength": 80},
            "uses": {"type": "array", "items": {"type": "integer"}, "maxItems": 32},
            "values": {"type": "object", "additionalProperties": TEXT},
        },
        optional=("uses", "values"),
    ),
    tool("goal", "Show the goal, the hypotheses and the facts.", {}),
    tool("find", "List statements that hold a text, the latest first.", {"text": {"type": "string", "maxLength": 200}}),
    tool("undo", "Take the latest facts back.", {"count": {"type": "integer", "minimum": 1, "maximum": 1000}}),
    tool("submit", "Say that the goal is among the facts. Ends the task.", {}),
)


def suite(
    source: str = "calculus", kinds: Sequence[str] = generated.KINDS, most_steps: int = 24, facts: int = 64
) -> Suite:
    """The proof suite.

    `source`: "calculus" (generated theorems, no data set), or a database: hol (higher-order logic), ql (quantum logic).
    `kinds` of generated theorems: "infer", "evaluate". `most_steps` leaves out theorems whose own proof is longer;
    `facts` is how many an episode may hold. Raises `data.DataError` if the data set is neither here nor can be
    fetched, ValueError for an unknown option.
    """
    options = Options(source=source, kinds=tuple(kinds), most_steps=most_steps, facts=facts)
    tasks.database(source)
    calls = 2 * facts
    spec = EnvironmentSpec(
        name="proof",
        version=VERSION,
        tools=TOOLS,
        budget=Budget(steps=calls, tool_calls=calls, write_actions=0, retries=8, finishing=("submit",)),
        fork="native",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=partial(ProofEnvironment, spec, options),
        tasks=partial(tasks.tasks, options),
        verify=verifier.verify,
        verifier_version=verifier.VERSION,
        solve=_solve,
        attacks=_attacks,
        hidden=("proof",),
    )


def _solve(task: Task) -> Sequence[ToolCall]:
    """The task's own proof, step by step."""
    moves = [_apply(step, [use + 1 for use in uses], values) for step, uses, values in task.data["proof"]]
    return (*moves, ToolCall(name="submit"))


def _apply(step: str, uses: Sequence[int] = (), values: Mapping[str, str] | None = None) -> ToolCall:
    return ToolCall(name="apply", arguments={"step": step, "uses": list(uses), "values": dict(values or {})})


def _attacks(task: Task) -> Mapping[str, Sequence[ToolCall | str]]:
    """Ways to be scored without a proof: none may succeed."""
    submit = ToolCall(name="submit")
    known = tasks.database(task.data["database"])
    later = known.order[task.data["limit"] :]
    solved = _solve(task)
    goal = task.data["goal"]
    return {
        "submit at once": [submit],
        "the theorem itself": [_apply(task.data["label"] or "theorem"), submit],
        "an unproved step": [_apply("?"), submit],
        "what stands later": [*(_apply(label) for label in (*later[:3], *later[-3:])), submit],
        "the goal as a hypothesis": [_apply(goal), _apply("goal"), _apply("|-"), submit],
        "the goal as a value": [*(_apply(label, (), {"p": goal, "a": goal}) for label in known.order[:12]), submit],
        "all but the last step": [*solved[:-2], submit],
        "steps in the wrong order": [*reversed(solved[:-1]), submit],
        "facts that are not there": [*(_apply(call.arguments["step"], [99] * 8) for call in solved[:-1]), submit],  # type: ignore[arg-type]
        "a proof without submit": [*solved[:-1]],
        "a proof taken back": [*solved[:-1], ToolCall(name="undo", arguments={"count": 1}), submit],
        "a typed variable": [*(_apply(label) for label in list(known.floats)[:4]), submit],
        "a doubling expression": [*_doubling(known.order), submit],
    }


def _doubling(labels: Sequence[str]) -> list[ToolCall]:
    long = "( p -> " * 400 + "p" + " )" * 400
    return [_apply(label, (), {"p": long}) for label in labels[-3:]]
