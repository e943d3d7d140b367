"""Run a receipt again in a worker process and say where it goes another way, and what is to blame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, EnvironmentSpec, Observation, Verdict
from agentrl_jax.rollout.codec import Record, digest
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import FORMAT, Receipt, Step, observation_hash
from agentrl_jax.rollout.wire import Failure, Finish, Replay

Blame = Literal["altered receipt", "nondeterminism", "tool version", "environment version", "verifier", "unexplained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(Record):
    """The first difference, and what it is put down to. `step` is the index in `receipt.steps`; None at the reset and
    at the verdict.

    `altered receipt`: the chain of digests does not hold. `nondeterminism`: two replays differ from each other at this
    place or before it. `tool version`: a tool called by then has another version. `environment version`. `verifier`:
    the same observations are judged otherwise. `unexplained`: versions and replays agree, so code or data changed
    without a new version.
    """

    where: str
    step: int | None
    expected: str
    got: str
    cause: Blame
    why: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got} ({self.cause}: {self.why})"


@dataclass(frozen=True, slots=True)
class _Run:
    """One replay: what it answered, how it failed if it did, and the verdict where it was asked for."""

    observations: tuple[Observation, ...]
    failure: Failure | None
    verdict: object = None

    def outcome(self, place: int) -> str:
        """What came at a place (0: reset), as something that two runs can be compared by."""
        if place < len(self.observations):
            return observation_hash(self.observations[place])
        return f"{self.failure.kind} {self.failure.exception}" if self.failure is not None else ""


@dataclass(frozen=True, slots=True)
class _Difference:
    """A place where a run does not give what the receipt says. `place` counts answers: 0 is the reset's."""

    where: str
    step: int | None
    place: int
    expected: str
    got: str
    seen: str


def replay(
    receipt: Receipt, ref: EnvironmentRef | None = None, *, deadlines: Deadlines | None = None
) -> Divergence | None:
    """None where the environment answers every action as recorded and the verifier gives the recorded verdict.

    A receipt that diverges is replayed a second time: what differs from itself is nondeterminism, whatever the versions
    say. `ref` defaults to the receipt's own. An action that hung or crashed is expected to do so again. Raises
    `ValueError` where neither names an environment, `UserError` where it cannot be started or another version wrote the
    receipt.
    """
    ref = ref or receipt.ref
    if ref is None:
        raise ValueError("the receipt names no environment (it was played in process): pass one")
    with Pool(ref, 1, deadlines or _recorded_deadlines(receipt)) as pool:
        return replay_in(pool, receipt)


def replay_in(pool: Pool, receipt: Receipt) -> Divergence | None:
    """`replay` in a pool that is there: many receipts of one environment, one after another."""
    if receipt.format != FORMAT:
        raise UserError(
            f"the receipt is of format {receipt.format} (agentrl-jax {receipt.trainer_version}), and this version "
            f"reads {FORMAT}: replay it with the version that wrote it"
        )
    if (index := receipt.breach()) is not None:
        return Divergence(
            where=f"step {index}", step=index, expected="the digest of the step before and its own fields",
            got=receipt.steps[index].digest, cause="altered receipt", why="the receipt was altered",
        )  # fmt: skip
    first = _run(pool, receipt)
    found = _compare(receipt, first)
    if found is None:
        return None
    cause, why = _blame(receipt, found, first, _run(pool, receipt), pool.spec, pool.verifier_version)
    return Divergence(
        where=found.where, step=found.step, expected=found.expected, got=found.got,
        cause=cause, why=f"{found.seen}; {why}",
    )  # fmt: skip


