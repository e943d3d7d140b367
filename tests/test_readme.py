"""The README's examples, run as printed."""

import re
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.conformance import PROPERTIES, case, hold

from agentrl_jax.protocol import Action, Status, Suite
from agentrl_jax.recipes.config import Loop
from agentrl_jax.recipes.turn_credit import check_credit
from agentrl_jax.rl.rewards import lexicographic

README = Path(__file__).resolve().parent.parent / "README.md"


def run_block(word: str) -> dict[str, Any]:
    """What the one block that holds `word` defines."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if word in block]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(block, str(README), "exec"), names)
    return names


@pytest.fixture(scope="module")
def suite() -> Suite:
    return run_block("Suite(")["suite"]()


def test_the_mathematics_alone():
    names = run_block("algorithms.dapo()")
    assert names["anchored"].beta == 0.01 and names["objective"].kl is None


def test_credit_per_turn():
    names = run_block("step_credit()")
    for settings in (names["beside"], names["alone"], names["branched"]):
        check_credit(Loop(reward=lexicographic, **settings))


@pytest.mark.parametrize("held_to", PROPERTIES, ids=lambda held_to: held_to.__name__)
def test_the_environment_keeps_the_contract(suite, held_to):
    finding = hold(case(suite), held_to)
    assert finding.result != "broken", finding.reason


def play(suite: Suite, actions):
    task = suite.tasks("heldout", 1, 0)[0]
    environment = suite.make()
    environment.reset(task, seed=0)
    initial = environment.snapshot()
    observations = [environment.step(action) for action in actions(task)]
    final = environment.snapshot()
    environment.restore(final)
    assert environment.snapshot() == final
    return suite.verify(task, initial, actions(task), final), observations


def test_reference_solution_succeeds(suite):
    assert suite.solve is not None
    solve = suite.solve
    verdict, observations = play(suite, lambda task: [Action(text="", calls=(call,)) for call in solve(task)])
    assert verdict.success and observations[-1].terminated


def test_doing_nothing_and_a_malformed_call_fail(suite):
    assert not play(suite, lambda task: [])[0].success
    verdict, observations = play(suite, lambda task: [Action(text="say", error="say: number is missing")])
    assert not verdict.success and observations[0].status is Status.INVALID_ACTION


def test_splits_are_disjoint(suite):
    seen = [{task.id for task in suite.tasks(split, 500, 0)} for split in ("train", "validation", "heldout")]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
