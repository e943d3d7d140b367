"""A box in which commands run one after the other: what is kept from one to the next is the tree, and the services.

Between two commands everything else is put back: processes that a command left behind end, /tmp is emptied, and all
files get one and the same time. So a state is the tree and the names of the running services, and is exact.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from .. import sandbox
from .tree import Entry, TooLarge, Tree, from_tar, to_tar

SHELL = "/bin/bash"
TIME_S = 5.0  # of one command
START_S = 30.0  # of a service, which no policy is to answer for
BOXES = sandbox.Limits(
    time_s=TIME_S, memory_bytes=256 << 20, processes=48, disk_bytes=16 << 20, files=2_000, output_bytes=1 << 16
)
TIDY = (
    "/usr/bin/find ${TMPDIR:-/tmp} /dev/shm -mindepth 1 -delete; "
    "/usr/bin/find /workspace -exec /usr/bin/touch -hcd @1700000000 {} +"
)
# Blocks for ever on a pipe that nobody writes to; known by its name in the place of the program's. It says so when it
# has that name: a command that came before would not find it, and what has another name is no service.
SERVICE = """cd ${TMPDIR:-/tmp} && /usr/bin/mkfifo .pipe .up && exec 9<>.pipe 8<>.up && /usr/bin/rm .pipe .up &&
{ (exec -a "$1" /bin/bash -c 'echo >&8; exec 8>&-; read -r line <&9') >/dev/null 2>&1 & read -r _ <&8; }"""
# Until they are gone: the next command would still see them. What is over has no command line.
END = """kill -9 "$@"; for each; do while read -r -d '' _ <"/proc/$each/cmdline"; do :; done; done 2>/dev/null"""


class Ran(NamedTuple):
    """One command: its exit code and output, what stopped it ("" if nothing), and the state after it."""

    code: int
    stdout: bytes
    stderr: bytes
    stopped: str
    tree: dict[str, Entry]
    services: tuple[str, ...]


class Machine:
    """Opens its box with the first command; `close` ends it."""

    def __init__(self, backend: str, tree: Tree, services: Sequence[str]) -> None:
        self._backend = backend
        self._tree, self._services = dict(tree), tuple(services)
        self._box: sandbox.Sandbox | None = None

    def run(self, command: str) -> Ran:
        """Runs a line of shell. SandboxError if the box breaks by itself; what the command does to it is in the answer.

        A command that ends the box, or leaves more than a state may hold, changes nothing.
        """
        box = self._open()
        box.run([SHELL, "-c", TIDY])
        result = box.run([SHELL, "-c", command])
        stopped = "time" if result.timed_out else result.limit or ("the box ended" if result.ended else "")
        try:
            if result.ended:
                raise TooLarge
            alive = self._settle(box, restart=bool(stopped))
            tree = from_tar(box.archive())
        except (TooLarge, sandbox.WorkspaceError, sandbox.Ended) as error:
            self.close()
            tree, alive, stopped = self._tree, self._services, stopped or str(error)
        self._tree, self._services = tree, alive
        stdout, stderr = (_beginning(each) if stopped else each for each in (result.stdout, result.stderr))
        return Ran(result.exit_code, stdout, stderr, stopped, tree, alive)

    def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            box.close()

    def _open(self) -> sandbox.Sandbox:
        if self._box is None:
            self._box = sandbox.open_sandbox(to_tar(self._tree), limits=BOXES, backend=self._backend)
            self._start(self._box, self._services)
        return self._box

    def _start(self, box: sandbox.Sandbox, services: Sequence[str]) -> None:
        for name in services:
            started = box.run([SHELL, "-c", SERVICE, SHELL, name], timeout_s=START_S)
            if not started.ok:
                raise sandbox.SandboxError(f"the service {name} did not start: {started.stderr[-200:]!r}")

    def _settle(self, box: sandbox.Sandbox, *, restart: bool) -> tuple[str, ...]:
        """Ends what is no service; where a limit ended all processes, services that ran before run again."""
        if restart:
            box.kill()
            self._start(box, self._services)
            return self._services
        running = box.processes()
        services = {each.argv[0]: each.pid for each in running if each.argv and each.argv[0] in self._services}
        others = [str(each.pid) for each in running if each.pid not in services.values()]
        if others:
            box.run([SHELL, "-c", END, SHELL, *others])
        return tuple(name for name in self._services if name in services)


def _beginning(printed: bytes) -> bytes:
    """What a stopped command printed first: how much it had printed by then differs from run to run."""
    return printed[: BOXES.output_bytes // 2]


def missing() -> str | None:
    """None where commands can be run in boxes here, else what this machine lacks, in one sentence."""
    if not os.access(SHELL, os.X_OK):
        return f"{SHELL} is not there: apt-get install bash"
    try:
        sandbox.chosen()
    except sandbox.SandboxError as error:
        return str(error)
    return None
