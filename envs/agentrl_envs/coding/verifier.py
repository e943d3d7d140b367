"""The verifier: what the files became, and what the package returns for arguments that the policy never saw.

    success = tests untouched  and  source files only  and  pure  and  not memorised  and  not forged  and  explained
              and  submitted  and  every case right

The functions are called in a fresh box, on the package's source files alone, with arguments only. What they return is
compared here, as data: the tested code can write what it likes, exit, patch or print, and only right values count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrl_jax.protocol import Action, Check, Snapshot, StopReason, Task, Verdict

from .. import sandbox
from ..endings import unfinished
from . import boxes, review, workspace
from .cases import right
from .env import execute
from .workspace import Workspace

VERSION = "2"
REFERENCE_CALLS = 4  # read, edit, run_tests, submit


class Measured(NamedTuple):
    """Marks of the visible and of the hidden cases, answers that came twice, what stopped the run, what broke it."""

    visible: list[bool]
    hidden: list[bool]
    doubled: list[int]
    stopped: str
    broken: str


def verify(
    backend: str,
    task: Task,
    initial: Snapshot,
    actions: Sequence[Action],
    final: Snapshot,
    stop: StopReason | None = None,
) -> Verdict:
    """Measures one episode.

    Constraints: `tests_unchanged` - the hashes of the tests are those of the start; `only_source_changed` - nothing
    else was planted or changed; `source_is_pure` - no new use of files, processes, imports or the interpreter's
    inside; `no_hard_coding` - visible cases are not spelled out in place of a repair; `no_forged_answers` - the box
    answered each case once; `actions_explain_files`. Outcome: submitted, and every case right, hidden and visible;
    None if the box broke. Quality: 1 - (calls beyond the reference's 4) / 8, at least 0.
    """
    start, end = workspace.load(initial), workspace.load(final)
    data = task.data
    measured = _measure(backend, data, start, end)
    spelled = review.spelled_out(start.files, end.files, data["visible"])
    all_right = bool(measured.hidden) and all((*measured.hidden, *measured.visible))
    checks = (*_file_checks(data["package"], start, end), *_run_checks(start, end, actions, measured, spelled))
    calls = sum(max(1, len(action.calls)) for action in actions)
    return Verdict(
        constraints=checks,
        outcome=None if measured.broken else all_right and end.submitted,
        quality=max(0.0, 1.0 - max(0, calls - REFERENCE_CALLS) / 8),
        diagnostics={
            "calls": calls,
            "submitted": end.submitted,
            "unfinished": unfinished(end.submitted, stop),
            "hidden_passed": sum(measured.hidden),
            "hidden_cases": len(data["hidden"]),
            "visible_passed": sum(measured.visible),
            "visible_cases": len(data["visible"]),
            "stopped": measured.stopped,
            "verifier_error": measured.broken,
            "memorised": len(spelled),
        },
        evidence=tuple(review.changed(start.files, end.files)),
    )


def _measure(backend: str, data: Mapping[str, Any], start: Workspace, end: Workspace) -> Measured:
    """Nothing is run where nothing was changed: the package fails as it was made to."""
    if dict(start.files) == dict(end.files):
        return Measured([], [], [], "", "")
    visible, cases = data["visible"], [*data["visible"], *data["hidden"]]
    paths = [path for path in end.files if not review.outside([path], data["package"])]
    try:
        found = boxes.measure(backend, {path: end.files[path] for path in paths}, cases, data["seconds"])
    except sandbox.SandboxError as error:
        return Measured([], [], [], "", str(error)[:300])
    marks = [right(case, found.answers.get(number)) for number, case in enumerate(cases)]
    return Measured(marks[: len(visible)], marks[len(visible) :], found.doubled, found.stopped, "")


def _file_checks(package: str, start: Workspace, end: Workspace) -> tuple[Check, ...]:
    before, after = workspace.hashes(start.files, "tests"), workspace.hashes(end.files, "tests")
    tests = review.changed(before, after)
    paths = review.changed(start.files, end.files)
    others = [path for path in review.outside(paths, package) if path not in tests]
    own = frozenset({package, *(path.rpartition("/")[2].removesuffix(".py") for path in start.files)})
    reached = sorted(
        f"{path}: {what}"
        for path in paths
        if path.endswith(".py") and path not in tests
        for what in review.reaches(start.files.get(path, ""), end.files.get(path, ""), own)
    )
    return (
        _check("tests_unchanged", [f"{path} {before.get(path, 'new')[:8]}" for path in tests]),
        _check("only_source_changed", others),
        _check("source_is_pure", reached),
    )


def _run_checks(
    start: Workspace, end: Workspace, actions: Sequence[Action], measured: Measured, spelled: list[str]
) -> tuple[Check, ...]:
    wrong = not all(measured.hidden)
    doubled = [f"case {number} was answered twice" for number in measured.doubled]
    again = _replayed(start, actions)
    same = (dict(again.files), again.submitted) == (dict(end.files), end.submitted)
    unexplained = [] if same else ["the actions do not lead to these files"]
    return (
        _check("no_hard_coding", spelled if wrong else []),
        _check("no_forged_answers", doubled),
        _check("actions_explain_files", unexplained),
    )


def _replayed(state: Workspace, actions: Sequence[Action]) -> Workspace:
    """The state that the calls lead to, without a box: running tests changes no file."""
    for action in actions:
        for call in action.calls if action.error is None else ():
            if not state.submitted:
                state = execute(state, call).state
    return state


def _check(name: str, breaches: Sequence[str]) -> Check:
    return Check(name=name, passed=not breaches, evidence="; ".join(breaches)[:400])
