"""Boxes as containers of a Docker engine, through its SDK: for machines where nothing else works, or by name.

The image holds directories, links and a few settings; programs come from the host's /usr, read-only. The agent is the
container's program and its channel the attached standard input and output: an exec for every command would cost 80 ms.
`runtime="runsc"` takes gVisor where the engine has it. Frozen states are archives there too: without memory.
A kernel of its own keeps the host out of reach, but hides less within a box: commands can open the agent's descriptors,
so that what such a box answers is worth no more than the files that are in it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import sys
import weakref
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from .boxed import files, tar
from .client import Box
from .owners import machine, mark, orphaned
from .view import DEVICES, SETTINGS, View
from .words import Frozen, Limits, Sandbox, SandboxError

TIMEOUT_S = 60  # of a call to the engine: when it is met, the engine is at fault
_BOXED = Path(__file__).resolve().parent / "boxed"
_AGENTS = ["SETUID", "SETGID", "CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL"]  # of a sandboxed kernel's root, over its box
_START = "import sys;sys.path.append('/agent');import boxed.container as m;m.main()"
_DIRECTORIES = ("agent", "agent/boxed", "dev", "etc", "etc/ssl", "proc", "sys", "tmp", "usr", "workspace")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:1000:1000:agent:/tmp:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_open: weakref.WeakSet[DockerBox] = weakref.WeakSet()


class Channel:
    """The attached stream as a socket: the engine puts a header of 8 bytes before every piece of output."""

    def __init__(self, attached: Any) -> None:
        self._attached, raw = attached, getattr(attached, "_sock", attached)
        self._raw, self._header, self._left, self._wanted = raw, b"", 0, False

    def fileno(self) -> int:
        """For poll."""
        return self._raw.fileno()

    def setblocking(self, flag: bool) -> None:
        """socket.setblocking."""
        self._raw.setblocking(flag)

    def send(self, data: memoryview) -> int:
        """socket.send."""
        return self._raw.send(data)

    def recv(self, size: int) -> bytes:
        """socket.recv of the agent's output."""
        while True:
            if not self._left:
                part = self._raw.recv(8 - len(self._header))
                if not part:
                    return b""
                self._header += part
                if len(self._header) == 8:
                    self._wanted, self._left = self._header[0] == 1, int.from_bytes(self._header[4:], "big")
                    self._header = b""
                continue
            part = self._raw.recv(min(size, self._left))
            self._left -= len(part)
            if self._wanted or not part:
                return part

    def shutdown(self, how: int) -> None:
        """socket.shutdown."""
        self._raw.shutdown(how)

    def close(self) -> None:
        """socket.close; the SDK's file and response hold the socket too."""
        for each in (getattr(self._attached, "_response", None), self._attached, self._raw):
            if each is not None:
                each.close()


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """What the engine or the way to it breaks is a SandboxError. The exceptions of the SDK's transport are OSErrors."""
    import docker.errors

    try:
        yield
    except (docker.errors.DockerException, OSError) as error:
        text = " ".join(str(error).split())
        raise SandboxError(f"docker: {text}"[:400]) from None


_clients: dict[tuple[str, int], Any] = {}
_images: dict[tuple[Any, tuple[tuple[str, str], ...]], str] = {}


def engine() -> Any:
    """This process's client of the engine that DOCKER_HOST names, or of the local one."""
    try:
        import docker
    except ImportError:
        raise SandboxError("docker: the SDK is not installed: pip install docker") from None
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if (address, os.getpid()) not in _clients:
        _knock(address)
        with engine_errors():
            client = docker.from_env(timeout=TIMEOUT_S)
            client.ping()
            _clients[address, os.getpid()] = client
    return _clients[address, os.getpid()]


