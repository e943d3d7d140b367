"""Packing: whatever is packed can be read back, and nothing depends on the order groups arrive in."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.batch import Source
from agentrl_jax.protocol import StopReason, Task, Verdict
from agentrl_jax.rollout.packing import pack, rows_needed, used_rows
from agentrl_jax.rollout.records import Ledger, Receipt, Trajectory

ROLES = st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=5)


def make(group: int, member: int, spans: list[tuple[bool, int]], prompt: int = 5, seed: int = 0) -> Trajectory:
    """A trajectory of `prompt` tokens and spans (chosen?, length) with recognisable numbers in every field."""
    mask = [False] * prompt + [chosen for chosen, length in spans for _ in range(length)]
    turns = [0] * prompt + [turn for turn, (_, length) in enumerate(spans) for _ in range(length)]
    count = len(mask)
    shared = np.random.default_rng(group).integers(1, 50, prompt).tolist()
    own = np.random.default_rng([group, member, 7]).integers(1, 50, count - prompt).tolist()
    task = Task(id=f"t{group}", split="train")
    receipt = Receipt(
        environment="e", environment_version="1", verifier_version="1", tools=(), ref=None, task=task, seed=seed,
        reset_hash="", steps=(), ledger=Ledger(), stop=StopReason.COMPLETED,
    )  # fmt: skip
    return Trajectory(
        group=group, member=member, task=task, seed=seed, tokens=tuple(shared + own),
        sources=tuple(int(Source.POLICY if m else Source.USER) for m in mask), action_mask=tuple(mask),
        behavior_logprobs=tuple(-0.25 * (i + 1) if m else 0.0 for i, m in enumerate(mask)),
        policy_versions=tuple(3 if m else -1 for m in mask), turn_ids=tuple(turns), prompt_length=prompt,
        stop=StopReason.COMPLETED, verdict=Verdict(outcome=True), attribution=None, receipt=receipt,
    )  # fmt: skip


def ancestors(batch, row: int, column: int) -> list[int]:
    """Columns that the token reads, by the border's one rule."""
    return [j for j in range(column + 1) if j <= column < batch.subtree_ends[row, j]]


def read_back(batch, shared: int) -> dict[int, dict[str, list]]:
    """Every trajectory by its id, read along the tokens its last one may see."""
    found = {}
    for row, column in np.argwhere(batch.trajectory_ids < shared):
        columns = ancestors(batch, int(row), int(column))
        name = int(batch.trajectory_ids[row, column])
        found[name] = {
            field: getattr(batch, field)[row, columns].tolist()
            for field in ("tokens", "sources", "action_mask", "behavior_logprobs", "policy_versions", "turn_ids")
        }  # the last token of a trajectory comes last, so it wins
        assert batch.positions[row, columns].tolist() == list(range(len(columns)))
        assert batch.parents[row, columns].tolist() == [-1, *columns[:-1]]
    return found


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(st.lists(ROLES, min_size=1, max_size=4), min_size=1, max_size=5), width=st.integers(40, 70))
def test_packed_trajectories_read_back_as_they_were(groups, width):
    made = [[make(g, m, spans) for m, spans in enumerate(group)] for g, group in enumerate(groups)]
    rows = rows_needed(made, width=width, group_size=4) + 1
    batch = pack(made, rows=rows, width=width, group_size=4, pad_id=0)
    assert used_rows(batch) == rows - 1
    found = read_back(batch, len(made) * 4)
    for index, group in enumerate(made):
        for t in group:
            end = max((i + 1 for i, m in enumerate(t.action_mask) if m), default=0)
            if end == 0:
                assert index * 4 + t.member not in found
                continue
            row = found[index * 4 + t.member]
            for field, values in row.items():
                assert values == [type(v)(x) for v, x in zip(values, getattr(t, field)[:end], strict=True)], field


@settings(max_examples=25, deadline=None)
@given(groups=st.lists(st.lists(ROLES, min_size=1, max_size=3), min_size=2, max_size=5), order=st.randoms())
def test_p29_order_of_groups_changes_nothing_but_the_numbering(groups, order):
    made = [[make(g, m, spans) for m, spans in enumerate(group)] for g, group in enumerate(groups)]
    moved = [list(group) for group in made]
    order.shuffle(moved)
    for group in moved:
        order.shuffle(group)
    settings_ = {"rows": 12, "width": 64, "group_size": 3, "pad_id": 0}
    one, two = pack(made, **settings_), pack(moved, **settings_)
    for field in ("tokens", "parents", "subtree_ends", "positions", "action_mask", "behavior_logprobs"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field))


def test_the_prompt_of_a_group_is_stored_once():
    group = [make(0, m, [(True, 4)], prompt=10) for m in range(4)]
    batch = pack([group], rows=1, width=32, group_size=4, pad_id=0)
    assert int((batch.sources != Source.PADDING).sum()) == 10 + 4 * 4
    assert (batch.trajectory_ids[0, :10] == 4).all()


def test_members_with_other_prompts_do_not_share():
    other = make(9, 1, [(True, 4)])
    batch = pack([[make(0, 0, [(True, 4)]), other]], rows=1, width=32, group_size=2, pad_id=0)
    assert int((batch.parents == -1).sum()) - int((batch.sources == Source.PADDING).sum()) == 2


def test_p12_pad_id_may_equal_the_end_of_turn_id():
    """Lengths 2, 2, 1 and mask sums 2, 2, 1 although pad = end = 9: nothing is inferred from a token's value."""
    from dataclasses import replace

    groups = []
    for g, response in enumerate(([5, 9], [5, 6], [9])):
        t = make(g, 0, [(True, len(response))], prompt=1)
        groups.append([replace(t, tokens=(3, *response))])
    batch = pack(groups, rows=3, width=4, group_size=1, pad_id=9)
    sums = [int(batch.action_mask[batch.trajectory_ids == i].sum()) for i in range(3)]
    assert sums == [2, 2, 1]
    assert [int((batch.trajectory_ids == i).sum()) for i in range(3)] == [2, 2, 1]


def test_p15_trailing_tokens_after_the_last_action_are_left_out():
    batch = pack([[make(0, 0, [(True, 2), (False, 9)])]], rows=1, width=8, group_size=1, pad_id=0)
    assert int((batch.sources != Source.PADDING).sum()) == 7


def test_what_does_not_fit_is_named():
    long = make(0, 2, [(True, 30)])
    with pytest.raises(ValueError, match="width=16: task 't0' member 2 has 35 tokens"):
        pack([[long]], rows=1, width=16, group_size=4, pad_id=0)
    groups = [[make(g, 0, [(True, 8)])] for g in range(3)]
    with pytest.raises(ValueError, match=r"rows=2: .*need 3 rows"):
        pack(groups, rows=2, width=16, group_size=1, pad_id=0)
    with pytest.raises(ValueError, match="there twice"):
        pack([[groups[0][0], groups[0][0]]], rows=2, width=64, group_size=2, pad_id=0)


def test_packing_128_trajectories_is_quick():
    groups = [[make(g, m, [(True, 20), (False, 20), (True, 20)], prompt=40) for m in range(8)] for g in range(16)]
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        pack(groups, rows=64, width=256, group_size=8, pad_id=0)
        best = min(best, time.process_time() - started)
    assert best < 0.05
