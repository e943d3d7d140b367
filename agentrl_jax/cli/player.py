"""A person in the policy's place: sees what it sees, writes calls, spends its budget, and gets its verdict."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

from agentrl_jax.protocol import Action, Environment, Observation, Status, StopReason, Suite, Task, Tool, Verdict
from agentrl_jax.rollout.budgets import Meter
from agentrl_jax.rollout.calls import JSON, LINE
from agentrl_jax.rollout.parallel import known_only, with_unknown
from agentrl_jax.rollout.play import MAX_OBSERVATION_CHARS
from agentrl_jax.rollout.records import bounded

BROKEN = 1  # the exit code where the environment broke while it was played, or does not hold a property
HELP = """\
a call     tool key=value key="two words", or JSON: {"name": "tool", "arguments": {...}}, or a list of such calls
:say TEXT  plain text, as a policy that makes no call (any other line that is no call is said too)
:tools     the tools and their schemas
:quit      stop here and see the verdict (so does the end of the input)"""


def play(suite: Suite, task: Task, seed: int) -> int:
    """Plays `task` from standard input. Returns 1 where the environment raised, else 0."""
    spec = suite.spec
    print(f"{spec.name} {spec.version}   task {task.id} ({task.kind or task.split})   fork {spec.fork}\n")
    print(_tools(spec.tools, spec.budget.finishing), "\n\n", HELP, sep="", end="\n\n")
    environment = suite.make()
    try:
        return _episode(suite, environment, task, seed)
    except Exception as error:
        print(f"the environment broke: {type(error).__name__}: {error}")
        return BROKEN
    finally:
        with contextlib.suppress(Exception):
            environment.close()


def _episode(suite: Suite, environment: Environment, task: Task, seed: int) -> int:
    meter = Meter(suite.spec.budget, suite.spec.tools)
    tools = {tool.name: tool for tool in suite.spec.tools}
    actions: list[Action] = []
    observation = bounded(environment.reset(task, seed), MAX_OBSERVATION_CHARS)
    initial = environment.snapshot()
    stop = _show(observation)
    for line in () if stop else _lines():
        if line == ":tools":
            print(_schemas(suite.spec.tools))
            continue
        asked = read(line, tools)
        action = known_only(asked, tools)
        refusal = meter.admit(action)
        if refusal is None:
            meter.perform(action)
            actions.append(action)
            observation = bounded(environment.step(action), MAX_OBSERVATION_CHARS)
            observation = with_unknown(asked, observation, tools)
            meter.settle(observation)
        else:
            observation = meter.deny(refusal)
        stop = _show(observation) or meter.exhausted()
        print(_left(meter))
        if stop:
            break
    stop = stop or StopReason.EARLY_STOP
    print(f"\nstopped: {stop}")
    print(_verdict(suite.judge(task, initial, tuple(actions), environment.snapshot(), stop)))
    return 0


def read(line: str, tools: dict[str, Tool]) -> Action:
    """A line as an action: JSON, `tool key=value`, or text."""
    if line.startswith(":say"):
        return Action(text=line.removeprefix(":say").strip())
    if not line.startswith(("{", "[")):
        return LINE.parse(line, tools)
    try:
        value = json.loads(line)
    except ValueError as error:
        return Action(text=line, error=f"not JSON: {error}")
    calls = value if isinstance(value, list) else [value]
    return JSON.parse("".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls), tools)


def _lines() -> Iterator[str]:
    """What the person writes, until the end of the input or `:quit`; Ctrl-C goes up."""
    asking = sys.stdin.isatty()
    if asking:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (the arrow keys)
    while True:
        try:
            line = input("> " if asking else "").strip()
        except EOFError:
            return
        if line == ":quit":
            return
        if line in (":help", ":h", "?"):
            print(HELP)
        elif line:
            yield line


def _show(observation: Observation) -> StopReason | None:
    for message in observation.content:
        print(f"{message.role}: {message.content}")
    if observation.status is not Status.OK:
        print(f"[{observation.status}]")
    if observation.terminated:
        return StopReason.COMPLETED
    return StopReason.BUDGET if observation.truncated else None


def _left(meter: Meter) -> str:
    budget, spent = meter.budget, meter.ledger()
    return (
        f"[left: {budget.steps - spent.steps} steps, {budget.tool_calls - spent.tool_calls} calls, "
        f"{budget.write_actions - spent.writes} writes, {max(0, budget.retries - spent.retries)} retries]"
    )


def _tools(tools: tuple[Tool, ...], finishing: tuple[str, ...]) -> str:
    lines = LINE.describe(tools).splitlines()[1:]
    marks = {tool.name: " (writes)" if tool.writes else "" for tool in tools} | dict.fromkeys(finishing, " (finishes)")
    return "\n".join(line + marks[tool.name] for line, tool in zip(lines, tools, strict=True))


def _schemas(tools: tuple[Tool, ...]) -> str:
    return "\n".join(f"{tool.name}: {json.dumps(dict(tool.parameters))}" for tool in tools)


def _verdict(verdict: Verdict) -> str:
    outcome = "unscored" if verdict.outcome is None else verdict.outcome
    quality = "" if verdict.quality is None else f", quality {verdict.quality:g}"
    lines = [f"verdict: {'success' if verdict.success else 'no success'} (outcome {outcome}{quality})"]
    for check in verdict.constraints:
        lines.append(f"  {'kept  ' if check.passed else 'BROKEN'} {check.name}  {check.evidence}".rstrip())
    lines += [f"  {name}: {value}" for name, value in verdict.diagnostics.items() if value != ""]
    return "\n".join(lines)
