"""A shell in a sandboxed workspace: change the files as asked, then call finish; the end state decides.

`suite(...)` is the whole interface. Commands of a policy run in a sandbox only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Task, ToolCall

from .. import sandbox
from . import attacks, env, generated, nl2bash, verifier
from .machine import missing

__all__ = ["KINDS", "missing", "suite"]
VERSION = "1"
SOURCES = ("generated", "nl2bash")
KINDS = tuple(generated.KINDS)


def suite(
    source: str = "generated", kinds: Sequence[str] | None = None, backend: str = "auto", max_calls: int = 12
) -> Suite:
    """The terminal suite.

    `source`: "generated" (seeded trees, any number of tasks) or "nl2bash" (96 requests over four file trees, each
    with a gold command). `kinds`: which generated requests, all of `KINDS` by default; "stop_service" needs a /proc in
    the box, which the landlock back end has not. `backend`: the sandbox's. ValueError for an unknown option;
    `data.DataError` if the data set is not here.
    """
    chosen = KINDS if kinds is None else tuple(kinds)
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown or not chosen:
        given = f"kind {unknown[0]!r} is not known" if unknown else "kinds is empty"
        raise ValueError(f"terminal: {given}; expected some of {', '.join(KINDS)}")
    if kinds is not None and source != "generated":
        raise ValueError(f"terminal: kinds={chosen!r} has no effect with source={source!r}; leave it out")
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
        tasks=partial(generated.tasks, chosen) if source == "generated" else nl2bash.tasks,
        verify=partial(verifier.verify, backend),
        verifier_version=verifier.VERSION,
        solve=solve,
        attacks=attacks.attacks,
        hidden=("goal", "gold"),
        reap=sandbox.reap,
    )


def solve(task: Task) -> Sequence[ToolCall | str]:
    """The reference commands, then `finish`."""
    commands = [ToolCall(name="run", arguments={"command": command}) for command in task.data["commands"]]
    return (*commands, ToolCall(name="finish"))
