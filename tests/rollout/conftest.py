"""Fixtures of the rollout tests. The folder itself goes on the path, for the workers as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_suites

from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.tokenizer import build


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return ChatRenderer(build([fake_suites.WORDS], vocab_size=400), TINY, tools=fake_suites.TOOLS)
