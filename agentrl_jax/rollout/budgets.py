"""Budgets of one episode: what may still be done, what was spent, and when enough is enough."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl_jax.protocol import Action, Budget, Message, Observation, Status, StopReason, Tool
from agentrl_jax.rollout.records import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRule:
    """Stop once `patience` measured exchanges in a row each gained less than `threshold`."""

    threshold: float
    patience: int


class Spent(NamedTuple):
    """How far a meter had come: what a branch takes over of its source's."""

    counts: Mapping[str, int]
    touched: bool
    dry: int
    wall_s: float


class Meter:
    """Admits or refuses the actions of one episode and keeps its ledger.

    `admit(action)` gives None, or the sentence that names the budget in the way; `perform` and `deny` book the
    action, `settle` books the answer, and `exhausted()` says whether the episode must stop now.

    A refused turn spends no step, so that the reserve is still there to finish in; refused turns are limited by
    `Budget.retries` as turns answered with `invalid_action` are, each counted apart. Without `finishing` tools there is
    nothing to reserve for, and the reserve has no effect. A turn is admitted or refused as a whole.
    """

    def __init__(
        self,
        budget: Budget,
        tools: Sequence[Tool] = (),
        *,
        evidence: EvidenceRule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.evidence, self.clock = budget, evidence, clock
        self._writing = {tool.name for tool in tools if tool.writes}
        self._finishing = set(budget.finishing)
        self._started = clock()
        self._touched = False  # a call was refused for the reserve's sake
        self._dry = 0  # measured exchanges in a row under the evidence threshold
        counted = (
            "steps",
            "tool_calls",
            "exploration",
            "writes",
            "retries",
            "denied",
            "infrastructure_retries",
            "tokens",
        )
        self._spent: dict[str, int] = dict.fromkeys(counted, 0)

    def ledger(self) -> Ledger:
        return Ledger(**self._spent, wall_s=round(self.clock() - self._started, 6))

    def mark(self) -> Spent:
        """Where it stands now."""
        return Spent(dict(self._spent), self._touched, self._dry, self.clock() - self._started)

    def take_over(self, spent: Spent) -> None:
        """Go on from where another meter stood; its seconds count, those between then and now do not."""
        self._spent, self._touched, self._dry = dict(spent.counts), spent.touched, spent.dry
        self._started = self.clock() - spent.wall_s

    def retry_infrastructure(self, count: int = 1) -> None:
        """Book what was asked again because it had failed for reasons outside the policy."""
        self._spent["infrastructure_retries"] += count

    def infrastructure_retries_left(self) -> int:
        return self.budget.infrastructure_retries - self._spent["infrastructure_retries"]

    def tokens_left(self) -> int:
        return self.budget.tokens - self._spent["tokens"]

    def spend_tokens(self, count: int) -> None:
        self._spent["tokens"] += count

    def admit(self, action: Action) -> str | None:
        """None where the action may be performed, else which budget refuses it. Books nothing."""
        budget, spent, names = self.budget, self._spent, [call.name for call in action.calls]
        if not names:
            return None  # text and unreadable calls cost a step and nothing else
        finishes = all(name in self._finishing for name in names)
        reserve = bool(self._finishing) and not finishes
        writes = sum(name in self._writing and name not in self._finishing for name in names)
        left = budget.tool_calls - spent["tool_calls"]
        if reserve and writes and not (budget.min_steps_for_finalize and budget.min_tool_calls_for_commit):
            return f"budget: no steps or tool calls are reserved for {self._closers()}, without which no write is begun"
        if len(names) > left:
            return f"budget tool_calls: {left} of {budget.tool_calls} left, the turn makes {len(names)}"
        if reserve and len(names) > left - budget.min_tool_calls_for_commit:
            self._touched = True
            return f"budget tool_calls: the last {budget.min_tool_calls_for_commit} are kept for {self._closers()}"
        if reserve and budget.steps - spent["steps"] <= budget.min_steps_for_finalize:
            self._touched = True
            return f"budget steps: the last {budget.min_steps_for_finalize} are kept for {self._closers()}"
        if spent["writes"] + writes > budget.write_actions:
            return f"budget write_actions: all {budget.write_actions} are used"
        return None

    def perform(self, action: Action) -> None:
        """Book an admitted action."""
        spent = self._spent
        spent["steps"] += 1
        for call in action.calls:
            spent["tool_calls"] += 1
            if call.name in self._finishing:
                continue
            spent["writes" if call.name in self._writing else "exploration"] += 1

    def deny(self, reason: str) -> Observation:
        """Book a refused action and give the answer the policy sees."""
        self._spent["denied"] += 1
        return Observation(content=(Message(role="tool", content=f"denied: {reason}"),), status=Status.DENIED)

    def settle(self, observation: Observation) -> None:
        """Book the environment's answer."""
        if observation.status is Status.INVALID_ACTION:
            self._spent["retries"] += 1
        if self.evidence is not None and observation.evidence_gain is not None:
            self._dry = self._dry + 1 if observation.evidence_gain < self.evidence.threshold else 0

    def exhausted(self) -> StopReason | None:
        """Why the episode cannot go on, or None. Asked after every answer that did not end the task."""
        budget, spent = self.budget, self._spent
        if self.evidence is not None and self._dry >= self.evidence.patience:
            return StopReason.LOW_EVIDENCE
        if (
            spent["steps"] >= budget.steps
            or spent["tool_calls"] >= budget.tool_calls
            or spent["retries"] > budget.retries
            or spent["denied"] > budget.retries
            or (self._touched and budget.reserve_reached == "stop")
            or self.clock() - self._started >= budget.wall_s
        ):
            return StopReason.BUDGET
        return StopReason.TOKEN_CAP if self.tokens_left() <= 0 else None

    def _closers(self) -> str:
        return ", ".join(sorted(self._finishing))
