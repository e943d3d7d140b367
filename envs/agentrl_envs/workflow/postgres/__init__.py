"""Tenants in PostgreSQL: a database of its own for each episode and each fork, copied from a template database.

`missing()` says what this machine lacks; `create`, `restore` and `reap` are what the environment uses. Snapshots are
those of the SQLite back end, byte format and hash alike, so either restores what the other has taken.
"""

from __future__ import annotations

from .server import missing, reap
from .tenant import Tenant, create, restore

__all__ = ["Tenant", "create", "missing", "reap", "restore"]
