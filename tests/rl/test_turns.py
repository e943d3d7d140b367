"""Credit of turns: worked numbers, a tree of dictionaries beside the arrays, exact zeros, permutations, padding."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax.batch import GroupTurns
from agentrl_jax.rl import turns as credits
from agentrl_jax.rl.advantages import group_centered, leave_one_out
from agentrl_jax.rl.credit import to_tokens
from agentrl_jax.rl.potentials import conservation_error
from agentrl_jax.rl.steps import gigpo
from agentrl_jax.rl.trees import sibling_advantages, subtree_means

POTENTIAL, STEP, RTMC = credits.potential_credit(scale=0.5), credits.step_credit(), credits.rtmc_credit()
EVERY = {"potential": POTENTIAL, "step": STEP, "rtmc": RTMC, "branch": credits.branch_credit}
JITTED = {name: jax.jit(credit) for name, credit in EVERY.items()}
MEMBERS, MOST = 8, 5  # of every group here, so that each credit compiles once; who is not in a test never acted


def of(name, turns, rewards, valid=None):
    """The credit of the members that the rewards are of."""
    count = len(rewards)
    rewards = np.append(rewards, np.full(MEMBERS - count, np.nan, np.float32))
    valid = np.ones(count, bool) if valid is None else valid
    return np.asarray(JITTED[name](turns, rewards, np.append(valid, np.zeros(MEMBERS - count, bool))))[:count]


def group(lengths, branches=None, *, states=None, actions=None, gains=None, violated=()) -> GroupTurns:
    """Members of so many turns each; `branches[g] = (member, turn)`; states and actions differ where not given."""
    members, most = MEMBERS, MOST
    valid, begins = np.zeros((members, most), bool), np.full((2, members), -1, np.int32)
    for g, length in enumerate(lengths):
        valid[g, :length] = True
    for g, (source, turn) in (branches or {}).items():
        begins[:, g] = source, turn
        valid[g, :turn] = False
    numbers = np.arange(members * most, dtype=np.int32).reshape(members, most)

    def laid(rows, fill):
        found = fill.copy()
        for g, row in enumerate(rows or ()):
            found[g, : len(row)] = row
        return found

    gained = laid(gains, np.zeros((members, most), np.float32))
    return GroupTurns(
        valid=valid, state_ids=laid(states, numbers), action_ids=laid(actions, numbers), answered=valid.copy(),
        gains=gained, measured=gained > 0,
        potentials=np.cumsum(np.pad(gained, ((0, 0), (1, 0))), axis=1, dtype=np.float32),
        branch_member=begins[0], branch_turn=begins[1],
        violated=np.append(np.asarray(violated, bool), np.zeros(members - len(violated), bool)),
        cut=np.zeros(members, np.int32),
    )  # fmt: skip


def floats(*values):
    return np.asarray(values, np.float32)


def close(found, expected, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected, np.float32), rtol=1e-5, atol=atol)


# -- branches ----------------------------------------------------------------------------------------------------------

# Two plans, four continuations of each: the leaves of C3's example, [[1, 0, 1, 1], [0, 0, 1, 0]].
PLANS = group([2] * 8, {1: (0, 1), 2: (0, 1), 3: (0, 1), 5: (4, 1), 6: (4, 1), 7: (4, 1)})
LEAVES = floats(1, 0, 1, 1, 0, 0, 1, 0)


def test_branches_worked_numbers():
    found = of("branch", PLANS, LEAVES)
    third = 1 / 3
    close(found[:, 1], [third, -1, third, third, -third, -third, 1, -third])  # c3.leaf
    close(found[[0, 4], 0], [0.5, -0.5])  # c3.plan: the trunks, a plan's four leaves beside the other's
    assert not found[[1, 2, 3, 5, 6, 7], 0].any(), "the plan's turn counts once, in the member that took it"


def test_a_branch_from_a_branch_worked_numbers():
    """Member 0 acts four times; 1 leaves it before turn 1; 2 leaves 1 before turn 2; 3 begins anew. R = 1 0 1 0.

    start: 0's turn 0 leads to 0, 1 and 2 (2/3), 3's to itself (0).   before turn 1: 0's own (1), 1's (1, with 2: 1/2).
    before turn 2 of 1: 1's own (0), 2's (1).   Turns 2 and 3 of member 0 come to what its turn 1 came to.
    """
    turns = group([4, 3, 3, 2], {1: (0, 1), 2: (1, 2)})
    found = of("branch", turns, floats(1, 0, 1, 0))
    two = 2 / 3
    close(found[:, :4], [[two, 0.5, 0.5, 0.5], [0, -0.5, -1, 0], [0, 0, 1, 0], [-two, -two, 0, 0]])
    deeper = group([4, 3, 3, 2], {1: (0, 1), 2: (1, 1)})  # before turn 1 of 1 is before turn 1 of 0: three ways on
    close(of("branch", deeper, floats(1, 0, 1, 0))[:3, 1], [0.5, -1, 0.5])


def test_a_start_with_one_way_on_says_nothing_about_the_turns_before_the_first_branching():
    turns = group([3, 3, 3], {1: (0, 2), 2: (0, 2)})
    found = of("branch", turns, floats(1, 0, 0))
    close(found[:, :3], [[0, 0, 1], [0, 0, -0.5], [0, 0, -0.5]])


def test_without_branches_it_is_the_episodes_advantage_in_its_group():
    turns = group([1, 3, 2, 4])
    rewards, valid = floats(1, 0.3, 0, 0.7), np.asarray([True, True, False, True])
    episodes = np.asarray(leave_one_out(jnp.asarray(rewards), jnp.asarray(valid)))
    close(of("branch", turns, rewards, valid), np.where(turns.valid[:4], episodes[:, None], 0))


def test_a_member_that_does_not_count_is_not_read_and_its_source_goes_on():
    turns = group([3, 3, 3], {1: (0, 1)})
    found = of("branch", turns, floats(1, np.nan, 0), np.asarray([True, False, True]))
    close(found[:, :3], [[1, 1, 1], [0, 0, 0], [-1, -1, -1]])
    found = of("branch", turns, floats(np.nan, 1, 0), np.asarray([False, True, True]))
    close(found[:, :3], [[1, 0, 0], [0, 1, 1], [-1, -1, -1]])  # its one way on is no branching


def as_tree(turns: GroupTurns, rewards, valid) -> np.ndarray:
    """The same by names: a way is what was done from the start on, (member, turn) after (member, turn)."""
    members, most = len(rewards), MOST
    ways = {}
    for g in range(members):
        way = [(g, k) for k in range(most) if turns.valid[g, k]]
        source, begin = turns.branch_member[g], turns.branch_turn[g]
        while source >= 0:
            way = [(source, k) for k in range(begin) if turns.valid[source, k]] + way
            source, begin = turns.branch_member[source], min(begin, turns.branch_turn[source])
        ways[g] = way
    leaves = {g: way for g, way in ways.items() if valid[g] and turns.valid[g].any()}

    def came_to(prefix):
        return [float(rewards[g]) for g, way in leaves.items() if way[: len(prefix)] == prefix]

    found = np.zeros((members, most))
    for g, way in ways.items():
        credit = 0.0
        for n, (taker, k) in enumerate(way):
            next_steps = {tuple(other[: n + 1]) for other in leaves.values() if other[:n] == way[:n] and len(other) > n}
            others = [np.mean(came_to(list(each))) for each in next_steps if list(each) != way[: n + 1]]
            if others:
                credit = np.mean(came_to(way[: n + 1]) or [0.0]) - np.mean(others)
            elif n == 0:
                credit = 0.0
            if taker == g and came_to(way[: n + 1]):
                found[g, k] = credit
    return found


@st.composite
def branched(draw):
    """Groups of up to six members, any of which may continue an earlier one."""
    lengths = [draw(st.integers(1, 5)) for _ in range(draw(st.integers(2, 6)))]
    branches = {}
    for g in range(1, len(lengths)):
        if draw(st.booleans()):
            source = draw(st.integers(0, g - 1))
            branches[g] = (source, turn := draw(st.integers(0, lengths[source] - 1)))
            # A state of its source's own path, which that one may have from its source in turn.
            lengths[g] = max(lengths[g], turn + 1)
    rewards = floats(*(draw(st.sampled_from([0, 0.25, 1])) for _ in lengths))
    return group(lengths, branches), rewards, np.asarray([draw(st.booleans()) for _ in lengths])


@settings(deadline=None, max_examples=60)
@given(branched())
def test_branches_by_names(drawn):
    close(of("branch", *drawn), as_tree(*drawn))


@settings(deadline=None, max_examples=30)
@given(branched(), st.sampled_from([0.1, 0.3, 1.0]))
def test_equal_rewards_of_branches_give_exactly_zero(drawn, reward):
    turns, rewards, valid = drawn
    assert not of("branch", turns, np.full_like(rewards, reward), valid).any()


def test_branches_as_nodes_of_a_tree():
    """The same numbers from `trees`: a node a turn, parents before children."""
    turns = group([4, 3, 3, 2], {1: (0, 1), 2: (1, 2)})
    parents = np.asarray([-1, 0, 1, 2, 0, 4, 4, -1, 7], np.int32)  # 0's four turns, 1's two, 2's one, 3's two
    rewards = floats(0, 0, 0, 1, 0, 0, 1, 0, 0)
    means, leaves = subtree_means(parents, jnp.asarray(rewards))
    beside = np.asarray(sibling_advantages(jnp.asarray(parents), means, leaves > 0))
    found = of("branch", turns, floats(1, 0, 1, 0))[turns.valid[:4]]
    branching = [0, 1, 4, 5, 6, 7]
    close(found[branching], beside[branching])


# -- what turns gained; states --------------------------------------------------------------------------------------


def test_gains_are_paid_once_and_never_to_who_broke_a_constraint():
    turns = group([3, 2, 3], gains=[[0.25, 0, 0.5], [0, 1], [1, 0, 0]], violated=[False, False, True])
    found = of("potential", turns, floats(0, 0, 0))
    close(found[:, :3], [[0.125, 0, 0.25], [0, 0.5, 0], [0, 0, 0]])
    for g in (0, 1):
        shaped = jnp.asarray(found)[g] / 0.5
        error = conservation_error(
            shaped, jnp.asarray(turns.potentials[g]), jnp.asarray(turns.valid[g]), gamma=1.0, terminated=False
        )
        close(error, 0)
    assert not of("potential", turns, floats(1, 0, 0), np.asarray([False] * 3)).any()


def test_the_step_term_and_the_episodes_are_gigpo():
    turns = group([3, 3], states=[[0, 1, 2], [0, 1, 1]])
    rewards = floats(1, 0)
    steps = of("step", turns, rewards)[:, :3]
    close(
        steps,
        [
            [0.7071056731550427, 1.154698433119932, 0.0],
            [-0.7071056731550427, -0.577349216559966, -0.577349216559966],
        ],
    )
    episodes = np.asarray(group_centered(jnp.asarray(rewards), jnp.ones(2, bool)))
    close(
        episodes[:, None] + steps,
        [
            [1.4142114543430044, 1.8618042143078934, 0.7071057811879616],
            [-1.4142114543430044, -1.2844549977479276, -1.2844549977479276],
        ],
    )
    whole = gigpo(jnp.asarray([[0, 0, 1.0], [0, 0, 0]]), jnp.asarray(turns.state_ids[:2, :3]), jnp.ones((2, 3), bool))
    close(episodes[:, None] + steps, whole.advantages)


def test_rtmc_worked_numbers():
    turns = group([2] * 4, states=[[0, 1], [0, 1], [0, 2], [0, 1]], actions=[[0, 2], [0, 3], [1, 2], [0, 2]])
    expected = [[-1 / 6, 0.1], [-1 / 6, -0.4], [0.49333333, 1 / 3], [-1 / 6, 0.1]]
    close(of("rtmc", turns, floats(1, 0, 1, 0))[:, :2], expected)


# -- all of them ----------------------------------------------------------------------------------------------------


@st.composite
def any_group(draw):
    """Unbranched or branched, with shared states, gains, violations and members that do not count."""
    turns, rewards, valid = draw(branched())
    rewards = np.append(rewards, np.zeros(MEMBERS - len(rewards), np.float32))
    valid = np.append(valid, np.zeros(MEMBERS - len(valid), bool))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shape = turns.valid.shape
    gains = np.where(turns.valid, rng.choice([0, 0.5, 1], shape), 0).astype(np.float32)
    potentials = np.cumsum(np.pad(gains, ((0, 0), (1, 0))), axis=1, dtype=np.float32)
    numbered = {name: rng.integers(0, 3, shape).astype(np.int32) for name in ("state_ids", "action_ids")}
    return (
        turns._replace(gains=gains, potentials=potentials, violated=rng.random(shape[0]) < 0.3, **numbered),
        rewards,
        valid,
    )


@pytest.mark.parametrize("name", EVERY)
@settings(deadline=None, max_examples=25)
@given(drawn=any_group(), seed=st.integers(0, 99))
def test_members_in_another_order_have_the_same_credit(name, drawn, seed):
    turns, rewards, valid = drawn
    order = np.random.default_rng(seed).permutation(len(rewards)).astype(np.int32)
    place = np.argsort(order).astype(np.int32)  # where each member went
    moved = GroupTurns(*(field[order] for field in turns))
    sources = np.where(moved.branch_member < 0, -1, place[moved.branch_member]).astype(np.int32)
    relabelled = moved._replace(branch_member=sources, state_ids=7 - moved.state_ids)  # numbers name, and no more
    credit = JITTED[name]
    close(credit(relabelled, rewards[order], valid[order]), np.asarray(credit(turns, rewards, valid))[order], 2e-6)


@pytest.mark.parametrize("name", EVERY)
@settings(deadline=None, max_examples=15)
@given(drawn=any_group())
def test_more_places_change_nothing(name, drawn):
    turns, rewards, valid = drawn
    wide = {
        field: np.pad(value, ((0, 0), (0, 3)), mode="edge" if field == "potentials" else "constant")
        for field, value in turns._asdict().items()
        if value.ndim == 2
    }
    found = np.asarray(JITTED[name](turns._replace(**wide), rewards, valid))
    close(found[:, :MOST], JITTED[name](turns, rewards, valid))
    assert not found[:, MOST:].any() and not found[:, :MOST][~turns.valid].any()


@pytest.mark.parametrize("name", EVERY)
@settings(deadline=None, max_examples=15)
@given(drawn=any_group())
def test_who_does_not_count_has_no_credit_and_is_not_read(name, drawn):
    turns, rewards, valid = drawn
    found = np.asarray(JITTED[name](turns, rewards, valid))
    spoiled = np.where(valid, rewards, np.float32("nan"))
    np.testing.assert_array_equal(found, JITTED[name](turns, spoiled, valid))
    if name != "branch" or not (turns.branch_turn >= 0).any():  # a trunk is worth what its branches come to
        assert not found[~valid].any()


def test_a_sum_of_credits():
    turns = group([2, 2], states=[[0, 1], [0, 1]], gains=[[1, 0], [0, 0]])
    arguments = (turns, np.ones(MEMBERS, np.float32), np.ones(MEMBERS, bool))
    both = jax.jit(credits.added(POTENTIAL, STEP))(*arguments)
    close(both, np.asarray(POTENTIAL(*arguments)) + np.asarray(STEP(*arguments)))
    with pytest.raises(ValueError, match="added: expected at least one credit"):
        credits.added()
    with pytest.raises(ValueError, match="potential_credit: scale: expected a number above 0, got 0"):
        credits.potential_credit(scale=0)


def test_what_a_credit_reads_is_read_off_its_program():
    read = {name: credits.reads(credit, members=3, most=2) for name, credit in EVERY.items()}
    assert read["potential"] == {"valid", "potentials", "violated"}
    assert read["step"] == {"valid", "state_ids", "rewards"}
    assert read["rtmc"] == {"valid", "state_ids", "action_ids", "rewards"}
    assert read["branch"] == {"valid", "branch_member", "branch_turn", "rewards"}
    assert credits.reads(jax.jit(STEP), members=3, most=2) == read["step"], "whoever jits it, too"
    with pytest.raises(ValueError, match=r"credit: expected f32\[G, K\] = f32\[3, 2\], got float32\[3\]"):
        credits.reads(lambda turns, rewards, valid: rewards, members=3, most=2)


def test_which_credits_speak_for_episodes():
    said = {name: credits.speaks_for_episodes(credit, members=4, most=3) for name, credit in EVERY.items()}
    assert said == {"potential": False, "step": False, "rtmc": True, "branch": True}
    assert not credits.speaks_for_episodes(credits.rtmc_credit(prior_count=0.0), members=4, most=3)


def test_on_tokens_lays_every_turn_on_its_own_tokens():
    per_turn = np.arange(12, dtype=np.float32).reshape(2, 2, 3) + 1
    rng = np.random.default_rng(0)
    ids, turns = (rng.integers(0, most, (4, 50)).astype(np.int32) for most in (5, 4))
    mask = rng.random((4, 50)) < 0.7
    found = np.asarray(jax.jit(credits.on_tokens)(per_turn, ids, turns, mask))
    for n in range(4):
        inside = mask & (ids == n) & (turns < 3)  # turn 3 was cut off
        one = jax.vmap(partial(to_tokens, jnp.asarray(per_turn.reshape(4, 3)[n])))(
            jnp.asarray(turns), jnp.asarray(inside)
        )
        np.testing.assert_array_equal(found[inside], np.asarray(one)[inside])
    assert not found[~mask | (ids == 4) | (turns == 3)].any()
    with pytest.raises(ValueError, match="on_tokens: expected per_turn"):
        credits.on_tokens(jnp.asarray(per_turn), jnp.asarray(ids), jnp.asarray(turns[:1]), jnp.asarray(mask))
