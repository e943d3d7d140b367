"""What runs inside a box: it calls the tested functions and writes down what they return, or runs the visible tests.

The text of this file is what a box is given, with a job as JSON on standard input, so it imports the standard library
only. It runs in one process with policy-written code and is not to be trusted: it knows inputs, never expected values,
and what it writes is compared outside, as plain data, by someone else.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import re
import resource
import signal
import sys
import unittest
from collections.abc import Callable
from typing import Any

Write = Callable[[str], None]

MOST_NODES = 20_000  # of one value written down
DEEPEST = 60
MOST_ITEMS = 10_000  # taken from a generator
WIDEST_INT = 4_000  # bits
MOST_FAILURES = 8  # shown of the visible tests
CPU_S = 2.0  # of one program in `trial`


class Opaque:
    """Stands for a value that is no plain data: equal to nothing, itself included."""

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def encode(value: Any, depth: int = 0, room: list[int] | None = None) -> Any:
    """A value of built-in types as JSON that keeps their types apart; anything else becomes {"o": its type}."""
    room = [MOST_NODES] if room is None else room
    room[0] -= 1
    if room[0] < 0 or depth > DEEPEST:
        return {"o": "too large"}
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        if value.bit_length() < 64:
            return int(value)
        return {"i": hex(value)} if value.bit_length() < WIDEST_INT else {"o": "huge int"}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).hex()}

    def inner(items: Any) -> list[Any]:
        return [encode(item, depth + 1, room) for item in items]

    if isinstance(value, list):
        return inner(list.__iter__(value))
    if isinstance(value, tuple):
        return {"t": inner(tuple.__iter__(value))}
    if isinstance(value, set | frozenset):
        return {"s": sorted(inner(value), key=json.dumps)}
    if isinstance(value, dict):
        return {"d": [inner(pair) for pair in dict.items(value)]}
    return {"o": type(value).__name__[:60]}


def decode(value: Any) -> Any:
    """What `encode` wrote as a value again. ValueError or TypeError for anything else."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("no encoded value")
    ((tag, inner),) = value.items()
    if tag == "o":
        return Opaque()
    if tag == "c":
        return complex(float.fromhex(inner[0]), float.fromhex(inner[1]))
    simple = {"i": lambda text: int(text, 16), "f": float.fromhex, "b": bytes.fromhex}
    if tag in simple:
        return simple[tag](inner)
    if tag == "d":
        return {decode(key): decode(item) for key, item in inner}
    return {"t": tuple, "s": set}[tag](decode(item) for item in inner)


def call(function: Callable[..., Any], case: Any) -> dict[str, Any]:
    """One case: what the function returned, or the name of what it raised, `sys.exit` included."""
    try:
        value = function(*decode(case["args"]))
        if case.get("collect"):
            value = list(itertools.islice(value, MOST_ITEMS))
        return {"value": encode(value)}
    except BaseException as error:
        return {"error": type(error).__name__[:60]}


def measure(job: Any, write: Write) -> None:
    """The job's cases against the package under the current directory, a line each as soon as it is known."""
    sys.path.append(os.getcwd())  # last: no module of the standard library can be replaced
    for index, case in enumerate(job["cases"]):
        try:
            function = getattr(importlib.import_module(case["module"]), case["function"])
        except BaseException as error:
            answer = {"error": type(error).__name__[:60]}
        else:
            answer = call(function, case)
        write(f"{job['nonce']} {index} {json.dumps(answer)}\n")


def trial(job: Any, write: Write) -> None:
    """The job's cases against each of several one-file programs, within `lines` executed lines and CPU_S seconds."""
    for index, source in enumerate(job["programs"]):
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
        try:
            answers = try_out(source, job["cases"], job["lines"])
        except KeyboardInterrupt:  # the timer's, between two calls
            answers = []
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        write(f"{job['nonce']} {index} {json.dumps(answers)}\n")


class OutOfSteps(BaseException):
    """The program executed more lines than it may."""


def try_out(source: str, cases: Any, lines: int) -> list[Any]:
    """What a program answers to each case, or {"error": "OutOfSteps"} after that many lines: the same everywhere."""
    program = compile(source, "program.py", "exec", dont_inherit=True)
    return [call(_stepped(program, case["function"], lines), case) for case in cases]


def _stepped(program: Any, function: str, lines: int) -> Callable[..., Any]:
    """A function that loads the program afresh and calls its function, counting lines."""
    left = [lines]

    def count(frame: Any, event: str, argument: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfSteps
        return count

    def load_and_call(*arguments: Any) -> Any:
        space: dict[str, Any] = {"__name__": "program"}
        before = sys.gettrace()
        sys.settrace(count)
        try:
            exec(program, space)
            return space[function](*arguments)
        finally:
            sys.settrace(before)

    return load_and_call


def visible(job: Any, write: Write) -> None:
    """Runs the tests under `tests/` and writes a report without times, addresses and absolute paths."""
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    result = unittest.TestResult()
    sys.stdout = sys.stderr = io.StringIO()
    unittest.defaultTestLoader.discover("tests").run(result)
    wrong = [(test, error, "FAIL") for test, error in result.failures]
    wrong += [(test, error, "ERROR") for test, error in result.errors]
    lines = [f"{result.testsRun - len(wrong)} of {result.testsRun} tests passed"]
    for test, error, kind in sorted(wrong, key=lambda item: item[0].id())[:MOST_FAILURES]:
        name = test.id().removeprefix("unittest.loader._FailedTest.")
        lines.append(f"{kind} {name}\n{where(error)}")
    if len(wrong) > MOST_FAILURES:
        lines.append(f"... and {len(wrong) - MOST_FAILURES} more")
    write("\n".join(lines) + "\n")


def where(error: str) -> str:
    """The line of the package that a traceback ends in, and what was raised there."""
    lines = error.strip().splitlines()
    frames = [place for place, line in enumerate(lines) if line.startswith('  File "')]
    last = frames[-1] if frames else -1
    raised = next((place for place in range(last + 1, len(lines)) if lines[place][:1] not in ("", " ")), 0)
    ours = [lines[place].strip() for place in frames if os.getcwd() in lines[place]]
    text = "\n".join([*ours[-1:], *lines[raised:]][:12]).replace(os.getcwd() + "/", "")
    return "\n".join("  " + line[:200] for line in re.sub(r"0x[0-9a-f]+", "0x...", text).splitlines())


def main() -> None:
    job = json.loads(sys.stdin.read())
    channel = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu"], job["cpu"] + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def write(text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(channel, data) :]

    write(f"{job['nonce']} started\n")  # nothing of the policy's ran yet: without this line, the box is at fault
    {"measure": measure, "trial": trial, "visible": visible}[job["mode"]](job, write)


if __name__ == "__main__":
    main()
