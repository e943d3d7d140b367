"""Credit of turns in the stage: what a config may ask of it, the turns of a step, and the step's figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl_jax.batch import GroupTurns
from agentrl_jax.errors import UserError
from agentrl_jax.rl.objective import credit_only
from agentrl_jax.rl.turns import reads, speaks_for_episodes
from agentrl_jax.rollout.records import Trajectory
from agentrl_jax.rollout.turns import most_turns, read_turns
from agentrl_jax.runtime.hosts import Hosts

if TYPE_CHECKING:
    from agentrl_jax.recipes.config import Loop
    from agentrl_jax.recipes.run import Run

_EVIDENCE = {"gains", "measured", "potentials"}
_PROBED_TURNS = 4  # of an episode, where the config does not say how many have a place


def read_by(loop: Loop) -> frozenset[str]:
    """What the credit of turns depends on (`rl.turns.reads`). Raises `UserError` where it is no credit."""
    assert loop.credit is not None
    try:
        return reads(loop.credit, members=loop.group, most=loop.most_turns or _PROBED_TURNS)
    except (ValueError, TypeError) as error:
        raise UserError(f"loop.credit: {error}") from error


def check_credit(loop: Loop) -> None:
    """Refuses a credit that has no effect, or that counts the outcome twice or not at all. Raises `UserError`."""
    alone = loop.objective.advantage is credit_only
    if loop.credit is None:
        _require(not alone, "loop.objective.advantage=credit_only: nothing trains without loop.credit (see rl.turns)")
        for name, unset in (("same_state", "exchanges"), ("most_turns", None)):
            value = getattr(loop, name)
            _require(value == unset, f"loop.{name}={value!r} has no effect without loop.credit")
        return
    read = read_by(loop)
    _require(bool(read - {"valid", "violated"}), "loop.credit depends on neither turns nor rewards: leave it out")
    _require(
        loop.same_state == "exchanges" or "state_ids" in read,
        f"loop.same_state={loop.same_state!r} has no effect: loop.credit does not look at states",
    )
    _require(
        "branch_turn" not in read or loop.branching is not None,
        "loop.credit compares branches, and no episode branches without loop.branching",
    )
    _require(
        not (loop.skip_constant_groups and read & _EVIDENCE),
        "loop.skip_constant_groups=True drops groups that loop.credit would still train by the evidence they gained",
    )
    if speaks_for_episodes(loop.credit, members=loop.group, most=loop.most_turns or _PROBED_TURNS):
        _require(
            alone,
            "loop.credit holds the outcome of whole episodes, and loop.objective.advantage does too: it would count "
            "twice; set objective=replace(..., advantage=credit_only) (rl.objective)",
        )
    else:
        _require(
            not alone or "rewards" in read,
            "loop.credit does not read rewards, and with objective.advantage=credit_only nothing else does: the "
            "outcome would not train",
        )


def read_step(run: Run, loop: Loop, groups: Sequence[Sequence[Trajectory]]) -> GroupTurns | None:
    """The turns of all groups of a step, of which each process has read its own; None where nothing asks for them."""
    if loop.credit is None:
        return None
    mine = run.hosts.share(len(groups))
    most = loop.most_turns or most_turns(run.suite.spec.budget)
    own = groups[mine.start : mine.stop]
    return turns_together(run.hosts, read_turns(own, group_size=loop.group, most=most, same_state=loop.same_state))


def turns_together(hosts: Hosts, mine: GroupTurns) -> GroupTurns:
    """The turns of all processes, in their order; ids count within a group, and no group lies in two of them."""
    if hosts.count == 1:
        return mine
    parts = hosts.exchange([field.tolist() for field in mine])
    columns = zip(*parts, strict=True)
    return GroupTurns(
        *(np.concatenate([np.asarray(part, f.dtype) for part in c]) for c, f in zip(columns, mine, strict=True))
    )


def lives_on_evidence(loop: Loop) -> bool:
    """Whether the loop has a credit that goes by what the environment measures of turns."""
    return loop.credit is not None and bool(read_by(loop) & _EVIDENCE)


def still_blind(environment: str, turns: GroupTurns) -> bool:
    """Whether it is still open if this environment measures evidence: it has answered no turn yet.

    Raises `UserError` where it has answered a step's turns and measured none of them.
    """
    answered = int(turns.answered.sum())
    if answered and not turns.measured.any():
        raise UserError(
            f"loop.credit goes by the evidence that turns bring, and the environment {environment!r} measured it at "
            f"none of the first {answered} turns that it answered: it has to set Observation.evidence_gain"
        )
    return not answered


def refuse_endless(per_turn: np.ndarray | None) -> None:
    """Raises `UserError` naming the turn whose credit is no finite number: before it reaches a gradient."""
    if per_turn is not None and not np.isfinite(per_turn).all():
        p, g, k = np.argwhere(~np.isfinite(per_turn))[0]
        raise UserError(f"loop.credit gave {per_turn[p, g, k]} for turn {k} of member {g} of group {p} of this step")


def turn_figures(turns: GroupTurns | None, per_turn: np.ndarray | None, valid: np.ndarray) -> dict[str, Any]:
    """Figures of a step's turns, over the trajectories that count.

    `turns_shared`: the share that starts in the state of another turn; near 0, credit by states is none.
    `turns_answered`: that the environment answered; `turns_measured`: whose evidence it measured. `turns_cut`: how many
    had no place. `turn_credit`: mean size of a turn's credit. `potential_error`: the most that a trajectory's gains and
    its potentials are apart.
    """
    if turns is None or per_turn is None:
        return {}
    counted = turns.valid & valid[:, :, None]
    taken = max(1, int(counted.sum()))
    return {
        "turns": int(counted.sum()),
        "turns_cut": int(turns.cut.sum()),
        "turns_shared": round(_shared(turns.state_ids, counted) / taken, 4),
        "turns_answered": round(int((turns.answered & counted).sum()) / taken, 4),
        "turns_measured": round(int((turns.measured & counted).sum()) / taken, 4),
        "turn_credit": float(np.abs(per_turn[counted]).sum() / taken),
        "potential_error": potential_error(turns),
    }


def potential_error(turns: GroupTurns) -> float:
    """The largest `|sum of a trajectory's own gains - (potential at its end - at its beginning)|`, in float64."""
    own, potentials = turns.valid, turns.potentials.astype(np.float64)
    first, after = own.argmax(-1), own.shape[-1] - own[..., ::-1].argmax(-1)
    at_first, at_end = (np.take_along_axis(potentials, place[..., None], -1)[..., 0] for place in (first, after))
    gained = np.where(own, turns.gains.astype(np.float64), 0.0).sum(-1)
    return float(np.abs(np.where(own.any(-1), gained - (at_end - at_first), 0.0)).max(initial=0.0))


def _shared(state_ids: np.ndarray, counted: np.ndarray) -> int:
    """How many turns start in the state of another turn of their group."""
    return sum(
        int(counts[counts > 1].sum())
        for states, real in zip(state_ids, counted, strict=True)
        for counts in [np.unique(states[real], return_counts=True)[1]]
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)
