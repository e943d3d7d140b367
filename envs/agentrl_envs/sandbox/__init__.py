"""Boxes for code that a policy writes: one interface, back ends chosen by what the machine has. See README.md."""

from .client import Ended
from .opening import available, open_sandbox, pack
from .words import HOME, Command, File, Frozen, Limits, Process, Result, Sandbox, SandboxError, WorkspaceError
from .view import interpreter

__all__ = [
    "HOME", "Command", "Ended", "File", "Frozen", "Limits", "Process", "Result", "Sandbox", "SandboxError",
    "WorkspaceError", "available", "interpreter", "open_sandbox", "pack",
]  # fmt: skip
