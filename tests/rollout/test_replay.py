"""Receipts replay; where they do not, what was changed on purpose is named as the cause, in every one of them."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import scripted
from agentrl_envs import workflow
from agentrl_envs.conformance.agents import random_script
from plain_renderer import PlainRenderer

from agentrl_jax.cli import environments
from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, ToolCall
from agentrl_jax.rollout.collect import EpisodePlan, collect
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import Receipt
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.replay import Divergence, replay, replay_in
from agentrl_jax.rollout.tokenizer import build

RECEIPTS = 200
REF = EnvironmentRef(target="agentrl_envs.workflow:suite")
DEADLINES = Deadlines(start=60.0, reset=60.0, step=60.0, verify=60.0)


def _script(suite, task, index: int) -> list[ToolCall | str]:
    """A third reference solutions, a third fallible demonstrations, a third random lookups and then the solution."""
    if index % 3 == 0:
        return list(suite.solve(task))
    if index % 3 == 1:
        return list(suite.demonstrate(task, index))
    rng = random.Random(index)
    wander = [ToolCall(name="order", arguments={"id": rng.randrange(100)}) for _ in range(2)]
    return [*wander, ToolCall(name="finish", arguments={"result": rng.choice(("done", "refused"))})]


@pytest.fixture(scope="module")
def receipts() -> list[Receipt]:
    suite = workflow.suite()
    renderer = ChatRenderer(build(list(suite.vocabulary()), vocab_size=900), TINY, tools=suite.spec.tools)
    tasks = suite.tasks("train", RECEIPTS, 3)
    scripts = {index: [*_script(suite, task, index), *([""] * 9)] for index, task in enumerate(tasks)}
    sampler = scripted.ScriptedSampler(renderer, scripted.by_turn(scripts), slots=16)
    plan = [EpisodePlan(group=0, member=i, task=task, seed=i, key=(0, i)) for i, task in enumerate(tasks)]
    with Pool(REF, 2, DEADLINES) as pool:
        done = list(collect(plan, sampler, pool, renderer, max_turn_tokens=64, temperature=1.0))
    found = [Receipt.from_json(json.loads(json.dumps(trajectory.receipt.to_json()))) for trajectory in done]
    assert len(found) == RECEIPTS and all(len(receipt.steps) >= 1 for receipt in found)
    assert all(len(receipt.tool_versions) == len(receipt.tools) for receipt in found)
    return found


def _replayed(receipts, **options) -> list[Divergence]:
    ref = EnvironmentRef(target="changed_suites:changed", options=options) if options else REF
    with Pool(ref, 1, DEADLINES) as pool:
        return [found for receipt in receipts if (found := replay_in(pool, receipt)) is not None]


def test_receipts_of_the_workflow_diverge_in_none(receipts):
    assert _replayed(receipts) == []
    assert _replayed(receipts[:20], environment="1") == [], "the wrapper of the tests below changes nothing by itself"


@pytest.mark.parametrize("tool", ["finish", "order"])
def test_a_changed_tool_version_is_named_as_the_cause_in_all(receipts, tool):
    called = [r for r in receipts if any(call.name == tool for action in r.actions for call in action.calls)]
    found = _replayed(called, tool=tool, version="2")
    assert len(called) > 50 and len(found) == len(called)
    assert Counter(one.cause for one in found) == {"tool version": len(called)}
    assert all(f"tool {tool} is version 2, recorded with 1" in one.why for one in found)
    for receipt, one in zip(called, found, strict=True):
        assert one.step is not None and receipt.steps[one.step].action.calls[0].name == tool


@pytest.mark.parametrize(
    ("options", "cause", "words"),
    [
        ({"tool": "", "environment": "2"}, "environment version", "the environment is version 2, recorded with 1"),
        ({"tool": "", "flaky": "answers"}, "nondeterminism", "two replays answer action 0 in two ways"),
        ({"tool": "", "flaky": "answers", "environment": "2"}, "nondeterminism", "action 0 in two ways"),
        ({"tool": ""}, "unexplained", "changed without a new version"),
        ({"judged": 0.5, "verifier": "3"}, "verifier", "the verifier is version 3, recorded with 2"),
        ({"judged": 0.5}, "verifier", "judged otherwise"),
        ({"flaky": "verdicts"}, "nondeterminism", "two verdicts for the same observations"),
    ],
)
def test_every_other_cause_is_told_apart(receipts, options, cause, words):
    chosen = [receipt for receipt in receipts if receipt.verdict is not None and receipt.verdict.quality][:12]
    found = _replayed(chosen, **options)
    assert len(found) == len(chosen) == 12
    assert {one.cause for one in found} == {cause}
    assert all(words in one.why for one in found)


def test_a_tool_that_was_not_called_yet_is_not_blamed(receipts):
    """Answers change with the environment; a tool has a new version too, but nobody had called it."""
    receipt = next(r for r in receipts if [c.name for c in r.actions[0].calls] == ["order"])
    (found,) = _replayed([receipt], tool="", version="1", environment="2")
    assert found.cause == "environment version"
    (found,) = _replayed([receipt], tool="finish", version="2", environment="2")
    assert found.cause == "tool version" and "the environment is version 2" in found.why


def test_a_receipt_without_tool_versions_is_still_read_and_blames_no_tool(receipts):
    data = receipts[0].to_json()
    del data["tool_versions"]
    old = Receipt.from_json(data)
    assert old.tool_versions == () and replay(old) is None
    (found,) = _replayed([old], tool="finish", version="2")
    assert found.cause == "unexplained"


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", environments.found())
def test_receipts_of_every_package_diverge_in_none(name, count):
    """Reference solutions and random calls of each environment found, written in this process, replayed in another."""
    ref = EnvironmentRef(target=f"agentrl_envs.{name}:suite")
    try:
        suite = environments.load(ref)
    except UserError as error:
        pytest.skip(str(error))
    tasks = list(suite.tasks("train", 3, 1))
    scripts = [("random", None)] if suite.solve is None else [("solve", suite.solve), ("random", None)]
    written = []
    for index in range(count):
        task, (_, solve) = tasks[index // len(scripts) % len(tasks)], scripts[index % len(scripts)]
        calls = solve(task) if solve is not None else list(random_script(suite, random.Random(index)))
        written.append(play(suite, PlainRenderer(), task, calls, index).receipt)
    with Pool(ref, 1, DEADLINES) as pool:
        found = [divergence for receipt in written if (divergence := replay_in(pool, receipt)) is not None]
    assert len(written) == count and found == []
