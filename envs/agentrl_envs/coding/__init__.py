"""A repository workspace: find the defect of a small package, repair it, submit; hidden cases decide.

`suite(...)` is the whole interface. Code that a policy wrote runs in a sandbox only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task, ToolCall

from .. import sandbox
from . import attacks, boxes, generated, mbpp, quixbugs, tools, verifier
from .boxes import missing
from .env import CodingEnvironment
from .packages import solution

__all__ = ["missing", "suite"]
VERSION = "1"
SOURCES = ("generated", "quixbugs", "mbpp")
SYMPTOMS = ("function", "none")


def suite(source: str = "generated", symptom: str = "function", backend: str = "auto", max_calls: int = 16) -> Suite:
    """The coding suite.

    `source`: "generated" (packages of our own, any number of tasks), "quixbugs" (23 classic algorithms) or "mbpp"
    (references with a defect put in). `symptom`: "function" names the function to repair, "none" leaves it to be
    found. `backend`: the sandbox's. ValueError for an unknown option; `data.DataError` if a data set is not here.
    """
    for name, given, known in (("source", source, SOURCES), ("symptom", symptom, SYMPTOMS)):
        if given not in known:
            raise ValueError(f"coding: {name}={given!r} is not known; expected one of {', '.join(known)}")
    if max_calls < verifier.REFERENCE_CALLS:
        raise ValueError(f"coding: max_calls={max_calls!r}; the reference solution needs {verifier.REFERENCE_CALLS}")
    spec = EnvironmentSpec(
        name="coding",
        version=VERSION,
        tools=tools.TOOLS,
        budget=Budget(steps=max_calls, tool_calls=max_calls, write_actions=6, retries=4, finishing=("submit",)),
        fork="native",
        side_effects="isolated",
    )
    drawn = {
        "generated": partial(generated.tasks, symptom),
        "quixbugs": partial(quixbugs.tasks, symptom),
        "mbpp": partial(mbpp.tasks, partial(boxes.trial, backend), symptom),
    }
    return Suite(
        spec=spec,
        make=partial(CodingEnvironment, spec, backend),
        tasks=drawn[source],
        verify=partial(verifier.verify, backend),
        verifier_version=verifier.VERSION,
        solve=solve,
        attacks=attacks.attacks,
        hidden=("hidden",),
        reap=sandbox.reap,
    )


def solve(task: Task) -> Sequence[ToolCall | str]:
    """Reads the file, makes the edit that restores it, runs the tests, submits."""
    edit = solution(task)
    return (
        ToolCall(name="read", arguments={"path": edit["path"]}),
        ToolCall(name="edit", arguments=edit),
        ToolCall(name="run_tests"),
        ToolCall(name="submit"),
    )
