"""The environment: a workspace of text files, typed tools, and a fresh box each time the tests are run."""

from __future__ import annotations

from agentrl_jax.protocol import (
    Action,
    EnvironmentSpec,
    EnvStatus,
    Message,
    Observation,
    Snapshot,
    Status,
    Task,
    ToolCall,
)  # fmt: skip

from .. import sandbox
from . import boxes, tools, workspace
from .workspace import Reply, Workspace, invalid

OVER = "error: the task is over"
NO_CALL = "error: call a tool; when the repair is made, call submit"
SYSTEM = (
    "You repair a small Python package with the tools. Change source files of the package only, not its tests. A "
    "repair computes: no input or output, no new files for tests or settings, no tricks with the interpreter. Other "
    "tests than those you see decide. When you are finished, call submit."
)
HEALTHY = EnvStatus()
VISIBLE_S = 5.0  # of the processor, for one run of the visible tests


def execute(state: Workspace, call: ToolCall) -> Reply:
    """Carries out every call but `run_tests`, which needs a box: here it changes nothing."""
    wrong = tools.problem(call)
    if wrong:
        return invalid(state, wrong)
    given = dict(call.arguments)
    run = {
        "list": workspace.listing, "search": workspace.search, "read": workspace.read, "edit": workspace.edit,
        "submit": workspace.submit, "run_tests": lambda state: workspace.looked_at(state, "tests", ""),
    }[call.name]  # fmt: skip
    return run(state, **given)


class CodingEnvironment:
    """Everything follows from the task; the episode's seed changes nothing.

    The whole state is the texts of the files, so a snapshot is exact and a fork free. Tests run on a copy of them.
    """

    def __init__(self, spec: EnvironmentSpec, backend: str) -> None:
        self.spec = spec
        self._backend = backend
        self._state: Workspace | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        self._state = Workspace(files=dict(task.data["files"]))
        system, user = Message(role="system", content=SYSTEM), Message(role="user", content=task.data["text"])
        return Observation(content=(system, user))

    def step(self, action: Action) -> Observation:
        state = self._open()
        if state.submitted:
            return _answer([OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status, gain, health = [], Status.OK, 0.0, HEALTHY
        for call in action.calls:
            if state.submitted:
                texts.append(OVER)
                status = Status.INVALID_ACTION
                continue
            try:
                reply = self._carry_out(state, call)
            except sandbox.SandboxError as error:
                reply = Reply(state, "error: the tests could not be run; try again", Status.ERROR)
                health = EnvStatus(service=f"sandbox: {str(error)[:200]}", retryable=True)
            state = self._state = reply.state
            texts.append(reply.text)
            status = status if reply.status is Status.OK else reply.status
            gain = max(gain, reply.gain)
        return _answer(texts, status, terminated=state.submitted, gain=gain, health=health)

    def _carry_out(self, state: Workspace, call: ToolCall) -> Reply:
        reply = execute(state, call)
        if call.name != "run_tests" or reply.status is not Status.OK:
            return reply
        report = boxes.visible(self._backend, state.files, VISIBLE_S)
        text = workspace.bounded(report.text.strip())
        if report.stopped:
            text = f"{text}\nthe tests were stopped: {report.stopped}".strip()
        return reply._replace(text=text, status=Status.TIMEOUT if report.stopped == "time" else Status.OK)

    def snapshot(self) -> Snapshot:
        return self._open().snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._state = workspace.load(snapshot)

    def close(self) -> None:
        self._state = None

    def _open(self) -> Workspace:
        if self._state is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._state


def _answer(
    texts: list[str], status: Status, *, terminated: bool = False, gain: float = 0.0, health: EnvStatus = HEALTHY
) -> Observation:
    return Observation(
        content=tuple(Message(role="tool", content=text) for text in texts),
        status=status,
        terminated=terminated,
        evidence_gain=gain,
        env_status=health,
    )
