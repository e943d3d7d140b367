"""Groups of trajectories turn by turn, as the arrays that credit is computed from. No JAX.

What makes two turns of a group start in the same state (`SameState`), whatever reasoning stood in between:

- `exchanges`: the policy has had the same answers to the same actions, in any order; as often each. All that it can
  know is the same then, and of an environment whose answers tell what was changed the state is the same, too. The
  default, and what RTMC needs: states taken for one another would give a wrong Q.
- `observation`: the last answer is the same, whatever came before: GiGPO's anchor states, for worlds whose observation
  shows all of the state (a page, a room). Where tools answer "ok" it takes unlike states for one another.

No record holds a hash of the environment's own state: it is taken where an episode is forked, not at every turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from agentrl_jax.batch import GroupTurns
from agentrl_jax.protocol import Action, Budget
from agentrl_jax.rollout.codec import canonical, fingerprint
from agentrl_jax.rollout.records import Step, Trajectory

SameState = Literal["exchanges", "observation"]
CUT_OFF = "cut off"  # what a turn does that reached a token limit before it was an action


def most_turns(budget: Budget) -> int:
    """How many turns an episode of this budget can have: each spends a step, a refusal or its tokens.

    All but the last leave something of both budgets: `steps - 1` performed, `retries` refused, and one more.
    """
    return max(1, min(budget.steps + budget.retries, budget.tokens))


def action_key(action: Action) -> str:
    """Equal where two turns do the same: the calls with their arguments; else what could not be read, or the text."""
    if action.calls:
        return canonical([[call.name, call.arguments] for call in action.calls])
    return canonical({"error": action.error} if action.error is not None else {"text": action.text.strip()})


def read_turns(
    groups: Sequence[Sequence[Trajectory]], *, group_size: int, most: int, same_state: SameState = "exchanges"
) -> GroupTurns:
    """The turns of these groups, P of them, with `most` = K places a trajectory: the shapes depend on nothing else.

    A member that is missing has no valid turn. `gains` and `measured` are the environment's `evidence_gain`, the
    verifier's own knowledge, which the policy never sees; `potentials` add it up, from 0, over all turns before, those
    of a branch's source included. State and action ids count up from 0 within each group.

    Raises `ValueError` where a branch continues a member that is not there, or itself.
    """
    arrays = _empty(len(groups), group_size, most)
    for p, group in enumerate(groups):
        members = {t.member: t for t in group}
        states: dict[str | int, int] = {}
        actions: dict[str, int] = {}
        for t in (members[m] for m in sorted(members)):
            _check_source(t, members)
            _fill(arrays, (p, t.member), t, states, actions, same_state)
    return arrays


def _fill(
    arrays: GroupTurns, at: tuple[int, int], t: Trajectory, states: dict[str | int, int], actions: dict[str, int],
    same_state: SameState,
) -> None:  # fmt: skip
    """Writes one trajectory. Of a branch the receipt has its source's steps as well, up to where it left."""
    branch, most = t.branch, arrays.valid.shape[2]
    steps = {step.turn: step for step in t.receipt.steps}
    if branch is not None:
        arrays.branch_member[at], arrays.branch_turn[at] = branch.member, branch.turn
    arrays.violated[at] = t.valid and t.violated
    acted = np.unique(np.asarray(t.turn_ids, np.int32)[np.asarray(t.action_mask, np.bool_)]).tolist()
    own = [turn for turn in acted if branch is None or turn >= branch.turn]
    keys = _state_keys(t, steps, max(own, default=-1), same_state)
    arrays.cut[at] = sum(turn >= most for turn in own)
    for turn in own[: len(own) - int(arrays.cut[at])]:
        step, place = steps.get(turn), (*at, turn)
        arrays.valid[place] = True
        arrays.state_ids[place] = states.setdefault(keys[turn], len(states))
        does = CUT_OFF if step is None else action_key(step.action)
        arrays.action_ids[place] = actions.setdefault(does, len(actions))
        arrays.answered[place] = step is not None and step.performed and step.observation is not None
        if (gain := _gain(step)) is not None:
            arrays.measured[place], arrays.gains[place] = True, gain
    gained = np.cumsum([_gain(steps.get(turn)) or 0.0 for turn in range(most)])
    arrays.potentials[at][1:] = gained


def _state_keys(t: Trajectory, steps: Mapping[int, Step], last: int, same_state: SameState) -> list[str | int]:
    """For each turn up to the last, what its state is told by: a sum of hashes knows no order."""
    keys: list[str | int] = []
    seen = t.receipt.reset_hash
    so_far = _number("reset", seen)
    for turn in range(last + 1):
        keys.append(seen if same_state == "observation" else so_far)
        if (step := steps.get(turn)) is not None:
            so_far = (so_far + _number(action_key(step.action), step.observation_hash)) % (1 << 128)
            seen = step.observation_hash
    return keys


def _number(*texts: str) -> int:
    return int(fingerprint(*texts), 16)


def _check_source(t: Trajectory, members: Mapping[int, Trajectory]) -> None:
    if t.branch is not None and (t.branch.member not in members or t.branch.member == t.member):
        raise ValueError(
            f"task {t.task.id!r}: member {t.member} continues member {t.branch.member}, which is not there or is itself"
        )


def _gain(step: Step | None) -> float | None:
    return None if step is None or step.observation is None else step.observation.evidence_gain


def _empty(groups: int, members: int, most: int) -> GroupTurns:
    turns, trajectories = (groups, members, most), (groups, members)
    return GroupTurns(
        valid=np.zeros(turns, np.bool_), state_ids=np.zeros(turns, np.int32), action_ids=np.zeros(turns, np.int32),
        answered=np.zeros(turns, np.bool_), gains=np.zeros(turns, np.float32), measured=np.zeros(turns, np.bool_),
        potentials=np.zeros((*trajectories, most + 1), np.float32),
        branch_member=np.full(trajectories, -1, np.int32), branch_turn=np.full(trajectories, -1, np.int32),
        violated=np.zeros(trajectories, np.bool_), cut=np.zeros(trajectories, np.int32),
    )  # fmt: skip
