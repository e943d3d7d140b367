"""Run a receipt again in a worker process and say where it goes another way, and why."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl_jax.errors import UserError
from agentrl_jax.protocol import EnvironmentRef, Observation, Verdict
from agentrl_jax.rollout.codec import Record, digest
from agentrl_jax.rollout.pool import Deadlines, Pool
from agentrl_jax.rollout.records import FORMAT, Receipt, Step, observation_hash
from agentrl_jax.rollout.wire import Failure, Finish, Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(Record):
    """The first difference. `step` is the index in `receipt.steps`; None at the reset and at the verdict."""

    where: str
    step: int | None
    expected: str
    got: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, got {self.got} ({self.why})"


def replay(
    receipt: Receipt, ref: EnvironmentRef | None = None, *, deadlines: Deadlines | None = None
) -> Divergence | None:
    """None where the environment answers every action as recorded and the verifier gives the recorded verdict.

    `ref` defaults to the receipt's own. An action that hung or crashed is expected to do so again. Raises `ValueError`
    where neither names an environment, `UserError` where it cannot be started or another version wrote the receipt.
    """
    ref = ref or receipt.ref
    if ref is None:
        raise ValueError("the receipt names no environment (it was played in process): pass one")
    if receipt.format != FORMAT:
        raise UserError(
            f"the receipt is of format {receipt.format} (agentrl-jax {receipt.trainer_version}), and this version "
            f"reads {FORMAT}: replay it with the version that wrote it"
        )
    if (index := receipt.breach()) is not None:
        return Divergence(
            where=f"step {index}", step=index, expected="the digest of the step before and its own fields",
            got=receipt.steps[index].digest, why="the receipt was altered",
        )  # fmt: skip
    with Pool(ref, 1, deadlines or _recorded_deadlines(receipt)) as pool:
        version = (pool.spec.version, pool.verifier_version)
        pool.submit(0, Replay(receipt.task, receipt.seed, receipt.actions))
        ((_, reply),) = pool.poll(None)
        failure = reply if isinstance(reply, Failure) else None
        observations = reply.replayed if isinstance(reply, Failure) else reply.value
        assert isinstance(observations, tuple)
        found = _compare(receipt, observations, failure)
        if found is None and failure is None and receipt.verdict is not None and _measured(receipt):
            pool.submit(0, Finish())
            ((_, last),) = pool.poll(None)
            found = _compare_verdict(receipt.verdict, last.value if last.value is not None else last)
    return found and _explained(found, receipt, version)


def _compare(receipt: Receipt, observations: tuple[Observation, ...], failure: Failure | None) -> Divergence | None:
    steps: list[tuple[int, Step]] = [(i, step) for i, step in enumerate(receipt.steps) if step.performed]
    places = [("reset", None, receipt.reset_hash), *((f"step {i}", i, step.observation_hash) for i, step in steps)]
    for place, (where, index, recorded) in enumerate(places):
        known = None if index is None else receipt.steps[index].observation
        answered = place < len(observations)
        got = _show(observations[place]) if answered else f"{failure}"
        if recorded and not (answered and observation_hash(observations[place]) == recorded):
            expected = _show(known) if known is not None else f"observation {recorded}"
            return Divergence(where=where, step=index, expected=expected, got=got, why="the answer differs")
        if not recorded and answered:
            expected = (receipt.steps[index].exception if index is not None else None) or "a failure"
            return Divergence(where=where, step=index, expected=expected, got=got, why="it failed when recorded")
    return None


def _measured(receipt: Receipt) -> bool:
    """Whether the verdict is the verifier's own, not the consequence of a failure."""
    return receipt.attribution is None


def _compare_verdict(recorded: Verdict, got: object) -> Divergence | None:
    if isinstance(got, Verdict) and digest(recorded) == digest(got):
        return None
    return Divergence(where="verdict", step=None, expected=f"{recorded}", got=f"{got}", why="the verifier differs")


def _explained(found: Divergence, receipt: Receipt, version: tuple[str, str]) -> Divergence:
    reasons = []
    if version[0] != receipt.environment_version:
        reasons.append(f"the environment is version {version[0]}, recorded with {receipt.environment_version}")
    if version[1] != receipt.verifier_version:
        reasons.append(f"the verifier is version {version[1]}, recorded with {receipt.verifier_version}")
    why = "; ".join([found.why, *reasons]) if reasons else f"{found.why} with the recorded versions and seed"
    return Divergence(where=found.where, step=found.step, expected=found.expected, got=found.got, why=why)


def _recorded_deadlines(receipt: Receipt) -> Deadlines:
    recorded = (receipt.limits or {}).get("deadlines")
    return Deadlines(**recorded) if recorded else Deadlines()


def _show(observation: Observation) -> str:
    text = " | ".join(f"{message.role}: {message.content}" for message in observation.content)
    end = " terminated" if observation.terminated else ""
    return f"[{observation.status}{end}] {text[:300]}"
