"""Keeps one PostgreSQL server, from `initdb` until nobody uses it any more. A program; standard library only.

    python keeper.py DIRECTORY BIN UID GID MUTEX

It says "ready" once the server answers at a socket in DIRECTORY (there is no TCP), or what went wrong. MUTEX is the
starter's descriptor of the mutex, kept until then: where the starter is killed meanwhile, nobody else starts.

Whoever uses the server holds a shared lock on DIRECTORY/use, which the kernel takes away from the dead; when the last
lock is gone the server is stopped and the directory removed. So no server outlives its users, however they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

USER = "agentrl"
START_S, STOP_S = 60.0, 10.0
SETTINGS = """
listen_addresses = ''
max_connections = 400
shared_buffers = 16MB
# Nothing here outlives a run, so nothing has to survive a crash.
fsync = off
synchronous_commit = off
full_page_writes = off
wal_level = minimal
max_wal_senders = 0
autovacuum = off
dynamic_shared_memory_type = mmap
"""


@contextlib.contextmanager
def mutex(directory: Path) -> Iterator[int]:
    """Only one process at a time starts, joins or stops the server of a directory, which this creates.

    Yields the descriptor: the mutex is free when the last copy of it is closed.
    """
    path = directory / "mutex"
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            held = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # it was removed this moment
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            if _same(held, path):  # else the one who held it has removed it
                yield held
                return
        finally:
            os.close(held)


def _same(held: int, path: Path) -> bool:
    try:
        return os.fstat(held).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def used(directory: Path, wait: bool = False) -> bool:
    """Whether somebody holds a lock of use; `wait` until nobody does."""
    try:
        held = os.open(directory / "use", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False


def runs(directory: Path) -> bool:
    """Whether the directory's server runs and takes connections."""
    lines = _state(directory)
    return [line.strip() for line in lines[7:8]] == ["ready"] and _is_of(int(lines[0]), directory)


def halt(directory: Path) -> bool:
    """Stops the server of a directory and removes its data. Under the mutex. Returns whether one ran."""
    lines = _state(directory)
    ran = bool(lines) and _is_of(int(lines[0]), directory)
    if ran:
        for how in (signal.SIGQUIT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(lines[0]), how)
            if _ended(int(lines[0])):
                break
    if len(lines) > 6 and shutil.which("ipcrm"):  # a server that was killed leaves its interlock in shared memory
        shared = lines[6].split()[-1]
        subprocess.run(["ipcrm", "-m", shared], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    shutil.rmtree(directory / "data", ignore_errors=True)
    return ran


def stop(directory: Path) -> bool:
    """`halt`, and the directory itself is removed."""
    ran = halt(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return ran


def _state(directory: Path) -> list[str]:
    try:
        return (directory / "data" / "postmaster.pid").read_text().splitlines()
    except OSError:
        return []


def _is_of(pid: int, directory: Path) -> bool:
    """Whether a process is the server of this directory, and not a later one with its number."""
    try:
        return str(directory / "data").encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _ended(pid: int) -> bool:
    until = time.monotonic() + STOP_S
    while time.monotonic() < until:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.005)
    return False


def start(directory: Path, binaries: Path, uid: int, gid: int) -> None:
    """Makes and starts the server; it answers when this returns. RuntimeError with its last words where it does not."""
    data = directory / "data"
    data.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(directory, uid, gid)
        os.chown(data, uid, gid)
    as_user = {"user": uid, "group": gid, "extra_groups": []} if os.geteuid() == 0 else {}
    made = subprocess.run(
        [binaries / "initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/", check=False,
        **as_user,
    )  # fmt: skip
    if made.returncode:
        raise RuntimeError(f"initdb failed: {made.stderr.strip()[-500:]}")
    with open(data / "postgresql.conf", "a", encoding="utf-8") as settings:
        settings.write(f"{SETTINGS}unix_socket_directories = '{directory}'\n")
    with open(directory / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            start_new_session=True, **as_user,
        )  # fmt: skip
    until = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < until:
        if runs(directory):
            return
        time.sleep(0.005)
    raise RuntimeError(f"the server does not start: {(directory / 'log').read_text().strip()[-500:]}")


def keep(directory: Path) -> None:
    """Sleeps in the kernel until nobody uses the server, then stops it."""
    while True:
        used(directory, wait=True)
        with mutex(directory):
            if not used(directory):
                stop(directory)
                return


def _say(pipe: int, words: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the starter is gone
        os.write(pipe, words.encode())
    os.close(pipe)


def main(argv: list[str]) -> int:
    directory, binaries, (uid, gid, held) = Path(argv[0]), Path(argv[1]), map(int, argv[2:])
    ours, theirs = os.pipe()
    if os.fork():  # the starter waits for this process only; the server's parent stays in the background
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8") as said:
            answer = said.read()
        sys.stdout.write(answer or "the keeper died")
        return 0 if answer == "ready" else 1
    os.setsid()
    os.close(ours)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        start(directory, binaries, uid, gid)
    except Exception as error:
        stop(directory)
        _say(theirs, str(error))
        os._exit(1)
    _say(theirs, "ready")
    os.close(held)
    keep(directory)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
