"""Branches in forest rows: what they share with their source lies there once, and is trained once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import make, read_back

from agentrl_jax.batch import Source, TokenBatch
from agentrl_jax.rl import weights
from agentrl_jax.rollout.packing import pack, rows_needed, used_rows
from agentrl_jax.rollout.records import Branch, Break, Trajectory

SPANS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4)
PER_TOKEN = ("tokens", "sources", "action_mask", "behavior_logprobs", "policy_versions", "turn_ids")


def trunk(member: int, turns: list[tuple[int, int]], *, prompt: int = 5, stray: int = 0) -> Trajectory:
    """Turns of (sampled, then read) tokens; a turn id is that of the turn that an observation answers."""
    spans = [span for sampled, read in turns for span in ((True, sampled), (False, read))]
    made = make(0, member, spans, prompt=prompt, seed=stray)
    return replace(made, turn_ids=tuple([0] * prompt + [n for n, turn in enumerate(turns) for _ in range(sum(turn))]))


def branch(member: int, source: Trajectory, turn: int, turns: list[tuple[int, int]]) -> Trajectory:
    """Up to the turn the source, from there on turns of its own."""
    start = next((n for n, at in enumerate(source.turn_ids) if at >= turn), len(source.tokens))
    own = trunk(member, turns)
    fields = {name: getattr(source, name)[:start] + getattr(own, name)[5:] for name in PER_TOKEN}
    later = tuple(at + turn for at in own.turn_ids[5:])
    fields["turn_ids"] = source.turn_ids[:start] + later
    left = Branch(member=source.member, turn=turn)
    return replace(own, **fields, branch=left, breaks=tuple(cut for cut in source.breaks if cut.start < start))


def sampled(t: Trajectory) -> list[int]:
    """Columns of what was sampled for it, and not for its source."""
    return [n for n, chosen in enumerate(t.action_mask) if chosen and n >= t.branch_start]


@settings(max_examples=80, deadline=None)
@given(trunks=st.lists(SPANS, min_size=1, max_size=2), data=st.data(), room=st.integers(0, 60))
def test_every_trajectory_is_read_back_whole_and_trained_where_it_was_sampled(trunks, data, room):
    group = [trunk(m, turns) for m, turns in enumerate(trunks)]
    for member in range(len(trunks), data.draw(st.integers(len(trunks), 5)) + 1):
        source = group[data.draw(st.integers(0, len(trunks) - 1))]
        group.append(branch(member, source, data.draw(st.integers(1, source.turns)), data.draw(SPANS)))
    width = max(len(t.tokens) for t in group) + room  # what exceeds a row is refused
    rows = rows_needed([group], width=width, group_size=6)
    batch = pack([group], rows=rows, width=width, group_size=6, pad_id=0)
    found = read_back(batch, 6)
    assert used_rows(batch) == rows and batch.action_mask.sum() == sum(len(sampled(t)) for t in group)
    for t in group:
        last = sampled(t)[-1] + 1
        assert found[t.member]["tokens"] == list(t.tokens[:last])
        mine = (batch.trajectory_ids == t.member) & batch.action_mask
        assert sorted(batch.positions[mine]) == sampled(t), "each action once, and nobody's else"
        at = {int(p): c for p, c in zip(batch.positions[mine], np.argwhere(mine), strict=True)}
        for name in ("tokens", "behavior_logprobs", "policy_versions", "turn_ids"):
            values = [getattr(batch, name)[tuple(at[n])] for n in sampled(t)]
            assert values == [type(v)(getattr(t, name)[n]) for v, n in zip(values, sampled(t), strict=True)], name


def test_the_prefix_of_a_branch_lies_there_once():
    source = trunk(0, [(3, 2), (3, 2), (4, 1)])
    group = [source, branch(1, source, 1, [(2, 1)]), branch(2, source, 2, [(6, 0)]), branch(3, source, 2, [(1, 0)])]
    batch = pack([group], rows=1, width=64, group_size=4, pad_id=0)
    assert int((batch.sources != Source.PADDING).sum()) == 5 + 14 + 2 + 6 + 1
    # Depth first: the source to its end, then whoever left it last.
    assert batch.trajectory_ids[0, 5:28].tolist() == [0] * 14 + [2] * 6 + [3] + [1] * 2
    parents = {member: int(batch.parents[0][batch.trajectory_ids[0] == member][0]) for member in (1, 2, 3)}
    assert parents == {1: 9, 2: 14, 3: 14}
    assert batch.subtree_ends[0, [0, 9, 10, 14, 15, 19, 25]].tolist() == [28, 28, 26, 26, 19, 25, 26]


def test_a_tree_that_exceeds_a_row_trains_each_action_once():
    source = trunk(0, [(3, 2), (4, 0)])
    group = [source, branch(1, source, 1, [(8, 0)]), branch(2, source, 1, [(8, 0)])]
    batch = pack([group], rows=3, width=24, group_size=3, pad_id=0)
    assert used_rows(batch) == 2 and batch.action_mask.sum() == 7 + 8 + 8
    (alone,) = (row for row in range(2) if not (batch.trajectory_ids[row] == 0).any())
    prefix = slice(0, 10)
    assert not batch.action_mask[alone, prefix].any() and (batch.trajectory_ids[alone, prefix] == 3).all()
    assert (batch.sources[alone, 5:8] == Source.POLICY).all(), "read, and not trained"
    assert (batch.behavior_logprobs[alone, prefix] == 0).all() and (batch.policy_versions[alone, prefix] == -1).all()


def test_a_source_that_ends_before_the_point_or_is_not_there():
    """It was asked for turn 1 and sampled nothing; what it had read by then is no part of what it teaches."""
    source = trunk(0, [(3, 2)])
    left = branch(1, source, 1, [(4, 0)])
    batch = pack([[source, left]], rows=1, width=32, group_size=2, pad_id=0)
    assert int((batch.sources != Source.PADDING).sum()) == 8 + 2 + 4
    assert batch.trajectory_ids[0, :14].tolist() == [2] * 5 + [0] * 3 + [2] * 2 + [1] * 4
    alone = pack([[left]], rows=1, width=32, group_size=2, pad_id=0)
    assert alone.action_mask.sum() == 4 and int((alone.sources != Source.PADDING).sum()) == 14


def test_segments_before_the_branch_point_are_the_sources():
    source = trunk(0, [(2, 6), (3, 2), (2, 0)])
    source = replace(source, breaks=(Break(start=8, prompt_length=5, reason="rewritten"),))
    left = branch(1, source, 2, [(4, 0)])
    assert left.segments == 2 and left.spans[1] == (8, 13, 22)
    for width, rows in ((64, 1), (15, 3)):
        batch = pack([[source, left]], rows=rows, width=width, group_size=2, pad_id=0)
        assert batch.action_mask.sum() == 7 + 4 and used_rows(batch) == rows
        mine = batch.trajectory_ids == 1
        assert sorted(batch.positions[mine]) == [10, 11, 12, 13], "its segment began 8 tokens in"


def test_a_branch_that_does_not_begin_as_its_source_is_named():
    source = trunk(0, [(3, 2), (4, 0)])
    left = branch(1, source, 1, [(4, 0)])
    with pytest.raises(ValueError, match="member 1 does not begin with the first 10 tokens of member 0"):
        pack([[replace(source, tokens=(9, *source.tokens[1:])), left]], rows=2, width=32, group_size=2, pad_id=0)


@pytest.mark.parametrize("width", [64, 24])
def test_the_weights_count_what_was_sampled(width):
    source = trunk(0, [(3, 2), (4, 0)])
    group = [source, branch(1, source, 1, [(8, 0)]), branch(2, source, 1, [(2, 0)])]
    batch = pack([group], rows=3, width=width, group_size=3, pad_id=0)
    each = by_member(batch, weights.sequence_mean)
    np.testing.assert_allclose(each, [1 / 3] * 3, rtol=1e-6)  # members alike
    np.testing.assert_allclose(by_member(batch, weights.token_mean), [7 / 17, 8 / 17, 2 / 17], rtol=1e-6)
    np.testing.assert_allclose(by_member(batch, weights.nested_turn_mean), [1 / 3] * 3, rtol=1e-6)


def by_member(batch: TokenBatch, of: Any) -> np.ndarray:
    arrays = (jnp.asarray(x) for x in (batch.action_mask, batch.trajectory_ids, batch.turn_ids))
    found = np.asarray(jax.device_get(jax.jit(lambda *a: of(*a, num_trajectories=3))(*arrays)))
    assert (found[~batch.action_mask] == 0).all()
    return np.asarray([found[batch.trajectory_ids == member].sum() for member in range(3)])
