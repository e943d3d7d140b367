"""The environment: a workspace, a shell in a box, and `finish`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from agentrl_jax.protocol import (
    Action,
    EnvironmentSpec,
    EnvStatus,
    Message,
    Observation,
    Snapshot,
    Status,
    Task,
    Tool,
    ToolCall,
)  # fmt: skip

from .. import sandbox
from . import episode
from .episode import Episode
from .machine import TIME_S, Machine, Ran
from .tree import from_json

OVER = "error: the task is over"
NO_CALL = "error: call a tool; when the task is solved, call finish"
SYSTEM = (
    "You work in /workspace with a shell. Each command starts there, in a shell of its own; of what it leaves behind, "
    "only files under /workspace and the services that ran before are kept. Change nothing that the task does not ask "
    "for. When the task is solved, call finish."
)
HEALTHY = EnvStatus()
LONGEST = 4_000  # characters of a command
MOST_SHOWN = 4_000  # characters of an answer
STRING = {"type": "string"}


def _tool(name: str, description: str, *, writes: bool = False, **properties: Mapping[str, str]) -> Tool:
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip
    return Tool(name=name, description=description, parameters=schema, writes=writes)


TOOLS = (
    _tool("run", "Run a command line in bash; the answer is what it prints.", writes=True, command=STRING),
    _tool("finish", "Say that the task is solved. This ends it."),
)
NAMES = tuple(tool.name for tool in TOOLS)


class Reply(NamedTuple):
    state: Episode
    text: str
    status: Status = Status.OK
    health: EnvStatus = HEALTHY


class TerminalEnvironment:
    """Everything follows from the task; the episode's seed changes nothing.

    The state after a command is read out of the box, so a snapshot needs none. A box is opened by the first command.
    """

    def __init__(self, spec: EnvironmentSpec, backend: str) -> None:
        self.spec = spec
        self._backend = backend
        self._state: Episode | None = None
        self._machine: Machine | None = None

    def reset(self, task: Task, seed: int) -> Observation:
        self.close()
        self._state = Episode(tree=from_json(task.data["tree"]), services=tuple(task.data["services"]))
        system, user = Message(role="system", content=SYSTEM), Message(role="user", content=task.data["text"])
        return Observation(content=(system, user))

    def step(self, action: Action) -> Observation:
        state = self._open()
        if state.finished:
            return _answer([OVER], Status.INVALID_ACTION, terminated=True)
        if action.error is not None:
            return _answer([f"error: {action.error[:200]}"], Status.INVALID_ACTION)
        if not action.calls:
            return _answer([NO_CALL], Status.INVALID_ACTION)
        texts, status, health = [], Status.OK, HEALTHY
        for call in action.calls:
            if state.finished:
                reply = Reply(state, OVER, Status.INVALID_ACTION)
            else:
                reply = self._carry_out(state, call)
            state = self._state = reply.state
            texts.append(reply.text)
            status = status if reply.status is Status.OK else reply.status
            health = health if reply.health is HEALTHY else reply.health
        return _answer(texts, status, terminated=state.finished, health=health)

    def _carry_out(self, state: Episode, call: ToolCall) -> Reply:
        wrong = problem(call)
        if wrong:
            return Reply(state, f"error: {wrong}", Status.INVALID_ACTION)
        if call.name == "finish":
            return Reply(replace(state, finished=True), "finished")
        if self._machine is None:
            self._machine = Machine(self._backend, state.tree, state.services)
        try:
            ran = self._machine.run(str(call.arguments["command"]))
        except sandbox.SandboxError as error:
            self._drop()
            health = EnvStatus(service=f"sandbox: {str(error)[:200]}", retryable=True)
            return Reply(state, "error: the command could not be run; try again", Status.ERROR, health)
        status = Status.TIMEOUT if ran.stopped == "time" else Status.OK
        state = replace(state, tree=ran.tree, services=ran.services, printed=ran.stdout)
        return Reply(state, shown(ran), status)

    def snapshot(self) -> Snapshot:
        return self._open().snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        self._drop()
        self._state = episode.load(snapshot)

    def close(self) -> None:
        self._drop()
        self._state = None

    def _drop(self) -> None:
        machine, self._machine = self._machine, None
        if machine is not None:
            machine.close()

    def _open(self) -> Episode:
        if self._state is None:
            raise RuntimeError("the environment is closed: call reset(task, seed) or restore(snapshot) first")
        return self._state


def problem(call: ToolCall) -> str:
    """Why a call cannot be carried out, or ""."""
    wanted = {"run": {"command"}, "finish": set()}.get(call.name)
    if wanted is None:
        return f"there is no tool {plain(call.name[:60])!r}; the tools are {', '.join(NAMES)}"
    if set(call.arguments) != wanted:
        return f"{call.name}: expected {'the argument command' if wanted else 'no arguments'}"
    command = call.arguments.get("command", "")
    if not isinstance(command, str):
        return "run: command must be a string"
    if len(command) > LONGEST:
        return f"run: the command has {len(command)} characters, at most {LONGEST} are allowed"
    if "\0" in command or any("\ud800" <= character <= "\udfff" for character in command):
        return "run: the command holds characters that a shell cannot take"
    return ""


def shown(ran: Ran) -> str:
    """What a command printed, bounded, then how it ended if not well."""
    parts = [_bounded(_text(ran.stdout)), _bounded(_text(ran.stderr))]
    if ran.stopped:
        why = f"more than {TIME_S:g} seconds" if ran.stopped == "time" else ran.stopped
        parts.append(f"(stopped: {why})")
    elif ran.code:
        parts.append(f"(exit code {ran.code})")
    return "\n".join(part.rstrip("\n") for part in parts if part.strip("\n")) or "(no output)"


def _text(data: bytes) -> str:
    return data.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")


def plain(text: str) -> str:
    """A name that a policy chose, as text that can be written anywhere."""
    return text.encode("ascii", "backslashreplace").decode()


def _bounded(text: str) -> str:
    if len(text) <= MOST_SHOWN:
        return text
    half = MOST_SHOWN // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _answer(texts: list[str], status: Status, *, terminated: bool = False, health: EnvStatus = HEALTHY) -> Observation:
    return Observation(
        content=tuple(Message(role="tool", content=text) for text in texts),
        status=status,
        terminated=terminated,
        env_status=health,
    )