def changed_tools(receipt: Receipt, spec: EnvironmentSpec) -> dict[str, tuple[str, str]]:
    """The tools whose version is not the recorded one: (recorded, present); "absent" where there is none."""
    recorded = dict(zip(receipt.tools, receipt.tool_versions, strict=False))
    present = {tool.name: tool.version for tool in spec.tools}
    pairs = {name: (version, present.get(name, "absent")) for name, version in recorded.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _run(pool: Pool, receipt: Receipt) -> _Run:
    pool.submit(0, Replay(receipt.task, receipt.seed, receipt.actions))
    ((_, reply),) = pool.poll(None)
    if isinstance(reply, Failure):
        return _Run(reply.replayed, reply)
    assert isinstance(reply.value, tuple)
    if receipt.verdict is None or not _measured(receipt):
        return _Run(reply.value, None)
    pool.submit(0, Finish(receipt.stop))
    ((_, last),) = pool.poll(None)
    return _Run(reply.value, None, last.value if last.value is not None else last)


def _compare(receipt: Receipt, run: _Run) -> _Difference | None:
    steps: list[tuple[int, Step]] = [(i, step) for i, step in enumerate(receipt.steps) if step.performed]
    places = [("reset", None, receipt.reset_hash), *((f"step {i}", i, step.observation_hash) for i, step in steps)]
    for place, (where, index, recorded) in enumerate(places):
        known = None if index is None else receipt.steps[index].observation
        answered = place < len(run.observations)
        got = _show(run.observations[place]) if answered else f"{run.failure}"
        if recorded and not (answered and observation_hash(run.observations[place]) == recorded):
            expected = _show(known) if known is not None else f"observation {recorded}"
            return _Difference(where, index, place, expected, got, "the answer differs")
        if not recorded and answered:
            expected = (receipt.steps[index].exception if index is not None else None) or "a failure"
            return _Difference(where, index, place, expected, got, "it failed when recorded")
    if run.failure is not None or receipt.verdict is None or not _measured(receipt):
        return None
    if isinstance(run.verdict, Verdict) and digest(receipt.verdict) == digest(run.verdict):
        return None
    return _Difference("verdict", None, len(places), f"{receipt.verdict}", f"{run.verdict}", "the verdict differs")


def _blame(
    receipt: Receipt, found: _Difference, first: _Run, second: _Run, spec: EnvironmentSpec, verifier: str
) -> tuple[Blame, str]:
    """What a difference is put down to: first what two replays show, then the versions of what was called by then."""
    for place in range(found.place + 1):
        if first.outcome(place) != second.outcome(place):
            where = "the reset" if place == 0 else f"action {place - 1}"
            return "nondeterminism", f"two replays answer {where} in two ways"
    if found.where == "verdict" and str(first.verdict) != str(second.verdict):
        return "nondeterminism", "two replays get two verdicts for the same observations"
    tools = changed_tools(receipt, spec)
    called = {call.name for action in receipt.actions[: found.place] for call in action.calls}
    blamed = sorted(called & tools.keys())
    by_version = [f"tool {name} is version {tools[name][1]}, recorded with {tools[name][0]}" for name in blamed]
    if spec.version != receipt.environment_version:
        by_version.append(f"the environment is version {spec.version}, recorded with {receipt.environment_version}")
    judged = found.where == "verdict"
    if judged and verifier != receipt.verifier_version:
        by_version.insert(0, f"the verifier is version {verifier}, recorded with {receipt.verifier_version}")
        return "verifier", "; ".join(by_version)
    if by_version:
        return ("tool version" if blamed else "environment version"), "; ".join(by_version)
    if judged:
        return "verifier", "the same observations are judged otherwise with the recorded versions and seed"
    again = "the same twice, with the recorded versions and seed"
    return "unexplained", f"{again}: code or data changed without a new version"


def _measured(receipt: Receipt) -> bool:
    """Whether the verdict is the verifier's own, not the consequence of a failure."""
    return receipt.attribution is None


def _recorded_deadlines(receipt: Receipt) -> Deadlines:
    recorded = (receipt.limits or {}).get("deadlines")
    return Deadlines(**recorded) if recorded else Deadlines()


def _show(observation: Observation) -> str:
    text = " | ".join(f"{message.role}: {message.content}" for message in observation.content)
    end = " terminated" if observation.terminated else ""
    return f"[{observation.status}{end}] {text[:300]}"
