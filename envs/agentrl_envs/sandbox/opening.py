"""Opens boxes, on the strongest back end that this machine has."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from . import docker, landlock, namespaces
from .boxed import tar
from .owners import check_label, reap_processes
from .view import view
from .words import Limits, Sandbox, SandboxError

AUTO = ("namespaces", "landlock")
RUN_LABEL = "AGENTRL_RUN_LABEL"
BACKENDS = (*AUTO, "docker", "unsafe")
_known: dict[str, str | None] = {}
_lock = threading.RLock()


def pack(files: Mapping[str, bytes]) -> bytes:
    """The archive of a workspace with these files; a name that ends in "/" is an empty directory."""
    directories: set[str] = set()
    plain: dict[str, bytes] = {}
    for name, data in files.items():
        parts = name.rstrip("/").split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in name:
            raise ValueError(f"files[{name!r}]: expected a path relative to the workspace, without . and ..")
        if name.endswith("/"):
            directories.add("/".join(parts))
        else:
            plain["/".join(parts)] = data
        directories.update("/".join(parts[:n]) for n in range(1, len(parts)))
    if both := sorted(directories & plain.keys()):
        raise ValueError(f"files: {both[0]!r} is a file and a directory")
    entries = [(name.encode(), tar.FILE, 0o644, data) for name, data in plain.items()]
    entries += [(name.encode(), tar.DIRECTORY, 0o755, b"") for name in directories]
    return tar.pack(sorted(entries, key=lambda each: each[0].split(b"/")))


def open_sandbox(
    files: Mapping[str, bytes] | bytes | None = None,
    *,
    limits: Limits | None = None,
    backend: str = "auto",
    run_label: str | None = None,
    visible: Sequence[str] = (),
    hidden: Sequence[str] = (),
    runtime: str | None = None,
) -> Sandbox:
    """A box whose workspace holds `files`, given by name or as an archive.

    `backend`: "auto" takes namespaces where they work, else landlock; "docker" is taken by name; "unsafe" runs without
    isolation, and only in these words. SandboxError where the machine has none, with what to do. `run_label` is what
    `reap` finds it by; by default the run's, which its workers have as AGENTRL_RUN_LABEL. Beside the system's programs
    boxes see the directories `visible`, read-only, but nothing of this package and of `hidden`. `runtime` is docker's,
    such as "runsc".
    """
    archive = files if isinstance(files, bytes) else pack(files or {})
    seen, label = view(visible, hidden), check_label(run_label or os.environ.get(RUN_LABEL) or "agentrl")
    name = chosen(backend)
    if runtime is not None and name != "docker":
        raise ValueError(f"runtime={runtime!r} is for backend='docker', not for {name}")
    openers = {
        "namespaces": namespaces.open_box,
        "landlock": landlock.open_box,
        "docker": partial(docker.open_box, runtime=runtime),
        "unsafe": partial(landlock.open_box, safe=False),
    }
    return openers[name](archive, limits or Limits(), seen, label)


def chosen(backend: str = "auto") -> str:
    """The back end that `open_sandbox` takes."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r}: expected auto or one of {', '.join(BACKENDS)}")
        return backend
    for each in AUTO:
        if works(each) is None:
            return each
    reasons = "; ".join(f"{each}: {works(each)}" for each in AUTO)
    raise SandboxError(
        f"this machine cannot isolate a policy's code ({reasons}). Allow user namespaces, or use a kernel with "
        'Landlock, or run a docker engine and say backend="docker"; backend="unsafe" runs it without isolation'
    )


def works(backend: str) -> str | None:
    """None where the back end works here, else why not. The first call opens a box; later ones remember."""
    with _lock:
        if backend not in _known:
            _known[backend] = _probe(backend)
        return _known[backend]


def available() -> dict[str, str | None]:
    """Every back end that isolates: None where it works on this machine, else why it does not."""
    return {each: works(each) for each in BACKENDS if each != "unsafe"}


def _probe(backend: str) -> str | None:
    try:
        with open_sandbox(backend=backend) as box:
            return None if box.run(["true"]).ok else "a first command failed"
    except SandboxError as error:
        return str(error)


def reap(run_label: str) -> int:
    """Ends what boxes of a run left whose process is gone, however it ended; the number of what was ended.

    Boxes in namespaces cannot be left over; those of this and of other living processes are not touched.
    """
    ended = reap_processes(check_label(run_label))
    if "DOCKER_HOST" in os.environ or os.path.exists("/var/run/docker.sock"):
        with contextlib.suppress(SandboxError):  # an engine that is not there has none of ours
            ended += docker.reap_containers(run_label)
    return ended


def _free_lock() -> None:
    """In a fork of this process, which copies a lock that another thread may hold."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_free_lock)
