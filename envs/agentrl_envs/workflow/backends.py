"""Where tenants live: in SQLite in memory (the default), or in PostgreSQL. Both take and restore the same snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from agentrl_jax.protocol import Snapshot

from . import schema
from .options import Options


class Backend(NamedTuple):
    create: Callable[[schema.Rows], Any]  # a fresh tenant: a `schema.Connection` that can be closed
    restore: Callable[[Snapshot], Any]
    snapshot: Callable[[Any], Snapshot]


SQLITE = Backend(schema.create, lambda snapshot: schema.open_bytes(snapshot.data), schema.snapshot)


def backend(options: Options) -> Backend:
    """The back end that the options name."""
    if options.backend == "sqlite":
        return SQLITE
    from . import postgres

    return Backend(
        lambda rows: postgres.create(options.handles, rows),
        lambda snapshot: postgres.restore(options.handles, snapshot),
        postgres.Tenant.snapshot,
    )
