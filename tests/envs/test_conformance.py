"""Every environment package found holds every property of the list; nothing is registered anywhere."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
from pathlib import Path

import agentrl_envs
import broken_suites
import pytest
from agentrl_envs.conformance import PROPERTIES, Case, case, check, hold
from agentrl_envs.data import DataError

from agentrl_jax.protocol import EnvironmentRef

SLOW = {"web"}  # where the whole list takes more than a few seconds
FEW = {"coding": 1, "terminal": 1, "web": 1}  # tasks to play where an episode is slow; else TASKS
TASKS, SPREAD = 2, 5


def packages() -> list[str]:
    """Names of the packages of `agentrl_envs` that define a `suite`, read off their source: none is imported here."""
    found = []
    for module in pkgutil.iter_modules(agentrl_envs.__path__):
        source = Path(agentrl_envs.__path__[0]) / module.name / "__init__.py"
        if module.ispkg and "\ndef suite(" in source.read_text(encoding="utf-8"):
            found.append(module.name)
    return found


def _marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.fixture(scope="module", params=[_marked(name) for name in packages()])
def held(request) -> Case:
    module = importlib.import_module(f"agentrl_envs.{request.param}")
    lacks = getattr(module, "missing", lambda: None)()
    if lacks is not None:
        pytest.skip(lacks)
    try:
        return case(
            EnvironmentRef(target=f"agentrl_envs.{request.param}:suite"), FEW.get(request.param, TASKS), 0, SPREAD
        )
    except DataError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("held_to", PROPERTIES, ids=lambda held_to: held_to.__name__)
def test_environment(held, held_to):
    finding = hold(held, held_to)
    if finding.result == "skipped":
        pytest.skip(finding.reason)
    assert finding.result == "holds", finding.reason


def test_the_workflow_and_the_retail_environment_are_among_those_found():
    assert {"workflow", "retail"} <= set(packages())


ELSEWHERE = ("other_process_same_transcript", "no_jax_is_imported")
FAULTS = {  # the fault, and words of the reason that is given
    "reference_scores_full": "did not succeed: outcome False",
    "reference_scores_full, budget": "takes 3 steps, the budget allows 2",
    "null_agent_fails": " at once",
    "random_agent_fails": "random episodes succeeded; the suite says that chance=0",
    "attackers_fail": "'finish with every number from 0 to 999' succeeds",
    "same_seed_same_transcript": "differs at the observation after reset",
    "other_process_same_transcript": "another process sees other observations",
    "no_jax_is_imported": "has imported jaxlib",
    "restore_is_exact": "gives other observations",
    "siblings_are_isolated": "what a fork does changes",
    "hash_tells_states_apart": "two states of one hash",
    "nothing_happens_after_the_end": "is answered as if the task went on",
    "ends_are_honest": "reset answers that the task is over",
    "close_is_safe": "closed already",
    "close_is_safe, cancelled": "AttributeError",
    "nothing_is_left_behind": "open files",
    "nothing_is_left_behind, processes": "processes",
    "records_travel": "read back from JSON",
    "bad_calls_are_answered, raises": "without box raises KeyError",
    "bad_calls_are_answered, types": "box=",
    "bad_calls_are_answered, judged": "the verifier raises TypeError",
    "bad_calls_are_answered, unknown": "an unknown tool is answered with status ok",
    "calls_are_answered_in_order": "otherwise than one by one",
    "calls_are_answered_in_order, one message": "got 1 tool messages",
    "splits_are_disjoint": "a second task with this",
    "hidden_data_stays_hidden": "task.data[answer] is hidden",
    "hidden_data_stays_hidden, undeclared": "is hidden, yet the policy is shown it",
    "verdicts_are_measurements": "gets two verdicts",
    "limits_are_no_way_out": "cut by budget, is unscored, ended by the policy it is scored",
    "limits_are_no_way_out, pays": "cut by token_cap, succeeds",
    "limits_are_no_way_out, deaf": "gets the verdict of one that the policy ended",
}


def test_there_is_a_broken_environment_for_every_property():
    assert {fault.split(",")[0] for fault in FAULTS} == {held_to.__name__ for held_to in PROPERTIES}


@pytest.fixture
def tidy():
    yield
    for left in broken_suites._shared.values():
        if isinstance(left, subprocess.Popen):
            left.communicate(timeout=10)
        elif hasattr(left, "close"):
            left.close()
    broken_suites._shared.clear()


def test_the_sound_environment_holds_every_property():
    findings = list(check(case(EnvironmentRef(target="broken_suites:vault"), 2)))
    assert [finding for finding in findings if finding.result != "holds"] == []
    assert len(findings) == len(PROPERTIES)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_broken_is_caught_and_named(fault, tidy):
    name, words = fault.split(",")[0], FAULTS[fault]
    ref = EnvironmentRef(target="broken_suites:vault", options={"fault": fault})
    made = case(ref if name in ELSEWHERE else ref.load(), 2)
    (held_to,) = [one for one in PROPERTIES if one.__name__ == name]
    finding = hold(made, held_to)
    assert finding.result == "broken" and words in finding.reason, finding
