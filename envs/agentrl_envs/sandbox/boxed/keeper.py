"""The keeper: one process beside each that opens boxes, from which boxes are forked.

It is process 1 of a process namespace and has all its rights in a user namespace only: when it ends, every process of
every box ends with it. It ends when the process that started it does, however that happens. A box is a fork of it
(a bare interpreter without environment or secrets) in namespaces of its own, so it costs a few milliseconds.
"""

import fcntl
import os
import resource
import select
import stat
import struct

from . import agent, commands, files, frames, linux, seccomp, tar

_MADE = ("rootfs", "boxes", "layers", "proc")
UPPER, WORK, TMP, SHARED = "upper", "work", "tmp", "shm"


class Setup:
    """What the starting process says in its first frame."""

    def __init__(self, fields):
        parent, host_uid, overlay, *paths = fields
        self.parent, self.host_uid = int(parent), int(host_uid)
        self.overlay = overlay == b"1"  # else workspaces are copies
        split = int(paths[0])
        self.visible, self.hidden = paths[1 : 1 + split], paths[1 + split :]


class Limits:
    """The limits of one box, as they came over the channel."""

    def __init__(self, values):
        numbers = [int(value) for value in values]
        self.memory_bytes, self.processes, self.disk_bytes, self.files, self.open_files, self.output_bytes = numbers


def main():
    """Of the interpreter that is started: descriptor 0 is the control socket."""
    control = linux.socket(fileno=os.dup(0))
    os.set_inheritable(control.fileno(), False)
    try:
        setup = Setup(receive(control)[0])
        parent = os.pidfd_open(setup.parent)
        if os.getppid() != setup.parent:
            os._exit(0)
        _enter(setup)
    except (OSError, frames.Broken, ValueError) as error:
        control.sendall(frames.frame("broken", f"{error}"))
        os._exit(1)
    pid = os.fork()
    if not pid:
        linux.die_with_parent()
        linux.undumpable()
        _keep(control, parent, setup)
    control.close()
    os.close(0)
    _guard(parent, pid)


def _enter(setup):
    """Takes an unprivileged uid of the host first, then the namespaces in which it has rights."""
    if os.getuid() == 0:
        linux.unshare(linux.NEWNS)
        linux.mount("none", "/", flags=linux.REC | linux.PRIVATE)
        _build(setup)  # while directories that others cannot enter are in reach
        os.setgroups([])
        os.setresgid(setup.host_uid, setup.host_uid, setup.host_uid)
        os.setresuid(setup.host_uid, setup.host_uid, setup.host_uid)
        linux.prctl(4, 1)  # else /proc/self belongs to root
        _become_root_of_namespaces()
    else:
        _become_root_of_namespaces()
        linux.mount("none", "/", flags=linux.REC | linux.PRIVATE)
        _build(setup)


def _become_root_of_namespaces():
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.NEWUSER | linux.NEWNS | linux.NEWPID)
    _map(0, uid, gid)


def _map(inner, uid, gid):
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inner} {uid} 1"), ("gid_map", f"{inner} {gid} 1")):
        handle = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)


def _build(setup):
    """The root that boxes see, at /tmp/rootfs: a few directories, and what is visible of the host, read-only."""
    links = [(path, os.readlink(path)) for path in setup.visible if os.path.islink(path)]
    sources = [(path, os.open(path, os.O_PATH)) for path in setup.visible if not os.path.islink(path)]
    hidden = [path for path in setup.hidden if any(path.startswith(each + b"/") for each in setup.visible)]
    hidden = [path for path in hidden if os.path.isdir(path)]
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.NOSUID | linux.NODEV, "mode=755,size=16m")
    for name in _MADE:
        os.mkdir(f"/tmp/{name}")
    root = b"/tmp/rootfs"
    for name in (b"workspace", b"tmp", b"proc", b"dev", b"dev/shm", b"etc"):
        os.mkdir(root + b"/" + name)
    for path, target in links:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    for path, handle in sources:
        show(root + path, handle)
    for path in hidden:
        linux.mount("tmpfs", root + path, "tmpfs", linux.RDONLY | linux.NOSUID | linux.NODEV, "size=4k,mode=755")
    for link, target in ((b"fd", b"/proc/self/fd"), (b"stdin", b"fd/0"), (b"stdout", b"fd/1"), (b"stderr", b"fd/2")):
        os.symlink(target, root + b"/dev/" + link)
    for name, text in _ETC:
        if not os.path.lexists(root + b"/etc/" + name):
            with open(root + b"/etc/" + name, "w") as handle:
                handle.write(text)


