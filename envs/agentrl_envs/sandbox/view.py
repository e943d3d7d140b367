"""What of the host a box can see: a list of directories, read-only, and what in them is hidden."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = (
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf", "/etc/mime.types", "/etc/magic", "/etc/terminfo",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class View:
    """Paths shown at their own names, read-only, and directories that appear empty."""

    visible: tuple[str, ...]
    hidden: tuple[str, ...]


def view(visible: Sequence[str] = (), hidden: Sequence[str] = ()) -> View:
    """The system's programs, `visible` besides, without `hidden` and without this package: its source would tell a
    policy how its tasks are made and judged."""
    for path in visible:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ValueError(f"visible={path!r}: expected an absolute path that exists")
    shown = dict.fromkeys([*SYSTEM, *SETTINGS, *DEVICES, *(os.path.realpath(path) for path in visible), *visible])
    present = tuple(path for path in shown if os.path.exists(path))
    return View(present, tuple(dict.fromkeys([*_ours(), *(os.path.realpath(path) for path in hidden)])))


def _ours() -> list[str]:
    """The directories of both packages, and of the data sets."""
    found = [str(Path(__file__).resolve().parent.parent)]
    spec = importlib.util.find_spec("agentrl_jax")
    found += [os.path.realpath(path) for path in (spec.submodule_search_locations or ())] if spec else []
    data = os.environ.get("AGENTRL_DATA")
    return found + ([os.path.realpath(data)] if data else [])


def interpreter() -> tuple[str, tuple[str, ...]]:
    """The Python that runs this, for use in a box: its path, and what must be `visible` for it to start.

    Inside, /usr/bin/python3 is enough for programs that need the standard library only.
    """
    homes = dict.fromkeys(os.path.realpath(path) for path in (sys.base_prefix, sys.prefix))
    executable = os.path.join(sys.prefix, "bin", os.path.basename(sys.executable))
    return executable, tuple(path for path in homes if not path.startswith("/usr/") and path != "/usr")
