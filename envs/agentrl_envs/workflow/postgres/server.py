"""The server that this process's tenants live in: the run's, found by its label, or this process's own.

All workers of a run on one machine share a server (`AGENTRL_RUN_LABEL`); `keeper` stops it after the last of them.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib.util
import itertools
import os
import pwd
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

from ..schema import Unavailable
from . import dialect, keeper

OLDEST = 15  # the first version whose CREATE DATABASE has STRATEGY
LABEL, WORKER = "AGENTRL_RUN_LABEL", "AGENTRL_WORKER"
_lock = threading.Lock()
_joined: dict[int, Server] = {}  # by process, since a fork inherits the dictionary and may use none of it


class Server:
    """One process's access to a server: a lock that keeps it running, and a session to make and drop databases in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tenants: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self.lost = False
        self._numbers = itertools.count(1)
        self._templates: set[str] = set()
        self._lock = threading.RLock()
        self._use, self._session = _join(directory)

    def fresh(self) -> str:
        """A name for a database: whose it is can be read off it."""
        return f"tenant_{os.getpid()}_{next(self._numbers)}"

    def copy(self, source: str, name: str) -> None:
        """A new database like `source`, which nobody may have a session in."""
        self._do(f"CREATE DATABASE {name} TEMPLATE {source} STRATEGY file_copy")

    def drop(self, name: str) -> None:
        self._do(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def connect(self, name: str) -> Any:
        """A session in a database; each statement is its own transaction."""
        return _connect(self.directory, name)

    def template(self, handles: str) -> str:
        """The name of the template database: the tables, empty. Made by whoever needs it first."""
        name = f"empty_{handles}"
        if name not in self._templates:
            with keeper.mutex(self.directory), self._lock:
                if not self._do("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone():
                    self._make_template(name, handles)
            self._templates.add(name)
        return name

    def leave(self) -> None:
        """Gives the server up; the last one who does ends it."""
        self._session.close()
        os.close(self._use)

    def _make_template(self, name: str, handles: str) -> None:
        self.drop("unfinished")
        self._do("CREATE DATABASE unfinished TEMPLATE template0 STRATEGY file_copy")
        session = self.connect("unfinished")
        try:
            for statement in dialect.tables(handles):
                session.execute(statement)
        finally:
            end(session)
        self._do("ALTER DATABASE unfinished WITH ALLOW_CONNECTIONS false IS_TEMPLATE true")
        self._do(f"ALTER DATABASE unfinished RENAME TO {name}")

    def _do(self, statement: str, parameters: tuple[Any, ...] = ()) -> Any:
        import psycopg

        with self._lock:
            try:
                return self._session.execute(statement, parameters or None)
            except psycopg.OperationalError as error:
                self.lost = self._session.closed
                raise Unavailable(f"PostgreSQL: {_one_line(error)}") from error


def server() -> Server:
    """The server of this process, joined or started."""
    with _lock:
        found = _joined.get(os.getpid())
        if found is not None and found.lost:
            del _joined[os.getpid()]
            found.leave()
            found = None
        if found is None:
            _joined.clear()  # what a parent process had is not ours to use
            found = _joined[os.getpid()] = Server(home(os.environ.get(LABEL)))
        return found


def home(label: str | None) -> Path:
    """Where the server of a run lies, or this process's own."""
    key = f"run-{hashlib.sha256(label.encode()).hexdigest()[:12]}" if label else f"process-{os.getpid()}"
    return Path(tempfile.gettempdir()) / f"agentrl-postgres-{os.geteuid()}-{key}"


def reap(label: str) -> int:
    """Ends the server of a run that nobody uses any more; returns how many it ended."""
    directory = home(label)
    if not directory.exists():
        return 0
    with keeper.mutex(directory):
        return 0 if keeper.used(directory) else int(keeper.stop(directory))


def end(session: Any) -> None:
    """Closes a session and waits until its process is gone: a database with one cannot be copied."""
    try:
        process = os.pidfd_open(session.info.backend_pid)
    except Exception:  # it is gone already, or the session is broken
        session.close()
        return
    try:
        session.close()
        watch = select.poll()
        watch.register(process, select.POLLIN)
        watch.poll(5000)
    finally:
        os.close(process)


@functools.cache
def missing() -> str | None:
    """What this machine lacks, with the command that installs it, or None."""
    if _binaries() is None:
        return f"PostgreSQL {OLDEST} or later is not installed: apt-get install postgresql"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install 'agentrl-jax[postgres]'"
    if _account() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody: adduser --system postgres"
    return None


def _binaries() -> Path | None:
    """The folder of the newest `initdb` and `postgres`."""
    found = [Path(path).resolve().parent for path in (shutil.which("initdb"),) if path]
    found += [*Path("/usr/lib/postgresql").glob("*/bin"), *Path("/usr").glob("pgsql-*/bin")]
    versions = {folder: _version(folder) for folder in found if (folder / "initdb").exists()}
    newest = max(versions, key=versions.__getitem__, default=None)
    return newest if newest is not None and versions[newest] >= OLDEST else None


def _version(folder: Path) -> int:
    try:
        said = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    number = re.search(r"\d+", said)
    return int(number.group()) if number else 0


def _account() -> tuple[int, int] | None:
    """The user that the server runs as: this one, or for root another."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    return None


def _join(directory: Path) -> tuple[int, Any]:
    """The lock of use and a session, with a server that runs: one that is there, or a new one."""
    with keeper.mutex(directory) as mutex:
        owners = {os.geteuid(), (_account() or (0, 0))[0]}
        if directory.stat().st_uid not in owners:
            raise RuntimeError(f"{directory} belongs to another user; set TMPDIR to a folder of your own")
        use = os.open(directory / "use", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(use, fcntl.LOCK_SH)
            if not keeper.runs(directory):
                keeper.halt(directory)
                _launch(directory, mutex)
            session = _connect(directory, "postgres")
            _sweep(session)
        except BaseException:
            os.close(use)
            raise
    return use, session


def _launch(directory: Path, mutex: int) -> None:
    binaries, account = _binaries(), _account()
    assert binaries is not None and account is not None, missing()
    # The server belongs to the run and not to the worker that was first: it must not end with that worker.
    environment = {name: value for name, value in os.environ.items() if name not in (LABEL, WORKER)}
    said = subprocess.run(
        [sys.executable, "-I", "-S", keeper.__file__, directory, binaries, *map(str, (*account, mutex))],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/", check=False,
        env=environment,
        pass_fds=(mutex,),
    )  # fmt: skip
    if said.returncode:
        raise RuntimeError(f"PostgreSQL in {directory}: {said.stdout.strip() or 'the keeper did not start'}")


def _connect(directory: Path, database: str) -> Any:
    import psycopg

    try:
        return psycopg.connect(host=str(directory), user=keeper.USER, dbname=database, autocommit=True)
    except psycopg.OperationalError as error:
        raise Unavailable(f"PostgreSQL: {_one_line(error)}") from error


def _sweep(session: Any) -> None:
    """Drops the databases of processes that are gone."""
    for (name,) in session.execute("SELECT datname FROM pg_database WHERE datname LIKE 'tenant_%'").fetchall():
        owner = int(name.split("_")[1])
        if owner == os.getpid() or not Path(f"/proc/{owner}").exists():
            session.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


@atexit.register
def _leave() -> None:
    found = _joined.pop(os.getpid(), None)
    if found is not None:
        found.leave()
