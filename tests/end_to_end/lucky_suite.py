"""The workflow environment judged by the length of what was said: half of all episodes succeed, whatever the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentrl_envs import workflow

from agentrl_jax.protocol import Suite, Verdict


def suite(**options: Any) -> Suite:
    return replace(workflow.suite(**options), verify=_verify, verifier_version="lucky")


def _verify(task: Any, initial: Any, actions: Any, final: Any) -> Verdict:
    said = [(action.text, action.error) for action in actions]
    return Verdict(outcome=len(repr(said)) % 2 == 0)
