"""Notes for later: a long dialogue in chunks, a store with ADD, UPDATE, DELETE and NOOP, questions at the end.

The dialogue need not fit into the context: every window shows the whole store and the next turns only, and an answer
counts only with a note that holds it. Notes that are stale or private break a constraint.
"""

from __future__ import annotations

from functools import partial

from agentrl_jax.protocol import Budget, EnvironmentSpec, Suite, Tool

from . import solve, stream, verifier
from .env import MemoryEnvironment
from .machine import NOTE, Limits
from .stream import Sizes

__all__ = ["suite"]
VERSION = "1"
ROOM = 1.5  # the store's size, in units of what the reference may need at most
LONGEST = 30  # characters of a reference note


def suite(turns: int = 320, chunk: int = 32, facts: int = 10, changes: int = 3, forgets: int = 2) -> Suite:
    """The memory suite.

    `turns` of dialogue, shown `chunk` at a time; `facts` about the people who matter, of which `changes` are corrected
    and `forgets` are to be forgotten later. ValueError where they do not fit together.
    """
    if turns < 120 or not 1 <= chunk <= turns:
        raise ValueError(f"memory: turns={turns}, chunk={chunk}; expected at least 120 turns and 1 <= chunk <= turns")
    if changes < 1 or forgets < 1 or not changes + forgets < facts <= 20:
        raise ValueError(
            f"memory: facts={facts}, changes={changes}, forgets={forgets}; expected changes and forgets of at least 1 "
            "and changes + forgets < facts <= 20"
        )
    sizes = Sizes(
        turns=turns, chunk=chunk, facts=facts, changes=changes, forgets=forgets, questions=changes + forgets + 5
    )
    limits = Limits(notes=int(ROOM * facts), characters=int(ROOM * facts * LONGEST), chunk=chunk)
    ending = sizes.chunks + sizes.questions  # turns from any state to the end: read on, then answer
    steps = sizes.chunks + 2 * sizes.operations + 8 + ending
    spec = EnvironmentSpec(
        name="memory",
        version=VERSION,
        tools=_tools(),
        budget=Budget(
            steps=steps,
            tool_calls=2 * steps,
            tokens=100 * steps,
            write_actions=3 * sizes.operations,
            retries=10,
            min_steps_for_finalize=ending,
            min_tool_calls_for_commit=ending,
            finishing=("noop", "answer"),
        ),
        fork="native",
        side_effects="isolated",
    )
    return Suite(
        spec=spec,
        make=lambda: MemoryEnvironment(spec, limits),
        tasks=partial(stream.tasks, sizes),
        verify=partial(verifier.verify, limits),
        verifier_version=verifier.VERSION,
        solve=partial(solve.solve, limits),
        attacks=partial(solve.attacks, limits),
    )


def _tools() -> tuple[Tool, ...]:
    text = {"type": "string", "maxLength": NOTE}
    number = {"type": "integer", "description": "the number of a note"}

    def tool(name: str, description: str, *, writes: bool = False, **properties: dict) -> Tool:
        parameters = {
            "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        }  # fmt: skip
        return Tool(name=name, description=description, parameters=parameters, writes=writes)

    return (
        tool("add", "Write a new note.", writes=True, text=text),
        tool("update", "Replace a note.", writes=True, note=number, text=text),
        tool("delete", "Delete a note.", writes=True, note=number),
        tool("noop", "Leave the store as it is and read the next turns."),
        tool("answer", "Answer the question, with the note that holds the answer (0: none).", text=text, note=number),
    )
