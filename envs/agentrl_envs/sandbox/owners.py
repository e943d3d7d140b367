"""Whose a box is: the run's label, and the process that opened it. A box whose owner is gone is reaped."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

from .link import FIRST_UID, UIDS_EACH

BOX = re.compile(r"/tmp/_[a-z0-9]{4}")
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_label(label: str) -> str:
    """The label itself; ValueError where it is none."""
    if not LABEL.fullmatch(label):
        raise ValueError(f"run_label={label!r}: expected letters, digits, '.', '_' and '-', at most 100")
    return label


def started(pid: int) -> str | None:
    """When a process began, in ticks since boot; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in "ZX" else None


def mark(label: str) -> str:
    """What the boxes of this process are marked with."""
    return f"{label}:{os.getpid()}:{started(os.getpid())}"


def sealed_mark(label: str) -> str:
    """The same in 42 characters, whatever the label and the numbers are: what a box can see of it has one length."""
    return f"{_seal(label)}:{os.getpid():010d}:{(started(os.getpid()) or '').zfill(14)}"


def _seal(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()[:16]


def machine() -> str:
    """What tells this machine, since it was started, and this space of process numbers from any other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def orphaned(text: str, label: str) -> bool:
    """Whether a mark is of this label, and its process is gone."""
    name, _, owner = text.partition(":")
    pid, _, when = owner.partition(":")
    return name == label and pid.isdigit() and started(int(pid)) != when


def reap_processes(label: str) -> int:
    """Kills what boxes without namespaces left, of owners that are gone; the number of processes."""
    found = [pid for pid in _pids() if _marked(pid, label) or _of_a_box(pid)]
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    _remove_places()
    return len(found)


def _pids() -> list[int]:
    """Those of this space of process numbers only: in another one, a mark's number means another process."""
    ours, found = os.readlink("/proc/self/ns/pid"), []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if os.readlink(f"/proc/{name}/ns/pid") == ours:
                    found.append(int(name))
            except OSError:
                continue
    return found


def _marked(pid: int, label: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    marks = [each[12:] for each in environment if each.startswith(b"AGENTRL_BOX=")]
    return any(_orphaned(each.decode(errors="replace"), label) for each in marks)


def _orphaned(text: str, label: str) -> bool:
    """As `orphaned`, of a sealed mark."""
    name, _, owner = text.partition(":")
    pid, _, when = owner.partition(":")
    return name == _seal(label) and pid.isdigit() and (started(int(pid)) or "").zfill(14) != when


def _of_a_box(pid: int) -> bool:
    """Has a uid that root gave to a box of a process that is gone, whatever became of its environment."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return False
    if os.getuid() or not FIRST_UID <= uid < FIRST_UID + UIDS_EACH * (1 << 22):
        return False
    return started((uid - FIRST_UID) // UIDS_EACH) is None


def _remove_places() -> None:
    for place in Path(tempfile.gettempdir()).glob("agentrl-*-*"):
        pid = place.name.split("-")[1]
        with contextlib.suppress(FileNotFoundError):  # another process was here first
            if pid.isdigit() and started(int(pid)) is None and place.stat().st_uid == os.getuid():
                remove_place(str(place))


def remove_place(place: str) -> None:
    """Removes a directory of boxes, and what the links in it lead to."""
    for link in (*Path(place).glob("*/workspace"), *Path(place).glob("*/tmp")):
        if link.is_symlink() and BOX.fullmatch(target := os.readlink(link)):
            shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
