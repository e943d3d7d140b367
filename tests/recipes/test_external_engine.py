"""A run whose episodes an inference server samples, over a real socket: `external.url`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the server's libraries: pip install -e '.[serve]'")

from agentrl_jax.errors import UserError
from agentrl_jax.recipes import evaluate as evaluation
from agentrl_jax.recipes import policy as policies
from agentrl_jax.recipes.checks import check
from agentrl_jax.recipes.config import External, RunConfig
from agentrl_jax.recipes.directory import claimed
from agentrl_jax.recipes.dry_run import dry_run
from agentrl_jax.recipes.rl import rl
from agentrl_jax.recipes.serve import EngineSize, Served, open_service
from agentrl_jax.recipes.train import evaluate_run, open_run, resolve, train
from agentrl_jax.runtime import pretrained
from agentrl_jax.runtime.checkpoint import Checkpoints
from agentrl_jax.runtime.interrupts import Interrupts
from agentrl_jax.runtime.serve.chat import Chat
from agentrl_jax.runtime.serve.server import beside

sys.path.insert(0, str(Path(__file__).parents[1] / "end_to_end"))
import small_config

PLACE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def config(url: str | None = None, **changes: Any) -> RunConfig:
    small = small_config.config()
    assert small.loop is not None
    few = replace(small.evaluation, episodes=4, every=0, temperature=0.0)
    small = replace(small, stages=(rl,), sft=None, loop=replace(small.loop, steps=2), evaluation=few)
    return replace(small, external=External(url=url, **changes))


def service(version: int = 0) -> Any:
    """A server over another policy of the architecture: what it samples from has to be published to it."""
    made = config()
    policy = policies.describe(made, made.environment.load())
    params = policies.initial_params(replace(made, seed=5), policy, PLACE)
    chat = Chat(renderer=policy.renderer, vocab_size=policy.model.vocab_size)
    served = Served(name="small", model=policy.model, params=params, chat=chat)
    found = open_service(served, EngineSize(slots=8, context=128, bank=4, prefill_chunk=32, decode_steps=4, seed=7))
    found.pump._sampler.publish(found.pump._sampler.params, version)
    return found


def played(made: RunConfig, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """(figures, trajectories) of one evaluation."""
    suite, policy = resolve(made)
    found: list[Any] = []
    monkeypatch.setattr(evaluation, "measure", lambda t, measure=evaluation.measure: (found.extend(t), measure(t))[1])
    with ExitStack() as stack, monkeypatch.context():
        interrupts = stack.enter_context(Interrupts())
        run = open_run(made, suite, policy, directory, stack, interrupts, resume=False, quiet=True)
        run.publish()
        row = evaluation.evaluate(run, stage="before", split="heldout", episodes=4, seed=1)
    monkeypatch.undo()
    return row, found


def test_an_evaluation_there_plays_the_episodes_of_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, mine = played(config(), tmp_path / "here", monkeypatch)
    with beside(service(version=3)) as url:  # further than a new run's first publication
        there, theirs = played(config(url, model="small"), tmp_path / "there", monkeypatch)
        with pytest.raises(UserError, match="serves no model 'large'; expected one of small"):
            played(config(url, model="large"), tmp_path / "no", monkeypatch)
        longer = config(url)
        assert longer.loop is not None
        longer = replace(longer, rollout=replace(longer.rollout, context=192), loop=replace(longer.loop, width=192))
        with pytest.raises(UserError, match="a context there holds 128 tokens, fewer than the 192"):
            played(longer, tmp_path / "no", monkeypatch)
    assert there == here and len(theirs) == 4
    for one, other in zip(mine, theirs, strict=True):
        assert one.tokens == other.tokens and one.stop == other.stop
        assert one.behavior_logprobs == pytest.approx(other.behavior_logprobs, abs=1e-4)
        assert set(other.policy_versions) == set(one.policy_versions)


def test_steps_publish_by_export_and_reload(tmp_path: Path) -> None:
    with beside(service(version=3)) as url:
        train(config(url), tmp_path / "run", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["turns"] >= 8 and row["retries"] == 0 and row["sampled"] for row in rows)
    assert max(row["ratio_deviation_max"] for row in rows) < 1e-5, "sampled from what was learned last"
    assert sorted(path.name for path in (tmp_path / "run" / "published").iterdir()) == ["000002", "000003"]
    _, params, _ = pretrained.load(tmp_path / "run" / "published" / "000003")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1, read_only=True)
    kept = checkpoints.restore_params(2, params)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, params, kept)


def test_a_server_that_is_not_there_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9: no inference server to sample from \(.*; start one"):
        train(config("http://127.0.0.1:9"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": "sglang"}, "external.server='sglang' has no effect without external.url"),
        ({"url": "localhost:80"}, "external.url='localhost:80': expected a server's address"),
        ({"url": "http://a", "server": "tgi"}, "external.server='tgi': expected one of agentrl, vllm"),
        ({"url": "http://a", "attempts": 0}, "external.attempts=0"),
        ({"url": "http://a", "deadline_s": 0.0}, "external.deadline_s=0.0"),
    ],
)
def test_settings_that_mean_nothing(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(replace(config(), external=External(**changes)))


def test_a_server_does_not_say_what_a_cut_left() -> None:
    cut = config("http://a")
    with pytest.raises(UserError, match=r"external\.url: a server does not say what top_k"):
        check(replace(cut, rollout=replace(cut.rollout, top_p=0.9)))


def test_a_dry_run_counts_no_sampler() -> None:
    memory = dry_run(config("http://nowhere"))["estimated_memory_bytes"]
    assert memory["sampler"] == memory["cache"] == 0 < memory["learner"]


def test_an_evaluation_publishes_nothing_to_the_server_of_a_run_at_work(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with claimed(tmp_path), pytest.raises(UserError, match="a run is at work here"):
        evaluate_run(config("http://127.0.0.1:9"), tmp_path)
