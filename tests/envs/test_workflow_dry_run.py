"""The workflow's writes run dry first, as an option; without it nothing has changed."""

from __future__ import annotations

import hashlib

import pytest
from agentrl_envs.workflow import suite

from agentrl_jax.protocol import Action, Status, ToolCall


def act(*calls):
    return Action(text="", calls=calls)


@pytest.mark.parametrize("handles", ["short", "real"])
def test_the_reference_runs_each_write_dry_and_gets_full_marks(play, handles):
    made = suite(handles=handles, dry_run=True, sloppiness=0.0)
    for task in made.tasks("train", 40, 0):
        turns = made.solve(task)
        verdict = play(made, task, turns).verdict
        assert verdict.success and verdict.quality == 1.0, verdict
        dry = [turn.arguments["dry_run"] for turn in turns if "dry_run" in turn.arguments]
        assert dry == ([True, False] if task.data["goal"] else [])
        assert verdict.diagnostics["writes"] == bool(task.data["goal"])
        assert play(made, task, made.demonstrate(task, 0)).verdict.success


def test_a_write_without_its_dry_run_is_denied_and_a_dry_run_changes_nothing(play):
    made = suite(dry_run=True)
    task = next(task for task in made.tasks("train", 20, 0) if task.data["goal"])
    *lookups, dry, real, finish = made.solve(task)
    environment = made.make()
    environment.reset(task, 0)
    before = environment.snapshot()
    assert environment.step(act(real)).status is Status.DENIED and environment.snapshot() == before
    for wrong in (None, "true", 1):
        bad = ToolCall(name=dry.name, arguments={**dry.arguments, "dry_run": wrong})
        assert environment.step(act(bad)).status is Status.INVALID_ACTION and environment.snapshot() == before
    would = environment.step(act(dry)).content[0].content
    assert environment.step(act(real)).content[0].content == would.removeprefix("would ")
    assert environment.step(act(real)).status is Status.DENIED
    environment.close()
    for turns in ([*lookups, real, finish], [*lookups, dry, finish]):
        verdict = play(made, task, turns).verdict
        assert not verdict.success and not verdict.violated


def test_a_dry_run_of_what_is_forbidden_breaks_no_policy(play):
    made = suite(dry_run=True)
    task = next(task for task in made.tasks("train", 40, 0) if task.data["reason"])
    dry = ToolCall(name=task.data["tool"], arguments={**task.data["arguments"], "dry_run": True})
    *lookups, finish = made.solve(task)
    assert play(made, task, [*lookups, dry, finish]).verdict.success
    real = ToolCall(name=dry.name, arguments={**dry.arguments, "dry_run": False})
    assert play(made, task, [*lookups, dry, real, finish]).verdict.violated


def test_the_default_suite_is_what_it_was(play):
    """Tools, tasks, vocabulary and a transcript of the suite without the option, by their hash."""
    made = suite()
    tasks = made.tasks("train", 30, 0)
    seen = [m.content for task in tasks for o in play(made, task, made.solve(task)).observations for m in o.content]
    tools = [(t.name, t.description, t.parameters, t.writes) for t in made.spec.tools]
    asked = [(t.id, t.kind, t.data) for t in tasks]
    text = repr((tools, asked, made.vocabulary(), seen, [made.demonstrate(task, 1) for task in tasks]))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "9da5db0c48645149"
