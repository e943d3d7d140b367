"""Boxes for code that a policy writes: one interface, back ends chosen by what the machine has. See README.md."""

from .client import Ended
from .opening import available, chosen, open_sandbox, pack, reap
from .view import interpreter
from .words import HOME, Command, File, Frozen, Limits, Process, Result, Sandbox, SandboxError, WorkspaceError

__all__ = [
    "HOME", "Command", "Ended", "File", "Frozen", "Limits", "Process", "Result", "Sandbox", "SandboxError",
    "WorkspaceError", "available", "chosen", "interpreter", "open_sandbox", "pack", "reap",
]  # fmt: skip
