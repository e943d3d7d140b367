"""Episodes of three turns that say what each of them brought; workers find the suite by module path."""

from __future__ import annotations

from typing import Any

from fake_suites import TOOLS, WORDS, tasks

from agentrl_jax.protocol import Action, Budget, EnvironmentSpec, Message, Observation, Snapshot, Suite, Task, Verdict

SPEC = EnvironmentSpec(name="measured", version="1", tools=TOOLS, budget=Budget(steps=3, retries=1))


class Measured:
    """Hears anything; a turn of an even number of words is worth half of what there is to gain."""

    spec = SPEC
    turns, gained = 0, 0.0

    def reset(self, task: Task, seed: int) -> Observation:
        self.turns, self.gained = 0, 0.0
        return Observation(content=(Message(role="user", content="count to 2 please"),))

    def step(self, action: Action) -> Observation:
        gain = 0.5 * (len(action.text.split()) % 2 == 0)
        self.turns, self.gained = self.turns + 1, self.gained + gain
        told = Message(role="tool", content=f"now {self.turns}")
        return Observation(content=(told,), evidence_gain=gain, terminated=self.turns == 3)

    def snapshot(self) -> Snapshot:
        state = f"{self.turns} {self.gained}"
        return Snapshot(data=state.encode(), hash=state)

    def restore(self, snapshot: Snapshot) -> None:
        turns, gained = snapshot.data.decode().split()
        self.turns, self.gained = int(turns), float(gained)

    def close(self) -> None:
        pass


def _verify(task: Task, initial: Snapshot, actions: Any, final: Snapshot) -> Verdict:
    return Verdict(outcome=float(final.data.split()[1]) >= 1.0)


def suite() -> Suite:
    """Solved where two turns gained."""
    return Suite(
        spec=SPEC, make=Measured, tasks=tasks, verify=_verify, verifier_version="1", vocabulary=lambda: [WORDS]
    )  # fmt: skip