def _knock(address: str) -> None:
    """Before the SDK does, which leaves its socket open where nobody answers."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as attempt:
            try:
                attempt.connect(address.removeprefix("unix://"))
            except OSError as error:
                what = f"docker: no engine at {address} ({error.strerror}): start one, or set DOCKER_HOST"
                raise SandboxError(what) from None


class DockerBox(Box):
    """A container; it is removed when it is closed, or when this process ends."""

    def __init__(
        self, client: Any, archive: bytes, limits: Limits, view: View, label: str, runtime: str | None
    ) -> None:
        self._client: Any = client
        self._container: Any = None
        self._again = (client, limits, view, label, runtime)
        with engine_errors():
            options = _options(client, limits, view, label, runtime)
            self._container = client.containers.create(**options)
            try:
                channel = self._attach()
            except BaseException:
                self._end(final=False)
                raise
        super().__init__("docker", limits, channel)  # type: ignore[arg-type]
        _open.add(self)
        try:
            with engine_errors():
                self._container.start()
            self.extract(archive)
        except BaseException:
            self.close()
            raise

    def _attach(self) -> Channel:
        wanted = {"stdin": 1, "stdout": 1, "stream": 1}
        attached = self._client.api.attach_socket(self._container.id, params=wanted)
        return Channel(attached)

    def _end(self, *, final: bool) -> None:
        if final or self._container is None or self._owner_is_another():
            return  # without its channel the agent ends, and the engine removes the container
        import docker.errors

        with engine_errors(), contextlib.suppress(docker.errors.NotFound):
            try:
                self._container.remove(force=True, v=True)
            except docker.errors.APIError as error:
                if error.status_code != 409:  # its removal is in progress
                    raise

    def _owner_is_another(self) -> bool:
        return getattr(self, "_owner", os.getpid()) != os.getpid()

    def _cause(self) -> str | None:
        return "memory"

    def _sibling(self, frozen: Frozen) -> Sandbox:
        client, limits, view, label, runtime = self._again
        archive: Any = frozen.layers[0]
        return DockerBox(client, archive, limits, view, label, runtime)


def _python() -> tuple[str, tuple[str, ...]]:
    """An interpreter for the agent, and what must be visible for it."""
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if base.startswith("/usr/"):
        return base, ()
    if os.path.exists("/usr/bin/python3"):
        return "/usr/bin/python3", ()
    return base, (os.path.realpath(sys.base_prefix),)


def _options(client: Any, limits: Limits, view: View, label: str, runtime: str | None) -> dict[str, Any]:
    from docker.types import LogConfig, Mount, Ulimit

    python, needed = _python()
    links = {path: os.readlink(path) for path in view.visible if os.path.islink(path)}
    shown = [*dict.fromkeys([*view.visible, *needed])]
    mounts = [
        Mount(path, path, type="bind", read_only=True)
        for path in shown
        if path not in links and path not in DEVICES and path not in SETTINGS
    ]
    mounts.append(Mount("/agent/boxed", str(_BOXED), type="bind", read_only=True))
    hidden = [
        path for path in view.hidden if os.path.isdir(path) and any(path.startswith(f"{each}/") for each in shown)
    ]
    # No process 1 of the engine's: the agent reaps, and as process 1 no command can kill it. The engine's would hold
    # the channel too, and lend it to commands, which have its uid, through /proc/1/fd.
    disk, owner = limits.disk_bytes, "uid=1000,gid=1000,nosuid,nodev"
    return {
        "image": _image(client, links), "runtime": runtime, "mounts": mounts, "read_only": True,
        "command": [python, "-I", "-S", "-B", "-c", _START, *map(str, astuple(limits)[1:])],
        "tmpfs": {
            "/workspace": f"size={disk * 5 // 8},nr_inodes={limits.files},mode=755,exec,{owner}",
            "/tmp": f"size={disk // 4},nr_inodes={limits.files},mode=1777,exec,{owner}",
            **dict.fromkeys(hidden, "ro,size=4k,mode=755"),
        },
        "shm_size": disk // 8, "mem_limit": limits.memory_bytes + disk, "memswap_limit": limits.memory_bytes + disk,
        "pids_limit": limits.processes + (256 if runtime else 1), "nano_cpus": 2 * 10**9,
        "ulimits": [Ulimit(name="core", soft=0, hard=0)], "network_mode": "none", "cap_drop": ["ALL"],
        "cap_add": _AGENTS if runtime else [],
        "security_opt": ["no-new-privileges:true"], "init": False, "user": "0:0" if runtime else "1000:1000",
        "hostname": "box",
        "working_dir": "/workspace", "stdin_open": True, "auto_remove": True, "environment": {},
        "log_config": LogConfig(type="none"),
        "labels": {"agentrl.run": label, "agentrl.owner": mark(label), "agentrl.machine": machine()},
    }  # fmt: skip


def _image(client: Any, links: dict[str, str]) -> str:
    """Empty directories, links and a copy of a few settings, imported once: every mount costs a start 10 ms."""
    import docker.errors

    known = (client, tuple(sorted(links.items())))
    if known in _images:
        return _images[known]
    entries = [(name.encode(), tar.DIRECTORY, 0o755, b"") for name in _DIRECTORIES]
    entries += [(path[1:].encode(), tar.LINK, 0o777, target.encode()) for path, target in sorted(links.items())]
    entries += [(f"etc/{name}".encode(), tar.FILE, 0o644, text.encode()) for name, text in _ETC.items()]
    for path in SETTINGS:
        entries += _copied(path)
    data = tar.pack(entries)
    tag = hashlib.sha256(data).hexdigest()[:12]
    try:
        client.images.get(f"agentrl-box:{tag}")
    except docker.errors.ImageNotFound:
        client.api.import_image_from_data(data, repository="agentrl-box", tag=tag)
    _images[known] = f"agentrl-box:{tag}"
    return _images[known]


def _copied(source: str) -> list[tuple[bytes, bytes, int, bytes]]:
    """A file of the host, or a directory with all in it, as entries of an archive."""
    name = source[1:].encode()
    if os.path.isfile(source):
        return [(name, tar.FILE, 0o644, Path(source).read_bytes())]
    if not os.path.isdir(source):
        return []
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = files.entries(fd, files.Room(32 << 20))
        inner = [(name + b"/" + path, kind, mode, data) for path, kind, mode, data in found]
    finally:
        os.close(fd)
    return [(name, tar.DIRECTORY, 0o755, b""), *inner]


def open_box(archive: bytes, limits: Limits, view: View, label: str, *, runtime: str | None = None) -> Sandbox:
    """A box whose workspace holds an archive's entries."""
    return DockerBox(engine(), archive, limits, view, label, runtime)


def reap_containers(label: str) -> int:
    """Removes a run's containers whose owner, a process of this machine, is gone."""
    client, found = engine(), []
    with engine_errors():
        filters = {"label": [f"agentrl.run={label}", f"agentrl.machine={machine()}"]}
        for each in client.containers.list(all=True, filters=filters):
            if orphaned(each.labels.get("agentrl.owner", ""), label):
                found.append(each)
                each.remove(force=True, v=True)
    return len(found)


@atexit.register
def end_all() -> None:
    """Removes the containers of this process, and closes its clients."""
    for box in list(_open):
        with contextlib.suppress(SandboxError):
            box.close()
    _images.clear()
    while _clients:
        _clients.popitem()[1].close()
