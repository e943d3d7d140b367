"""Who is answerable for a failed episode: pure rules from a failure, and from what a replay of it showed.

Only what the policy could not have caused may leave the training batch. A step that hangs or kills its worker is
decided by evidence: the recorded actions are played again in a fresh worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl_jax.protocol import Attribution, Cause, EnvironmentSpec, Observation, StopReason, Verdict
from agentrl_jax.rollout.records import observation_hash
from agentrl_jax.rollout.wire import Failure

Finding = Literal["reproduced", "not_reproduced", "diverged", "broke", "impossible"]


@dataclass(frozen=True, slots=True)
class ReplayEvidence:
    """What playing the actions again in a fresh worker showed.

    `reproduced`: the same actions fail again. `not_reproduced`: they went through, and the fresh worker now holds the
    lost state. `diverged`: other observations came, so the replay speaks of another episode. `broke`: the environment
    raised or answered garbage. `impossible`: no replay could be made.
    """

    finding: Finding
    detail: str


def wants_replay(failure: Failure, spec: EnvironmentSpec) -> bool:
    """Whether a replay can decide this failure: a hang or death while acting, where replay is possible."""
    return failure.phase in ("step", "idle") and failure.kind in ("timeout", "crash") and spec.fork != "none"


def judge_replay(hashes: tuple[str, ...], observations: tuple[Observation, ...], failure: Failure | None,
                 expected: int) -> ReplayEvidence:  # fmt: skip
    """Evidence of a replay: `hashes` are those recorded (reset first), `observations` those that came now, `failure`
    how the replay ended (None: it went through) and `expected` the number of observations of a whole replay."""
    for index, (recorded, observation) in enumerate(zip(hashes, observations, strict=False)):
        if observation_hash(observation) != recorded:
            return ReplayEvidence("diverged", f"the replay diverged at {_place(index)}")
    if failure is None:
        return ReplayEvidence("not_reproduced", f"the same {expected - 1} actions went through in a fresh worker")
    if failure.kind in ("exception", "garbage", "unavailable") or failure.phase in ("start", "reset"):
        return ReplayEvidence("broke", f"the replay broke the environment: {failure}")
    if len(observations) < len(hashes):
        return ReplayEvidence("diverged", f"the replay failed at {_place(len(observations))}, which once went through")
    return ReplayEvidence("reproduced", f"the same actions fail again in a fresh worker: {failure}")


def attribute(failure: Failure, evidence: ReplayEvidence | None = None) -> Attribution:
    """The cause of a failure that ended an episode (or, where it was `not_reproduced`, would have).

    | failure | cause |
    | --- | --- |
    | start, reset, snapshot, close, sample; an exception, garbage or a service down in step | environment |
    | exception, deadline, garbage or crash of the verifier | evaluator |
    | step: hang or crash, reproduced by replay | policy |
    | step: hang or crash, not reproduced, or the replay broke | environment |
    | step: hang, no evidence | policy: a hang it can cause is never forgiven |
    | step: crash, no evidence | unknown |
    """
    seen = str(failure)
    if failure.phase == "verify":
        return Attribution(cause=Cause.EVALUATOR, evidence=seen)
    if failure.phase not in ("step", "idle") or failure.kind in ("exception", "garbage", "unavailable"):
        return Attribution(cause=Cause.ENVIRONMENT, evidence=seen)
    finding = evidence.finding if evidence is not None else "impossible"
    detail = evidence.detail if evidence is not None else "no replay was possible"
    if finding == "reproduced":
        cause = Cause.POLICY
    elif finding in ("not_reproduced", "broke"):
        cause = Cause.ENVIRONMENT
    else:
        cause = Cause.POLICY if failure.kind == "timeout" else Cause.UNKNOWN
    return Attribution(cause=cause, evidence=f"{seen}; {detail}")


def failed_verdict(attribution: Attribution) -> Verdict | None:
    """The verdict of an episode that a failure ended: outcome False where the episode stays in the batch (the policy is
    to learn from it), None, that is unscored, where it leaves."""
    return None if attribution.leaves_batch else Verdict(outcome=False, evidence=(attribution.evidence,))


def stop_of(failure: Failure) -> StopReason:
    return StopReason.TIMEOUT if failure.kind == "timeout" else StopReason.FAILURE


def _place(index: int) -> str:
    return "reset" if index == 0 else f"action {index - 1}"
