"""A Docker engine of the tests' own, started by hand: no service manager, no network."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


def missing() -> str | None:
    """What keeps it from being started."""
    if not shutil.which("dockerd"):
        return "no docker engine: apt-get install -y --no-install-recommends docker.io"
    return None if os.getuid() == 0 else "a docker engine can be started by root only"


def gvisor_missing() -> str | None:
    """What keeps boxes from having a kernel of their own."""
    if shutil.which("runsc"):
        return None
    return "no gVisor: apt-get install runsc (of 2024 or later; bookworm-backports has one)"


@contextlib.contextmanager
def started() -> Iterator[str]:
    """The address of an engine that runs for the time of a block."""
    place = Path(tempfile.mkdtemp(prefix="dockerd-", dir="/tmp"))
    address = f"unix://{place}/docker.sock"
    command = [
        "dockerd", "--data-root", f"{place}/data", "--exec-root", f"{place}/exec", "--pidfile", f"{place}/pid",
        "-H", address, "--storage-driver", "overlay2", "--iptables=false", "--ip6tables=false", "--bridge=none",
        "--ip-forward=false", "--config-file", f"{place}/daemon.json",
    ]  # fmt: skip
    # Its own network stack is off as well, since the engine gives it none; files stay where the limits on disks hold.
    gvisor = {"path": shutil.which("runsc"), "runtimeArgs": ["--network=none", "--overlay2=none"]}
    (place / "daemon.json").write_text(json.dumps({"runtimes": {} if gvisor_missing() else {"runsc": gvisor}}))
    with open(place / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while not (place / "docker.sock").exists():
            assert process.poll() is None and time.monotonic() < deadline, (place / "log").read_text()[-2000:]
            time.sleep(0.05)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _unmount(place)
        shutil.rmtree(place, ignore_errors=True)


def _unmount(place: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for each in sorted((each for each in mounted if each.startswith(str(place))), reverse=True):
        subprocess.run(["umount", "-l", each], check=False)
