"""Demonstrations: epochs that can be recomputed, and handles renamed without changing what is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, EnvironmentSpec, Message, Observation, Snapshot, Suite, Task, Verdict
from agentrl_jax.recipes.checks import check_environment
from agentrl_jax.recipes.config import RunConfig, Sft, Shown, TinyPolicy
from agentrl_jax.recipes.demonstrations import order, packed, play_all, rename, token_ids
from agentrl_jax.rollout.families import FAMILIES
from agentrl_jax.rollout.renderers import TINY, ChatRenderer
from agentrl_jax.rollout.template_renderer import TemplateRenderer
from agentrl_jax.rollout.tokenizer import build

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))

from small_tokenizers import family

REF = EnvironmentRef(target="agentrl_envs.workflow:suite", options={"handles": "short"})


@pytest.fixture(scope="module")
def shown() -> tuple:
    suite = REF.load()
    assert suite.vocabulary and suite.handles
    renderer = ChatRenderer(build(suite.vocabulary(), vocab_size=512), TINY, tools=suite.spec.tools, preamble="")
    sft = Sft(demonstrations=(Shown(count=24),), drills=12, width=128)
    return packed(REF, renderer, sft, 0), token_ids(suite.handles(), renderer.tokenizer), renderer


@given(rows=st.integers(1, 40), count=st.integers(1, 20), step=st.integers(0, 30))
@settings(max_examples=50, deadline=None)
def test_every_epoch_shows_every_row_once(rows: int, count: int, step: int) -> None:
    seen = np.concatenate([order(rows, 5, s, count) for s in range(step + 1)])
    for epoch in range(len(seen) // rows):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_renaming_permutes_handles_tree_by_tree_and_touches_nothing_else(shown: tuple, seed: int) -> None:
    batch, handles, _ = shown
    renamed = rename(batch, handles, np.random.default_rng(seed))
    is_handle = np.isin(batch.tokens, handles)
    assert (np.isin(renamed.tokens, handles) == is_handle).all()
    assert (renamed.tokens[~is_handle] == batch.tokens[~is_handle]).all()
    roots = (batch.parents < 0) & (batch.sources != 0)
    tree = np.cumsum(roots.reshape(-1)).reshape(roots.shape)
    for number in np.unique(tree[is_handle]):
        inside = is_handle & (tree == number)
        pairs = set(zip(batch.tokens[inside].tolist(), renamed.tokens[inside].tolist(), strict=True))
        assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), "one to one"


def test_the_teacher_is_the_source_of_what_is_trained_on(shown: tuple) -> None:
    batch, _, _ = shown
    assert (batch.sources[batch.action_mask] == 5).all() and batch.action_mask.any(axis=1).all()


def test_an_environment_without_drills_is_refused() -> None:
    real = EnvironmentRef(target=REF.target, options={"handles": "real"})
    sft = Sft(demonstrations=(Shown(count=1),), drills=3)
    config = RunConfig(name="x", environment=real, policy=TinyPolicy(), stages=(), sft=sft)
    with pytest.raises(UserError, match=r"sft\.drills=3.*set sft\.drills=0"):
        check_environment(config, real.load())


THOUGHTLESS = {"enable_thinking": False}  # an empty thought before each turn, which is not kept in the history
WORDS = "the answer" + " and so on" * 10


class Talk:
    """A user who goes on three times."""

    spec = EnvironmentSpec(name="talk", version="1", tools=())

    def __init__(self) -> None:
        self.said = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.said = 0
        return self._next()

    def step(self, action) -> Observation:
        return self._next()

    def _next(self) -> Observation:
        self.said += 1
        return Observation(content=(Message(role="user", content="look at this"),), terminated=self.said > 3)

    def snapshot(self) -> Snapshot:
        return Snapshot(data=b"", hash="")

    def restore(self, snapshot: Snapshot) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def talk() -> Suite:
    return Suite(
        spec=Talk.spec, make=Talk, verify=lambda *_: Verdict(outcome=True), verifier_version="1",
        tasks=lambda split, count, seed: [Task(id=f"t{n}", split=split) for n in range(count)],
        demonstrate=lambda task, seed: [WORDS] * 3,
    )  # fmt: skip


def test_a_demonstration_that_is_rendered_anew_may_fill_several_rows() -> None:
    renderer = TemplateRenderer(family("qwen3"), FAMILIES["qwen3"], variables=THOUGHTLESS, history="template")
    ref, shown = EnvironmentRef(target=f"{__name__}:talk"), Shown(count=2)
    spans = [span for t in play_all(ref, renderer, shown, 0) for span in t.spans]
    width = max(end - begin for begin, _, end in spans)
    batch = packed(ref, renderer, Sft(demonstrations=(shown,), width=width), 0)
    assert len(batch.tokens) > shown.count, "the case needs demonstrations that do not fit a row each"
    assert batch.action_mask.sum() == 2 * 3 * len(renderer.turn(WORDS))
    with pytest.raises(UserError, match=r"^sft\.width=16: .*raise width") as refused:
        packed(ref, renderer, Sft(demonstrations=(shown,), width=16), 0)
    assert "rows" not in str(refused.value)
