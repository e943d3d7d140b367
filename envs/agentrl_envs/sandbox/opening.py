"""Opens boxes, on the strongest back end that this machine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import namespaces
from .boxed import tar
from .words import Limits, Sandbox, SandboxError
from .view import view

AUTO = ("namespaces", "landlock")
BACKENDS = (*AUTO, "docker", "unsafe")
_known: dict[str, str | None] = {}


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
    run_label: str = "agentrl",
    visible: Sequence[str] = (),
    hidden: Sequence[str] = (),
) -> Sandbox:
    """A box whose workspace holds `files`, given by name or as an archive.

    `backend`: "auto" takes namespaces where they work, else landlock; "docker" is taken by name; "unsafe" runs without
    isolation, and only in these words. SandboxError where the machine has none, with what to do. `run_label` is what
    `reap` finds it by. Beside the system's programs boxes see the directories `visible`, read-only, but nothing of
    this package and of `hidden`.
    """
    archive = files if isinstance(files, bytes) else pack(files or {})
    return namespaces.open_box(archive, limits or Limits(), view(visible, hidden), run_label)


def available() -> dict[str, str | None]:
    """Every back end: None where it works on this machine, else why it does not. A probe opens a box, once."""
    if not _known:
        _known["namespaces"] = _probe("namespaces")
    return dict(_known)


def _probe(backend: str) -> str | None:
    try:
        with open_sandbox(backend=backend) as box:
            return None if box.run(["true"]).ok else "a first command failed"
    except SandboxError as error:
        return str(error)
