"""Trajectories turn by turn: which turns count, what makes a state the same, gains and potentials, branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import fake_suites
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.protocol import Action, Attribution, Budget, Cause, Check, ToolCall, Verdict
from agentrl_jax.rollout.play import play
from agentrl_jax.rollout.records import Branch, Trajectory
from agentrl_jax.rollout.renderers import ChatRenderer
from agentrl_jax.rollout.turns import SameState, action_key, most_turns, read_turns

LOOK, FINISH = ToolCall(name="look"), ToolCall(name="finish")


def add(n: int) -> ToolCall:
    return ToolCall(name="add", arguments={"n": n})


def played(renderer: ChatRenderer, member: int, *script: ToolCall | str, **changes: Any) -> Trajectory:
    suite = fake_suites.counter()
    found = play(suite, renderer, suite.tasks("train", 3, 0)[2], [*script, FINISH], 0, member=member)
    return replace(found, **changes)


def with_gains(t: Trajectory, gains: Sequence[float | None]) -> Trajectory:
    assert len(gains) == len(t.receipt.steps)
    steps = [
        replace(step, observation=replace(step.observation, evidence_gain=gain))
        for step, gain in zip(t.receipt.steps, gains, strict=True)
        if step.observation is not None
    ]
    return replace(t, receipt=replace(t.receipt, steps=tuple(steps)))


def branching(t: Trajectory, member: int, turn: int) -> Trajectory:
    return replace(t, branch=Branch(member=member, turn=turn))


def read(group: Sequence[Any], *, most: int = 5, same_state: SameState = "exchanges", size: int = 4) -> Any:
    return read_turns([group], group_size=size, most=most, same_state=same_state)


def test_turns_of_the_policy_have_a_place_each_and_shapes_depend_on_settings_alone(renderer: ChatRenderer) -> None:
    found = read([played(renderer, 2, add(1), add(2)), played(renderer, 0)])
    assert found.valid[0].sum(-1).tolist() == [1, 0, 3, 0]
    assert found.valid.shape == (1, 4, 5) and found.potentials.shape == (1, 4, 6) and found.branch_turn.shape == (1, 4)
    assert {field.dtype.name for field in found} == {"bool", "int32", "float32"}
    assert not found.cut.any() and (found.branch_member == -1).all() and not found.measured.any()


def test_turns_beyond_the_last_place_are_counted_and_never_lost_in_silence(renderer: ChatRenderer) -> None:
    found = read([played(renderer, 0, *[add(1)] * 4), played(renderer, 1, add(1))], most=3)
    assert found.cut.tolist() == [[2, 0, 0, 0]] and found.valid[0].sum(-1).tolist() == [3, 2, 0, 0]


def test_the_same_answers_to_the_same_actions_in_any_order_are_one_state(renderer: ChatRenderer) -> None:
    orders = [(add(2), LOOK, LOOK), (add(2), add(0), add(1)), (LOOK, LOOK, add(1)), (add(0), add(2), add(1))]
    found = read([played(renderer, i, *script) for i, script in enumerate(orders)])
    states = found.state_ids[0]
    assert len(set(states[:, 0].tolist())) == 1, "the start is the same for all"
    assert states[0, 1] == states[1, 1] != states[2, 1] != states[3, 1], "add 2 was answered with now 2"
    assert states[2, 2] not in states[[0, 1, 3], 2], "look, look"
    # 2 then 0 says now 2, now 2; 0 then 2 says now 0, now 2: not the same answers, though the same count.
    assert states[1, 2] != states[3, 2]


def test_two_looks_in_either_order_lead_to_one_state(renderer: ChatRenderer) -> None:
    group = [played(renderer, 0, LOOK, add(0), add(3)), played(renderer, 1, add(0), LOOK, add(3))]
    by_exchanges, by_observation = read(group).state_ids[0], read(group, same_state="observation").state_ids[0]
    assert by_exchanges[0, 1] != by_exchanges[1, 1], "another action was answered"
    assert by_exchanges[0, 2] == by_exchanges[1, 2] and by_exchanges[0, 3] == by_exchanges[1, 3]
    assert by_observation[0, 1] == by_observation[1, 1] == by_observation[0, 2], "now 0, whatever was asked"
    assert by_observation[0, 0] != by_observation[0, 1]


def test_actions_are_the_same_whatever_was_said_before_them(renderer: ChatRenderer) -> None:
    calls = (add(1),)
    assert action_key(Action(text="let me think", calls=calls)) == action_key(Action(text="", calls=calls))
    keys = [Action(text="a"), Action(text="b"), Action(text="a", error="bad"), Action(text="a", calls=(add(2),))]
    assert len({action_key(action) for action in (*keys, Action(text="x", calls=calls))}) == 5
    assert action_key(Action(text=" a ")) == action_key(Action(text="a"))
    found = read([played(renderer, 0, add(1), add(1)), played(renderer, 1, add(1), add(2))])
    ids = found.action_ids[0]
    assert ids[0, 0] == ids[0, 1] == ids[1, 0] != ids[1, 1] and ids[0, 2] == ids[1, 2]


def test_potentials_add_up_what_was_gained(renderer: ChatRenderer) -> None:
    t = with_gains(played(renderer, 1, add(1), LOOK, add(2)), [0.5, None, 0.25, 0.0])
    found = read([t])
    assert found.gains[0, 1].tolist() == [0.5, 0, 0.25, 0, 0] and found.measured[0, 1].tolist() == [1, 0, 1, 1, 0]
    assert found.potentials[0, 1].tolist() == [0, 0.5, 0.5, 0.75, 0.75, 0.75]
    assert not found.potentials[0, 0].any()


def test_a_branch_has_the_turns_that_it_took_and_what_its_source_gained(renderer: ChatRenderer) -> None:
    source = with_gains(played(renderer, 0, add(1), add(1)), [0.5, 0.0, 0.25])
    whole = with_gains(played(renderer, 2, add(1), add(3)), [0.5, 1.0, 0.0])
    found = read([branching(whole, 0, 1), source])
    assert (found.branch_member[0].tolist(), found.branch_turn[0].tolist()) == ([-1, -1, 0, -1], [-1, -1, 1, -1])
    assert found.valid[0, 2].tolist() == [False, True, True, False, False]
    assert found.gains[0, 2].tolist() == [0, 1, 0, 0, 0], "the source's gain is the source's"
    assert found.potentials[0, 2].tolist() == [0, 0.5, 1.5, 1.5, 1.5, 1.5]
    assert found.state_ids[0, 2, 1] == found.state_ids[0, 0, 1], "it went on from that very state"
    with pytest.raises(ValueError, match="member 2 continues member 3, which is not there"):
        read([branching(whole, 3, 1), source])
    with pytest.raises(ValueError, match="member 2 continues member 2"):
        read([branching(whole, 2, 1), source])


def test_a_violation_is_known_of_who_counts(renderer: ChatRenderer) -> None:
    broken = Verdict(outcome=True, constraints=(Check(name="polite", passed=False),))
    lost = Attribution(cause=Cause.ENVIRONMENT, evidence="it died")
    group = [
        played(renderer, 0, verdict=broken),
        played(renderer, 1, verdict=broken, attribution=lost),
        played(renderer, 2, verdict=Verdict(outcome=True)),
    ]
    assert read(group).violated.tolist() == [[True, False, False, False]]


@settings(deadline=None, max_examples=20)
@given(
    scripts=st.lists(st.lists(st.sampled_from([0, 1, 2]), max_size=3), min_size=2, max_size=4), seed=st.integers(0, 9)
)
def test_the_order_of_members_names_states_and_changes_nothing_else(renderer, scripts, seed) -> None:
    members = [played(renderer, i, *map(add, script)) for i, script in enumerate(scripts)]
    order = np.random.default_rng(seed).permutation(len(members))
    moved = [replace(members[place], member=i) for i, place in enumerate(order)]
    found, after, shuffled = read(members), read(moved), read(list(reversed(members)))
    for name in found._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(shuffled, name), err_msg=name)
    where = found.valid[0][order]
    for name in ("state_ids", "action_ids"):
        before, now = getattr(found, name)[0][order][where], getattr(after, name)[0, : len(order)][where]
        np.testing.assert_array_equal(before[:, None] == before[None], now[:, None] == now[None])
    longer = read(members, most=9)
    np.testing.assert_array_equal(longer.state_ids[..., :5], found.state_ids)
    assert not longer.valid[..., 5:].any()


def test_a_budget_bounds_the_turns(renderer: ChatRenderer) -> None:
    assert most_turns(Budget(steps=5, retries=2, tokens=4096)) == 7
    assert most_turns(Budget(steps=5, retries=2, tokens=3)) == 3
    suite = fake_suites.counter()
    most = most_turns(suite.spec.budget)
    for script in ([add(0)] * 40, [LOOK] * 40, [add(0), "hm"] * 20):
        t = play(suite, renderer, suite.tasks("train", 3, 0)[2], script, 0)
        assert t.turns <= most and not read([t], most=most).cut.any()
