"""Every environment package found holds every property of the list; nothing is registered anywhere."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import agentrl_envs
import pytest
from agentrl_envs.conformance import PROPERTIES, Case, case, hold
from agentrl_envs.data import DataError

from agentrl_jax.protocol import EnvironmentRef

FEW = {"web": 1}  # tasks to play where an episode is slow; else TASKS
TASKS, SPREAD = 2, 5


def packages() -> list[str]:
    """Names of the packages of `agentrl_envs` that define a `suite`, read off their source: none is imported here."""
    found = []
    for module in pkgutil.iter_modules(agentrl_envs.__path__):
        source = Path(agentrl_envs.__path__[0]) / module.name / "__init__.py"
        if module.ispkg and "\ndef suite(" in source.read_text(encoding="utf-8"):
            found.append(module.name)
    return found


@pytest.fixture(scope="module", params=packages())
def held(request) -> Case:
    module = importlib.import_module(f"agentrl_envs.{request.param}")
    lacks = getattr(module, "missing", lambda: None)()
    if lacks is not None:
        pytest.skip(lacks)
    try:
        return case(EnvironmentRef(target=f"agentrl_envs.{request.param}:suite"), FEW.get(request.param, TASKS), 0, SPREAD)
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
