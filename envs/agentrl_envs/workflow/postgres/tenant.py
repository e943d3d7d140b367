"""One tenant's database, used as an `sqlite3.Connection` is; copied within its server, and elsewhere through bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from agentrl_jax.protocol import Snapshot

from .. import schema
from . import dialect
from .server import Server, end, server


class Tenant:
    """A database of its own. `state` is the hash of its last snapshot while nothing has been written since.

    The session is opened when a statement needs it; copying the database closes it.
    """

    def __init__(self, home: Server) -> None:
        self.home, self.name = home, home.fresh()
        self.state: str | None = None
        self._session: Any = None
        self._lock = threading.RLock()
        home.tenants[self.name] = self

    def execute(self, statement: str, parameters: Sequence[Any] = (), /) -> Any:
        """Carries out one statement in SQLite's words. `OverflowError`: a value that no column can hold."""
        import psycopg

        with self._lock:
            if not statement.startswith("SELECT"):
                self.state = None
            try:
                return self._open().execute(dialect.translated(statement), tuple(parameters) or None)
            except psycopg.DataError as error:
                raise OverflowError(str(error)) from None
            except psycopg.OperationalError as error:
                raise schema.Unavailable(f"PostgreSQL: {' '.join(str(error).split())[:300]}") from error

    def fill(self, rows: schema.Rows) -> None:
        with self._lock, self._open().transaction():
            for table, values in rows.items():
                stored = [dialect.stored(table, row) for row in values]
                if stored:
                    self._session.cursor().executemany(dialect.insert(table), stored)

    def snapshot(self) -> Snapshot:
        with self._lock:
            image = schema.create({table: rows.values() for table, rows in schema.dump(self).items()})
            try:
                taken = schema.snapshot(image)
            finally:
                image.close()
            self.state = taken.hash
            return taken

    def copied(self, hash: str) -> Tenant | None:
        """A new tenant like this one, or None where its state is another by now."""
        with self._lock:
            if self.state != hash:
                return None
            if self._session is not None:
                session, self._session = self._session, None
                end(session)
            return _made(self.home, self.name)

    def close(self) -> None:
        """Drops the database. Can be called twice."""
        with self._lock:
            session, self._session = self._session, None
            self.home.tenants.pop(self.name, None)
            if session is not None:
                end(session)
            if self.name:
                with contextlib.suppress(schema.Unavailable):  # the database is gone with its server
                    self.home.drop(self.name)
                self.name = ""

    def _open(self) -> Any:
        if self._session is None:
            self._session = self.home.connect(self.name)
        return self._session


def create(handles: str, rows: schema.Rows) -> Tenant:
    """A fresh tenant that holds `rows`. A server that was lost since the last time is started again."""
    try:
        return _filled(server(), handles, rows)
    except schema.Unavailable:
        return _filled(server(), handles, rows)


def restore(handles: str, snapshot: Snapshot) -> Tenant:
    """A fresh tenant in the snapshot's state: a copy within the server where a tenant of this process is in that state
    still, else from the bytes."""
    home = server()
    source = next((tenant for tenant in list(home.tenants.values()) if tenant.state == snapshot.hash), None)
    copy = source.copied(snapshot.hash) if source is not None else None
    if copy is not None:
        return copy
    image = schema.open_bytes(snapshot.data)
    try:
        rows = {table: list(held.values()) for table, held in schema.dump(image).items()}
    finally:
        image.close()
    return create(handles, rows)


def _filled(home: Server, handles: str, rows: schema.Rows) -> Tenant:
    tenant = _made(home, home.template(handles))
    try:
        tenant.fill(rows)
    except BaseException:
        tenant.close()
        raise
    return tenant


def _made(home: Server, source: str) -> Tenant:
    tenant = Tenant(home)
    try:
        home.copy(source, tenant.name)
    except BaseException:
        tenant.close()
        raise
    return tenant
