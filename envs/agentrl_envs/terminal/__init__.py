"""A shell in a sandboxed workspace: change the files as asked, then call finish; the end state decides.

`suite(...)` is the whole interface. Commands of a policy run in a sandbox only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task, ToolCall

from . import attacks, env, generated, nl2bash, verifier
from .machine import missing

__all__ = ["missing", "suite"]
VERSION = "1"
SOURCES = {"generated": generated.tasks, "nl2bash": nl2bash.tasks}


def suite(source: str = "generated", backend: str = "auto", max_calls: int = 12) -> Suite:
    """The terminal suite.

    `source`: "generated" (seeded trees, 13 kinds of request, any number of tasks) or "nl2bash" (requests over four
    file trees, each with a gold command). `backend`: the sandbox's. ValueError for an unknown option;
    `data.DataError` if the data set is not here.
    """
    if source not in SOURCES:
        raise ValueError(f"terminal: source={source!r} is not known; expected one of {', '.join(SOURCES)}")
    if max_calls < 2:
        raise ValueError(f"terminal: max_calls={max_calls!r}; the reference solution needs 2")
    spec = EnvironmentSpec(
        name="terminal",
        version=VERSION,
        tools=env.TOOLS,
        budget=Budget(steps=max_calls, tool_calls=max_calls, write_actions=max_calls, retries=4, finishing=("finish",)),
        fork="native",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=partial(env.TerminalEnvironment, spec, backend),
        tasks=SOURCES[source],
        verify=partial(verifier.verify, backend),
        verifier_version=verifier.VERSION,
        solve=solve,
        attacks=attacks.attacks,
    )


def solve(task: Task) -> Sequence[ToolCall | str]:
    """The reference commands, then `finish`."""
    commands = [ToolCall(name="run", arguments={"command": command}) for command in task.data["commands"]]
    return (*commands, ToolCall(name="finish"))
