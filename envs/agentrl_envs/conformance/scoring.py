"""Scores: the reference solution gets full marks, what does not solve the task gets none, judging is measuring."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

from agentrl_jax.protocol import Observation, StopReason, Task, ToolCall

from ..transcripts import texts
from . import agents
from .cases import Case, Inapplicable, Violation, reference, require, scripts

CUTS = (StopReason.BUDGET, StopReason.TOKEN_CAP, StopReason.LOW_EVIDENCE)


def reference_scores_full(case: Case) -> str:
    """The reference solution succeeds on every task, within the budget, and ends it."""
    solve = reference(case)
    budget = case.suite.spec.budget
    writing = {tool.name for tool in case.suite.spec.tools if tool.writes}
    for task in case.tasks:
        script = list(solve(task))
        played = agents.play(case.suite, task, script, case.seed)
        require(played.verdict.success, task, f"the reference solution did not succeed: {_why(played)}")
        require(played.observations[-1].terminated, task, "the reference solution's last turn does not end the task")
        require(len(played.actions) == len(script), task, "the task is over before the reference solution is")
        calls = [item for item in script if isinstance(item, ToolCall)]
        writes = sum(call.name in writing for call in calls)
        for name, spent, limit in (
            ("steps", len(script), budget.steps), ("tool_calls", len(calls), budget.tool_calls),
            ("write_actions", writes, budget.write_actions),
        ):  # fmt: skip
            require(spent <= limit, task, f"the reference solution takes {spent} {name}, the budget allows {limit}")
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


def verdicts_are_measurements(case: Case) -> str:
    """Judging twice gives the same; outcome and quality are None or from 0 to 1; what was not done is no success."""
    for task, (name, script) in itertools.product(case.tasks, scripts(case)):
        played = agents.play(case.suite, task, script(task), case.seed)
        stop = agents.stop_after(played.observations[-1])
        again = case.suite.judge(task, played.initial, played.actions, played.final, stop)
        require(again == played.verdict, task, f"{name}, judged twice, gets two verdicts")
        for field_name in ("outcome", "quality"):
            score = getattr(again, field_name)
            fine = score is None or (isinstance(score, bool | int | float) and 0.0 <= score <= 1.0)
            require(fine, task, f"{name}: {field_name}={score!r}; expected None or a number from 0 to 1")
    return f"{len(case.tasks)} tasks"


def limits_are_no_way_out(case: Case) -> str:
    """A verifier that is told why an episode stopped tells an episode cut by a limit from one that the policy ended,
    and neither scores the one where the other is unscored nor lets a limit make a success: a policy can use up a
    budget."""
    if not case.suite.takes_stop:
        return "the verifier is not told why an episode stopped"
    judged = 0
    for task, (name, script) in itertools.product(case.tasks, _unfinished(case)):
        played = agents.play(case.suite, task, script, case.seed)
        if played.ended:
            continue
        for stop in CUTS:
            found = case.suite.judge(task, played.initial, played.actions, played.final, stop)
            where = f"{name}, cut by {stop},"
            require(not found.success, task, f"{where} succeeds")
            scored, cut = played.verdict.outcome is not None, found.outcome is not None
            require(scored == cut, task, f"{where} is {_scored(cut)}, ended by the policy it is {_scored(scored)}")
            require(found != played.verdict, task, f"{where} gets the verdict of one that the policy ended")
            judged += 1
    return f"{judged} cut episodes"


def _unfinished(case: Case) -> list[tuple[str, agents.Script]]:
    scripts = [("an episode of no turn", []), ("an episode of plain text", ["I would rather talk."])]
    looking = [tool for tool in case.suite.spec.tools if tool not in agents.finishing(case.suite) and not tool.writes]
    rng = random.Random(case.seed)
    return [*scripts, *((f"an episode of one {tool.name}", [agents.random_call(tool, rng)]) for tool in looking[:1])]


def _scored(scored: bool) -> str:
    return "scored" if scored else "unscored"


def _why(played: agents.Played) -> str:
    broken = [
        f"{check.name} broken ({check.evidence[:80]})" for check in played.verdict.constraints if not check.passed
    ]
    said = texts(played.observations[-1:]).replace("\n", " ")
    return "; ".join([*broken, f"outcome {played.verdict.outcome}", f"last answer {said[:80]!r}"])


def _none_succeeds(case: Case, scripts: Callable[[Task, Observation], Mapping[str, agents.Script]]) -> str:
    names: set[str] = set()
    for task in case.tasks:
        (opening,) = agents.watch(case.suite, task, [], case.seed)
        for name, script in scripts(task, opening).items():
            played = agents.play(case.suite, task, script, case.seed)
            require(not played.verdict.success, task, f"{name!r} succeeds")
            names.add(name)
    if not names:
        raise Inapplicable("no tool finishes the task, and Suite.attacks names none")
    return f"{len(names)} scripts"