_ETC = (
    (b"passwd", "root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:1000:1000:agent:/tmp:/bin/sh\n"),
    (b"group", "root:x:0:\nagent:x:1000:\n"),
    (b"hosts", "127.0.0.1 localhost box\n::1 localhost\n"),
    (b"hostname", "box\n"),
    (b"nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
)


def show(target, handle):
    """Binds what a descriptor stands for; a link is copied, devices are the only thing that may be written to."""
    source = b"/proc/self/fd/%d" % handle
    info = os.fstat(handle)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if stat.S_ISDIR(info.st_mode):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.mount(source, target, flags=linux.BIND | linux.REC)
    if not stat.S_ISCHR(info.st_mode):
        linux.read_only(target)
    os.close(handle)


def _guard(parent, pid):
    """Waits outside the process namespace: when the starting process ends, or the keeper does, all ends."""
    linux.undumpable()
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(os.pidfd_open(pid), select.POLLIN)
    wait(poll)
    os.kill(pid, linux.SIGKILL)
    os.waitpid(pid, 0)
    os._exit(0)


def wait(poll, seconds=None):
    """What the poll finds; [None] where this process is told to end."""
    linux.signal(linux.SIGTERM, _stop)
    try:
        return poll.poll(None if seconds is None else seconds * 1000)
    except _Stop:
        return [None]


class _Stop(Exception):
    pass


def _stop(number, _):
    linux.signal(number, linux.SIG_IGN)
    raise _Stop


def _keep(control, parent, setup):
    try:
        linux.mount("/tmp", "/tmp", flags=linux.BIND | linux.REC)
        linux.mount("proc", "/tmp/proc", "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC)
        os.chdir("/tmp")
        linux.pivot_root(".", ".")
        linux.unmount(".")
        os.chdir("/")
        linux.mount("/rootfs", "/rootfs", flags=linux.BIND | linux.REC)
        plain = linux.NOSUID | linux.NODEV
        linux.mount("tmpfs", "/layers", "tmpfs", plain, "mode=700")
        linux.mount("tmpfs", "/boxes", "tmpfs", plain, "mode=700,size=1m")
        os.umask(0)
        setup.overlay = setup.overlay and _overlay_works()
        keeper = Keeper(setup, os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC))
        control.sendall(frames.frame("ok", int(setup.overlay)))
    except OSError as error:
        control.sendall(frames.frame("broken", f"{error}"))
        os._exit(1)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == parent:
                os._exit(0)
            control.sendall(frames.frame(*keeper.answer(*receive(control))))


def _overlay_works():
    """Whether a directory below can be replaced, which needs more of a tmpfs than kernels before 6.6 have.

    The overlay stays mounted, where no box sees it: taking it off can wait for the kernel, up to 3 ms.
    """
    for name in ("low", "low/d", "up", "work", "on"):
        os.mkdir(f"/boxes/{name}")
    try:
        linux.mount(
            "overlay", "/boxes/on", "overlay", 0, "lowerdir=/boxes/low,upperdir=/boxes/up,workdir=/boxes/work,userxattr"
        )
    except OSError:
        return False
    try:
        os.rmdir("/boxes/on/d")
        os.mkdir("/boxes/on/d")
        return os.getxattr("/boxes/up/d", "user.overlay.opaque") == b"y"
    except OSError:
        return False


def receive(control):
    """A frame's fields, and the descriptor that came with it."""
    data, descriptor = linux.receive_with_descriptor(control, 4)
    if not data:
        os._exit(0)
    while len(data) < 4:
        data += control.recv(4 - len(data)) or os._exit(0)
    body = bytearray()
    size = frames.size_of(data)
    while len(body) < size:
        part = control.recv(min(size - len(body), 1 << 20))
        if not part:
            os._exit(0)
        body += part
    return frames.unpack(bytes(body)), descriptor


class Answers:
    """A method for each kind of request."""

    def answer(self, fields, descriptor):
        """One request's answer."""
        kind, *rest = fields
        try:
            return getattr(self, f"on_{kind.decode()}")(descriptor, *rest)
        except (files.Unfit, tar.Malformed) as error:
            return "refused", f"{error}"
        except OSError as error:
            return "broken", f"{error}"
        finally:
            if descriptor is not None:
                os.close(descriptor)


class Keeper(Answers):
    """Makes layers and boxes as it is told; it decides nothing."""

    def __init__(self, setup, namespace):
        self.setup, self.namespace, self.boxes = setup, namespace, {}

    def on_layer(self, _, name, archive):
        path = f"/layers/{int(name)}"
        os.mkdir(path, 0o755)
        with Directory(path) as fd:
            files.fill(fd, tar.unpack(archive))
        return ("ok",)

    def on_drop(self, _, name):
        path = f"/layers/{int(name)}"
        with Directory(path) as fd:
            files.clear(fd)
        os.rmdir(path)
        return ("ok",)

    def on_open(self, channel, name, *rest):
        limits, layers = Limits(rest[:6]), [f"/layers/{int(each)}" for each in rest[6:]]
        top = f"/boxes/{int(name)}"
        os.mkdir(top, 0o700)
        self.boxes[int(name)] = None
        flags, size = linux.NOSUID | linux.NODEV, f"size={limits.disk_bytes},nr_inodes={limits.files},mode=700"
        linux.mount("tmpfs", top, "tmpfs", flags, size)
        for each, mode in ((UPPER, 0o755), (WORK, 0o755), (TMP, 0o1777), (SHARED, 0o1777)):
            os.mkdir(f"{top}/{each}", mode)
        if not self.setup.overlay:
            with Directory(f"{top}/{UPPER}") as target:
                for layer in layers:
                    with Directory(layer) as source:
                        files.copy(source, target, files.Room(limits.disk_bytes))
        linux.unshare(linux.NEWPID)
        pid = os.fork()
        if not pid:
            _box(channel, top, layers if self.setup.overlay else None, limits, self.setup.visible)
        linux.setns(self.namespace, linux.NEWPID)
        self.boxes[int(name)] = pid
        return ("ok",)

    def on_freeze(self, _, box, layer, most):
        path = f"/layers/{int(layer)}"
        os.mkdir(path, 0o755)
        with Directory(f"/boxes/{int(box)}/{UPPER}") as source, Directory(path) as target:
            return "ok", files.copy(source, target, files.Room(int(most)))

    def on_kill(self, _, box):
        if int(box) in self.boxes:
            pid = self.boxes.pop(int(box))
            if pid is not None:
                os.kill(pid, linux.SIGKILL)
                os.waitpid(pid, 0)
            try:
                linux.unmount(f"/boxes/{int(box)}")
            finally:
                os.rmdir(f"/boxes/{int(box)}")
        return ("ok",)


class Directory:
    """A directory's descriptor, for the time of a block."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def __enter__(self):
        return self.fd

    def __exit__(self, *exc):
        os.close(self.fd)


def _box(channel, top, layers, limits, visible):
    """In the fork: becomes process 1 of a box."""
    try:
        only_channel(channel, "/rootfs/dev/null")
        linux.unshare(linux.NEWNS | linux.NEWNET | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP)
        _furnish(top, layers, visible)
        linux.sethostname("box")
        _loopback()
        linux.unshare(linux.NEWUSER)
        linux.prctl(4, 1)
        _map(1000, 0, 0)
        _confine(limits)
        os.chdir("/")
        home = os.open("/workspace", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        agent.start(3, 3, home, commands.Runner(limits, reader=3))
    except BaseException as error:
        os.write(3, frames.frame("broken", f"{error!r}"))
    finally:
        os._exit(1)


def only_channel(channel, null):
    """Closes every descriptor but the channel, which becomes number 3."""
    os.dup2(channel, 0)
    os.closerange(1, 1 << 16)
    os.dup2(0, 3, inheritable=False)
    handle = os.open(null, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(handle, fd)
    os.close(handle)


def _furnish(top, layers, visible):
    linux.mount("none", "/", flags=linux.REC | linux.PRIVATE)
    plain = linux.NOSUID | linux.NODEV
    if layers:
        lower = ":".join(reversed(layers))
        options = f"lowerdir={lower},upperdir={top}/{UPPER},workdir={top}/{WORK},userxattr"
        linux.mount("overlay", "/rootfs/workspace", "overlay", plain, options)
    else:
        linux.mount(f"{top}/{UPPER}", "/rootfs/workspace", flags=linux.BIND)
    within = [(path, os.open(b"/rootfs" + path, os.O_PATH)) for path in visible if path.startswith(b"/tmp/")]
    linux.mount(f"{top}/{TMP}", "/rootfs/tmp", flags=linux.BIND)
    for path, handle in within:
        show(b"/rootfs" + path, handle)
    linux.mount(f"{top}/{SHARED}", "/rootfs/dev/shm", flags=linux.BIND)
    linux.mount("proc", "/rootfs/proc", "proc", plain | linux.NOEXEC)
    linux.mount("/rootfs/proc/sys", "/rootfs/proc/sys", flags=linux.BIND)
    linux.read_only("/rootfs/proc/sys")
    os.chdir("/rootfs")
    linux.pivot_root(".", ".")
    linux.unmount(".")
    linux.mount("none", "/", flags=linux.REMOUNT | linux.BIND | linux.RDONLY | plain)


def _loopback():
    handle = linux.socket(2, 2)  # AF_INET, SOCK_DGRAM
    fcntl.ioctl(handle.fileno(), 0x8914, struct.pack("16sH14x", b"lo", 1 | 64))  # SIOCSIFFLAGS: up, running
    handle.close()


def limit(limits, processes):
    """Resource limits, of this process and all that it starts. No `processes`: something else counts them.

    Data: the agent holds the archive that it sends; a command begins with less, and cannot ask for more than this.
    """
    data = limits.memory_bytes + 2 * limits.disk_bytes + (64 << 20)
    for name, value in (
        *([(resource.RLIMIT_NPROC, processes)] if processes else []), (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_DATA, data), (resource.RLIMIT_FSIZE, limits.disk_bytes), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0), (resource.RLIMIT_MEMLOCK, 1 << 16), (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(name, (value, value))
        except ValueError:  # lowering one is never refused, but by gVisor where its kernel has no such thing
            if name not in (
                resource.RLIMIT_MSGQUEUE,
                resource.RLIMIT_MEMLOCK,
                resource.RLIMIT_NICE,
                resource.RLIMIT_RTPRIO,
            ):
                raise


def _confine(limits):
    """What no command can take back."""
    limit(limits, limits.processes + 1)
    linux.drop_capabilities()
    linux.no_new_privileges()
    linux.undumpable()
    linux.install_filter(seccomp.program())
