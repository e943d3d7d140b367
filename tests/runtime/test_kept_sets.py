"""From a sampler that cuts to a learner that knows: the first ratio is 1, and the gradient that of all logits."""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentrl_jax.batch import Source, validate
from agentrl_jax.kernels.kept import unpack
from agentrl_jax.learner.score import Scorer
from agentrl_jax.models import llama
from agentrl_jax.protocol import StopReason, Task, Verdict
from agentrl_jax.rl.algorithms import grpo
from agentrl_jax.rl.objective import policy_loss
from agentrl_jax.rollout.packing import pack
from agentrl_jax.rollout.records import Ledger, Receipt, Trajectory
from agentrl_jax.rollout.sampling import SampleRequest, kept_ids
from agentrl_jax.runtime.engine import Engine
from agentrl_jax.runtime.publish import publish

CONFIG = llama.LlamaConfig(vocab_size=61, width=32, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=64)
TEMPERATURE = 0.8
SCORER = Scorer(partial(llama.hidden, CONFIG), partial(llama.unembedding, CONFIG), temperature=TEMPERATURE, chunk=32)
CUTS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.02},
)


@pytest.fixture(scope="module")
def params():
    # Larger than they are made, so that the distributions are not flat and a cut leaves a part of the mass.
    return jax.tree.map(lambda x: 1.3 * x, llama.init(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="module")
def group(params):
    """An episode of three turns under each of the cuts."""
    # Of the sizes of test_engine.py's: the workers of a session compile it once.
    engine = Engine(CONFIG, slots=8, context=96, bank=4, prefill_chunk=8, decode_steps=4, stop_ids=(3,), seed=7)
    engine.publish(publish(CONFIG, params), 0)
    prompt = list(range(5, 15))
    talks = [{"tokens": [], "mask": [], "logprobs": [], "kept": []} for _ in CUTS]
    for turn in range(3):
        for slot, (cut, talk) in enumerate(zip(CUTS, talks, strict=True)):
            ids = prompt if turn == 0 else [20 + turn, 30 + slot]
            say(talk, ids, False)
            engine.submit(
                SampleRequest(slot=slot, key=(slot, turn), ids=tuple(ids), fresh=turn == 0, max_tokens=6,
                              temperature=TEMPERATURE, **cut)
            )  # fmt: skip
        while engine.busy:
            for sample in engine.advance():
                say(talks[sample.slot], sample.ids, True, sample.logprobs, sample.kept)
    return [trajectory(member, len(prompt), **talk) for member, talk in enumerate(talks)]


def say(talk, ids, chosen, logprobs=None, kept=None):
    talk["tokens"] += ids
    talk["mask"] += [chosen] * len(ids)
    talk["logprobs"] += logprobs or [0.0] * len(ids)
    talk["kept"] += kept or [b""] * len(ids)


def trajectory(member, prompt, tokens, mask, logprobs, kept):
    task = Task(id="t", split="train")
    receipt = Receipt(
        environment="e", environment_version="1", verifier_version="1", tools=(), ref=None, task=task, seed=0,
        reset_hash="", steps=(), ledger=Ledger(), stop=StopReason.COMPLETED,
    )  # fmt: skip
    return Trajectory(
        group=0, member=member, task=task, seed=0, tokens=tuple(tokens), action_mask=tuple(mask),
        sources=tuple(int(Source.POLICY if m else Source.USER) for m in mask), behavior_logprobs=tuple(logprobs),
        policy_versions=tuple(0 if m else -1 for m in mask), turn_ids=(0,) * len(tokens), prompt_length=prompt,
        stop=StopReason.COMPLETED, verdict=Verdict(outcome=True), attribution=None, receipt=receipt, kept=tuple(kept),
    )  # fmt: skip


def packed(group, **changes):
    settings = {"rows": 2, "width": 96, "group_size": 4, "pad_id": 0, "vocab_size": CONFIG.vocab_size, "kept": True}
    return pack([group], **settings | changes)


def test_p37_the_learner_scores_what_a_cutting_sampler_drew_with_its_own_logprobs(params, group):
    batch = packed(group)
    assert batch.kept.shape == (2, 96, 2) and batch.action_mask.sum() > 40
    score = jax.jit(lambda batch: SCORER.logprobs(params, batch)[0])
    mask, behavior = batch.action_mask, batch.behavior_logprobs
    found = np.abs(np.asarray(score(jax.tree.map(jnp.asarray, batch))) - behavior)[mask]
    assert found.max() < 1e-5, found.max()
    blind = batch._replace(kept=None)
    short = np.asarray(jax.jit(lambda batch: SCORER.logprobs(params, batch)[0])(blind))[mask] - behavior[mask]
    assert short.mean() < -0.03 and short.max() < 1e-5, "over the whole vocabulary every token seems less likely"


def test_the_gradient_is_that_of_all_logits_with_the_rest_left_out(params, group):
    batch = packed(group)
    rng = np.random.default_rng(1)
    credit = np.where(batch.action_mask, rng.normal(size=batch.tokens.shape), 0).astype(np.float32)
    batch = jax.tree.map(jnp.asarray, batch._replace(advantages=credit, weights=np.abs(credit)))
    objective = grpo(beta=0.0)

    def ours(params):
        return SCORER.loss(partial(policy_loss, objective), params, batch)[0]

    def naive(params):
        hidden = llama.hidden(CONFIG, params, batch.tokens, batch.positions, batch.subtree_ends)
        reads = jnp.maximum(batch.parents, 0)[..., None]
        logits = jnp.take_along_axis(hidden, reads, axis=1) @ llama.unembedding(CONFIG, params).T / TEMPERATURE
        table = jax.nn.log_softmax(jnp.where(unpack(batch.kept, CONFIG.vocab_size), logits, -jnp.inf))
        logprobs = jnp.take_along_axis(table, batch.tokens[..., None], axis=-1)[..., 0]
        return policy_loss(objective, jnp.where(batch.action_mask, logprobs, 0.0), None, batch)[0]

    (value, found), (expected, grads) = (jax.jit(jax.value_and_grad(f))(params) for f in (ours, naive))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), found, grads)


