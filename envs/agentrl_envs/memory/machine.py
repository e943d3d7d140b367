"""What an operation does to the store: a pure function of state and call, shared by environment and verifier."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_jax.protocol import Status, ToolCall

NOTE = 120  # characters of a note
OVER = "the task is over"


@dataclass(frozen=True, slots=True)
class Limits:
    """The storage budget, and how much of the dialogue is shown at once."""

    notes: int
    characters: int
    chunk: int


@dataclass(slots=True)
class State:
    """`read` chunks of the dialogue are behind the policy; `answers` are [text, note] in order."""

    read: int = 0
    notes: dict[int, str] = field(default_factory=dict)
    next: int = 1
    peak: int = 0
    answers: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    status: Status = Status.OK


_ARGUMENTS: dict[str, dict[str, type]] = {
    "add": {"text": str}, "update": {"note": int, "text": str}, "delete": {"note": int}, "noop": {},
    "answer": {"text": str, "note": int},
}  # fmt: skip


def chunks(data: Mapping[str, Any], limits: Limits) -> int:
    return -(-len(data["lines"]) // limits.chunk)


def over(data: Mapping[str, Any], state: State) -> bool:
    return len(state.answers) == len(data["questions"])


def apply(data: Mapping[str, Any], limits: Limits, state: State, call: ToolCall) -> tuple[State, Reply]:
    """The state after the call, and what is said; the same state where the call is refused."""
    expected = _ARGUMENTS.get(call.name)
    if over(data, state):
        return state, Reply(OVER, Status.INVALID_ACTION)
    if expected is None:
        return state, _wrong(f"unknown tool {call.name[:40]!a}; there are {', '.join(_ARGUMENTS)}")
    if set(call.arguments) != set(expected):
        return state, _wrong(f"{call.name} takes {', '.join(expected) or 'no arguments'}")
    for name, kind in expected.items():
        value = call.arguments[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            return state, _wrong(f"{name} must be {'a text' if kind is str else 'the number of a note'}")
        if isinstance(value, str) and not _writable(value):
            return state, _wrong(f"{name} holds half a character")
    listening = state.read < chunks(data, limits)
    if call.name == "answer" and listening:
        return state, _wrong("there is no question yet; noop reads on")
    if call.name != "answer" and not listening:
        return state, _wrong("the dialogue is over: the store is closed; answer the question")
    new = replace(state, notes=dict(state.notes), answers=list(state.answers))
    reply = _RUN[call.name](data, limits, new, dict(call.arguments))
    return (new, reply) if reply.status is Status.OK else (state, reply)


def _writable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _wrong(text: str) -> Reply:
    return Reply(f"error: {text}", Status.INVALID_ACTION)


def _put(limits: Limits, state: State, note: int, text: str) -> Reply:
    text = " ".join(text.split())
    if not text or len(text) > NOTE:
        return _wrong(f"a note has 1 to {NOTE} characters, this one {len(text)}")
    notes = {**state.notes, note: text}
    size = sum(map(len, notes.values()))
    if len(notes) > limits.notes or size > limits.characters:
        return Reply(f"denied: the store holds {limits.notes} notes and {limits.characters} characters", Status.DENIED)
    state.notes, state.peak = notes, max(state.peak, size)
    return Reply(f"note {note}: {text}")


def _add(_: Mapping[str, Any], limits: Limits, state: State, arguments: dict[str, Any]) -> Reply:
    reply = _put(limits, state, state.next, arguments["text"])
    state.next += 1
    return reply


def _update(_: Mapping[str, Any], limits: Limits, state: State, arguments: dict[str, Any]) -> Reply:
    if arguments["note"] not in state.notes:
        return _wrong(f"there is no note {str(arguments['note'])[:12]}")
    return _put(limits, state, arguments["note"], arguments["text"])


def _delete(_: Mapping[str, Any], __: Limits, state: State, arguments: dict[str, Any]) -> Reply:
    if state.notes.pop(arguments["note"], None) is None:
        return _wrong(f"there is no note {str(arguments['note'])[:12]}")
    return Reply(f"note {arguments['note']} deleted")


def _noop(data: Mapping[str, Any], limits: Limits, state: State, _: dict[str, Any]) -> Reply:
    state.read += 1
    return Reply(window(data, limits, state))


def _answer(data: Mapping[str, Any], limits: Limits, state: State, arguments: dict[str, Any]) -> Reply:
    state.answers.append([arguments["text"][:NOTE], arguments["note"]])
    return Reply("the end" if over(data, state) else window(data, limits, state))


_RUN = {"add": _add, "update": _update, "delete": _delete, "noop": _noop, "answer": _answer}


def window(data: Mapping[str, Any], limits: Limits, state: State) -> str:
    """What is before the policy: the whole store, and the next turns or the next question; it needs nothing earlier."""
    if state.read < chunks(data, limits):
        lines: Sequence[str] = data["lines"][state.read * limits.chunk : (state.read + 1) * limits.chunk]
        first = state.read * limits.chunk + 1
        shown = f"turns {first} to {first + len(lines) - 1} of {len(data['lines'])}:\n" + "\n".join(lines)
    else:
        place = len(state.answers)
        shown = f"question {place + 1} of {len(data['questions'])}: {data['questions'][place]['text']}"
    return f"{listing(state)}\n\n{shown}"


def holds(text: str, value: str) -> bool:
    """Whether the value stands in the text as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(value.casefold())}(?!\w)", text.casefold()) is not None


def listing(state: State) -> str:
    notes = "\n".join(f"{note}: {text}" for note, text in state.notes.items())
    return f"notes:\n{notes}" if notes else "notes: none"
