"""A fallible teacher: the reference solution, spoiled by faults that reward can unlearn.

Every right decision also occurs often and in the same situations as the wrong one, so a policy fitted to these
demonstrations explores between the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from agentrl_jax.protocol import Task, ToolCall

from . import tools
from .options import LOOKUP, Options
from .solve import Draft, Turn, draft, requested
from .tenant import build

SECOND_FAULT = 0.25  # probability that a faulty demonstration has a second fault

# Weights of the faults by what the task expects. "harmless" ones cost calls; the others mostly cost the task.
# Most weigh on habits (finishing early, acting unread, malformed calls); the teacher is more often careless than wrong
# about the policy, since what a fitted policy cannot tell apart at all, reward teaches slowly.
ALLOWED_FAULTS = {
    "early_finish": 34, "refuse_allowed": 10, "wrong_tool": 10, "wrong_record": 8, "skip_lookup": 8,
    "wrong_lookup": 8, "malformed": 10, "chatter": 6, "repeat_lookup": 6,
}  # fmt: skip
REFUSAL_FAULTS = {
    "early_finish": 36, "ignore_policy": 14, "wrong_tool": 6, "wrong_record": 4, "skip_lookup": 12,
    "wrong_lookup": 8, "malformed": 8, "chatter": 5, "repeat_lookup": 7,
}  # fmt: skip
LOOKUP_FAULTS = {"refuse_allowed": 30, "skip_lookup": 10, "malformed": 30, "repeat_lookup": 30}


def demonstrate(options: Options, task: Task, seed: int) -> tuple[Turn, ...]:
    """The teacher's turns: with probability `sloppiness` one or two faults, drawn by the weights above."""
    rng = random.Random(f"{task.id}/{seed}")
    plan = draft(options, task)
    table = LOOKUP_FAULTS if task.kind == LOOKUP else REFUSAL_FAULTS if task.data["reason"] else ALLOWED_FAULTS
    drawn: set[str] = set()
    if rng.random() < options.sloppiness:
        drawn.update(rng.choices(list(table), weights=list(table.values()), k=1 + (rng.random() < SECOND_FAULT)))
    for name, decide in DECISIONS.items():
        if name in drawn:
            decide(rng, options, task, plan)
    turns = plan.turns(options)
    for name, insert in INSERTIONS.items():
        if name in drawn:
            insert(rng, options, task, turns)
    return tuple(turns)


def _ignore_policy(rng: random.Random, options: Options, task: Task, plan: Draft) -> None:
    plan.write, plan.result = requested(options, task), "done"


def _refuse_allowed(rng: random.Random, options: Options, task: Task, plan: Draft) -> None:
    plan.write, plan.result = None, "refused"


def _early_finish(rng: random.Random, options: Options, task: Task, plan: Draft) -> None:
    plan.write, plan.result = None, "done"


def _skip_lookup(rng: random.Random, options: Options, task: Task, plan: Draft) -> None:
    """Leaves out the last lookup and guesses; the order of a request by product cannot be guessed."""
    if len(plan.lookups) > 1 or not task.kind.endswith("_by_product"):
        plan.lookups.pop()
        if task.data["reason"] and rng.random() < 0.5:
            _ignore_policy(rng, options, task, plan)


def _wrong_tool(rng: random.Random, options: Options, task: Task, plan: Draft) -> None:
    """Cancels what was to be returned, and the like."""
    if task.data["tool"]:
        other = rng.choice([name for name in ("cancel", "return") if name != task.data["tool"]])
        plan.write, plan.result = tools.call(options.handles, other, order=task.data["arguments"]["order"]), "done"


def _wrong_record(rng: random.Random, options: Options, task: Task, plan: Draft) -> None:
    """Takes another order of the listing, or another of the numbers in sight for the order."""
    if task.data["tool"]:
        made = build(task.data["tenant"], task.split, task.kind, task.data["reason"], options.handles)
        order = task.data["arguments"]["order"]
        if task.kind.endswith("_by_product"):
            wrong = [row[0] for row in made.rows["orders"] if row[1] == task.data["customer"] and row[0] != order]
        else:
            wrong = [task.data["customer"], made.cast.product]
        arguments = {**task.data["arguments"], "order": rng.choice(wrong)}
        plan.write, plan.result = tools.call(options.handles, task.data["tool"], **arguments), "done"


def _wrong_lookup(rng: random.Random, options: Options, task: Task, turns: list[Turn]) -> None:
    """Looks in the wrong place first."""
    record, handle = task.data["lookups"][0]
    other = rng.choice([name for name in tools.LOOKUPS if name != record])
    turns.insert(0, tools.call(options.handles, other, **{other: handle}))


def _repeat_lookup(rng: random.Random, options: Options, task: Task, turns: list[Turn]) -> None:
    """Reads again what it has just read."""
    places = [i for i, turn in enumerate(turns[:-1]) if isinstance(turn, ToolCall) and _looks_up(turn)]
    if places:
        at = rng.choice(places)
        turns.insert(at, turns[at])


def _malformed(rng: random.Random, options: Options, task: Task, turns: list[Turn]) -> None:
    """Writes a call without the names of its arguments, then writes it properly."""
    at = rng.randrange(len(turns))
    turn = turns[at]
    if isinstance(turn, ToolCall):
        turns.insert(at, " ".join((turn.name, *map(str, turn.arguments.values()))))


def _chatter(rng: random.Random, options: Options, task: Task, turns: list[Turn]) -> None:
    """Says something instead of acting, then acts."""
    turns.insert(rng.randrange(len(turns)), rng.choice(CHATTER))


def _looks_up(turn: ToolCall) -> bool:
    return turn.name in {name for tool in tools.LOOKUPS for name in (tool, tools.TABLE[tool].real)}


CHATTER = ("i can do that", "please wait", "i want to look")
DECISIONS: dict[str, Callable[[random.Random, Options, Task, Draft], None]] = {
    "ignore_policy": _ignore_policy, "refuse_allowed": _refuse_allowed, "early_finish": _early_finish,
    "wrong_tool": _wrong_tool, "wrong_record": _wrong_record, "skip_lookup": _skip_lookup,
}  # fmt: skip
INSERTIONS: dict[str, Callable[[random.Random, Options, Task, list[Turn]], None]] = {
    "repeat_lookup": _repeat_lookup, "wrong_lookup": _wrong_lookup, "malformed": _malformed, "chatter": _chatter,
}  # fmt: skip