def test_a_trajectory_keeps_its_sets_through_json(group):
    again = [Trajectory.from_json(json.loads(json.dumps(t.to_json()))) for t in group]
    assert again == group
    np.testing.assert_array_equal(packed(again).kept, packed(group).kept)
    with pytest.raises(ValueError, match=r"Trajectory.kept: expected text in base 64, got 3"):
        Trajectory.from_json({**group[0].to_json(), "kept": [3]})


def test_a_packed_set_is_its_tokens_and_everything_where_nothing_was_cut(group):
    batch = packed(group)
    sets = np.asarray(unpack(jnp.asarray(batch.kept), CONFIG.vocab_size))
    assert sets[~batch.action_mask].all()
    for trajectory in group:
        row, columns = read(batch, trajectory.member)
        own = [kept for kept in trajectory.kept[trajectory.prompt_length :] if kept]
        chosen = columns[batch.action_mask[row, columns]]
        assert [tuple(np.flatnonzero(sets[row, c])) for c in chosen] == [kept_ids(kept) for kept in own[: len(chosen)]]


def read(batch, member):
    row = int(np.argwhere(batch.trajectory_ids == member)[0, 0])
    return row, np.flatnonzero(batch.trajectory_ids[row] == member)


def test_sets_that_would_be_lost_or_do_not_fit_are_refused(group):
    with pytest.raises(ValueError, match="pass kept=True and vocab_size"):
        packed(group, kept=False)
    with pytest.raises(ValueError, match="kept=True needs vocab_size"):
        packed(group, vocab_size=None)
    batch = packed(group)
    with pytest.raises(ValueError, match=r"TokenBatch.kept: expected uint32\(2, 96, 3\), got uint32\(2, 96, 2\)"):
        validate(batch, vocab_size=65)
    kept = batch.kept.copy()
    row, column = np.argwhere(batch.action_mask)[3]
    kept[row, column] = 0
    with pytest.raises(ValueError, match=rf"TokenBatch.kept: the token itself .*row {row}, column {column}"):
        validate(batch._replace(kept=kept), vocab_size=CONFIG.vocab_size)
