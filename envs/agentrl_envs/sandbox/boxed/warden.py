"""The warden: starts boxes that have no namespaces, and ends all that they leave running.

A box is an agent with a directory of its own. Every command puts itself under Landlock rules and a filter of system
calls before it becomes the policy's program; root gives each box an unprivileged uid. The agent adopts whatever a
command detaches, so that it can be counted, watched and killed; the guard adopts what a killed agent leaves.
"""

import os
import select
import stat

from . import agent, commands, files, frames, keeper, landlock, linux, seccomp

_DEVICES = (b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom")
_ALSO_SEEN = (b"/proc/cpuinfo", b"/proc/meminfo", b"/proc/stat", b"/proc/filesystems", b"/etc/nsswitch.conf")
_SHOWN_WORKSPACE, _SHOWN_TMP, _SHOWN_UID = b"/workspace", b"/tmp/local", b"%d" % (1 << 30)
_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789"
_DISK_EVERY = 10  # ticks between two looks at the disk


class Setup:
    """What the starting process says in its first frame."""

    def __init__(self, fields):
        parent, first_uid, place, label, safe, *paths = fields
        self.parent, self.first_uid, self.place, self.label = int(parent), int(first_uid), place, label
        self.safe = safe == b"1"
        split = int(paths[0])
        self.visible, self.hidden = paths[1 : 1 + split], paths[1 + split :]


def main():
    """Of the interpreter that is started: descriptor 0 is the control socket."""
    control = linux.socket(fileno=os.dup(0))
    os.set_inheritable(control.fileno(), False)
    try:
        setup = Setup(keeper.receive(control)[0])
        parent = os.pidfd_open(setup.parent)
        if os.getppid() != setup.parent:
            os._exit(0)
        if setup.safe and not landlock.version():
            raise OSError(0, "this kernel has no Landlock (5.13 or later, with lsm=landlock)")
        linux.subreaper()
    except (OSError, frames.Broken, ValueError) as error:
        control.sendall(frames.frame("broken", f"{error}"))
        os._exit(1)
    pid = os.fork()
    if not pid:
        linux.die_with_parent()
        _serve(control, parent, Warden(setup))
    control.close()
    os.close(0)
    _guard(parent, pid, setup.place)


def _guard(parent, pid, place):
    linux.undumpable()
    poll, warden = select.poll(), os.pidfd_open(pid)
    poll.register(parent, select.POLLIN)
    poll.register(warden, select.POLLIN)
    while not keeper.wait(poll, 1):
        commands.reap_but(pid)
    os.kill(pid, linux.SIGKILL)
    end_tree()
    for name in os.listdir(place):
        remove_box(place + b"/" + name)
    remove(place)
    os._exit(0)


def _serve(control, parent, warden):
    linux.subreaper()
    linux.undumpable()
    os.umask(0)
    control.sendall(frames.frame("ok"))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(parent, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == parent:
                os._exit(0)  # the guard does the rest
            control.sendall(frames.frame(*warden.answer(*keeper.receive(control))))


def descendants(top=None):
    """The processes below this one."""
    children = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    state, parent = handle.read(512).rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
            else:
                children.setdefault(int(parent), [])
    found, pending = [], [top or os.getpid()]
    while pending:
        inner = children.get(pending.pop(), [])
        found += inner
        pending += inner
    return found


def end_tree():
    """Kills all descendants, until there are none: what a killed one had started was adopted by then."""
    for _ in range(1000):
        pids = descendants()
        for pid in pids:
            try:
                os.kill(pid, linux.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if not pids:
            return
        select.select([], [], [], 0.001)


def remove(place):
    """Removes a directory with all in it."""
    try:
        with keeper.Directory(place) as fd:
            files.clear(fd)
        os.rmdir(place)
    except FileNotFoundError:
        return


def remove_box(place):
    """Removes what a box's links lead to, and them."""
    for inner in (b"/workspace", b"/tmp"):
        try:
            remove(os.readlink(place + inner))
        except OSError:
            continue
    remove(place)


def claim(uid):
    """A directory of a box. Its path is as long as the names that it is shown under, so that no count differs."""
    while True:
        path = b"/tmp/_" + bytes(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(4))
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        if uid is not None:
            os.chown(path, uid, uid)
        return path


class Warden(keeper.Answers):
    """Opens and ends boxes as it is told."""

    def __init__(self, setup):
        self.setup, self.boxes = setup, {}

    def on_open(self, channel, name, *values):
        """Starts an agent; its workspace is filled over its own channel. Answers with what is different in every box,
        each followed by what is shown in its place."""
        limits, place = keeper.Limits(values), self.setup.place + b"/" + name
        uid = self._uid(int(name))
        os.mkdir(place, 0o711)
        names = []
        for inner, shown in ((b"/workspace", _SHOWN_WORKSPACE), (b"/tmp", _SHOWN_TMP)):
            path = claim(uid)
            os.symlink(path, place + inner)  # by which it is found where all else is lost
            names.append((path, shown))
        names.append((self.setup.label, b"0" * len(self.setup.label)))
        if uid is not None:
            names.append((b"%d" % uid, _SHOWN_UID))
        pid = os.fork()
        if not pid:
            _box(channel, names, limits, self.setup, uid)
        self.boxes[int(name)] = (pid, uid, place)
        return "ok", *(part for pair in names for part in pair)

    def _uid(self, name):
        """Root gives every box a uid of its own; 0 in the set-up means that there is no range to take it from."""
        if os.getuid() or not self.setup.first_uid:
            return None
        return self.setup.first_uid + 1 + name % 127

    def on_kill(self, _, name):
        """Ends a box."""
        if int(name) in self.boxes:
            pid, uid, place = self.boxes.pop(int(name))
            # Not the agent first: what it has adopted must stay below it until it is dead.
            for each in [*descendants(pid), pid]:
                try:
                    os.kill(each, linux.SIGKILL)
                except ProcessLookupError:
                    continue
            os.waitpid(pid, 0)
            if uid is not None:
                _end_uid(uid)
            self._end_strays()
            remove_box(place)
        return ("ok",)

    def _end_strays(self):
        """What a dead agent left was adopted here: every child that is no box's agent, and all below it."""
        agents = {pid for pid, _, _ in self.boxes.values()}
        for _ in range(1000):
            found = [pid for pid in _children() if pid not in agents]
            if not found:
                return
            for pid in found:
                for each in [*descendants(pid), pid]:
                    try:
                        os.kill(each, linux.SIGKILL)
                    except ProcessLookupError:
                        continue
                os.waitpid(pid, 0)


def _children():
    try:
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as handle:
            return [int(each) for each in handle.read().split()]
    except FileNotFoundError:  # a kernel without that file
        return [pid for pid in descendants() if _parent(pid) == os.getpid()]


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            return int(handle.read(512).rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _end_uid(uid):
    """Kills all of a box's uid at once, as that uid: no process can start another in between."""
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.kill(-1, linux.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _box(channel, names, limits, setup, uid):
    """In the fork: becomes the agent of a box."""
    try:
        keeper.only_channel(channel, "/dev/null")
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        linux.die_with_parent()  # after setresuid, which clears it
        linux.subreaper()
        (workspace, _), (tmp, _), *_ = names
        home = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if setup.safe:
            linux.no_new_privileges()
        watch = Watch(limits, (workspace, tmp), own_uid=uid is not None)
        keeper.limit(limits, watch.most_processes())
        linux.undumpable()
        env = {**commands.BASE_ENV, b"HOME": tmp, b"TMPDIR": tmp, b"AGENTRL_BOX": setup.label}
        restrict = _restriction(setup, workspace, tmp, uid is not None) if setup.safe else None
        runner = commands.Runner(
            limits, restrict=restrict, reader=3, watch=watch, pids=descendants, env=env,
            kill_all=None if uid is not None else _kill_below, names=names,
        )  # fmt: skip
        agent.start(3, 3, home, runner)
    except BaseException as error:
        os.write(3, frames.frame("broken", f"{error!r}"))
    finally:
        os._exit(1)


def _kill_below():
    for pid in descendants():
        try:
            os.kill(pid, linux.SIGKILL)
        except ProcessLookupError:
            continue


def _restriction(setup, workspace, tmp, own_uid):
    """What a command calls before it becomes the policy's program."""
    known = landlock.version()
    seen = [path for path in setup.visible if path not in _DEVICES]
    rules = [(path, landlock.SEES) for path in [*landlock.without(seen, setup.hidden), *_ALSO_SEEN]]
    rules += [(path, landlock.DEVICE) for path in _DEVICES]
    rules += [(path, 0xFFFF) for path in (workspace, tmp)]
    handle = landlock.ruleset(rules, known)
    denied = [seccomp.SHARED]
    if not own_uid:
        denied.append(seccomp.METADATA)
        if known < landlock.SCOPES:
            denied.append(seccomp.SIGNALS)
    program = seccomp.program(denied, sockets=False, own_uid=own_uid)

    def restrict():
        landlock.restrict(handle)
        linux.install_filter(program)

    return restrict


class Watch:
    """What no limit of the kernel covers here: all files together, and processes that share a uid with others."""

    def __init__(self, limits, places, own_uid):
        self.limits, self.places, self.own_uid, self.ticks = limits, places, own_uid, 0

    def most_processes(self):
        """For RLIMIT_NPROC: a uid's own limit, or what the user has now and the box's share besides."""
        return self.limits.processes + 1 + (0 if self.own_uid else _tasks_of(os.getuid()))

    def __call__(self):
        """The limit that is exceeded, or None."""
        if not self.own_uid and len(descendants()) > self.limits.processes:
            return "processes"
        self.ticks += 1
        if self.ticks % _DISK_EVERY == 0:
            size, count = _usage(self.places, self.limits.files)
            if size > self.limits.disk_bytes or count > self.limits.files:
                return "disk"
        return None


def _tasks_of(uid):
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def _usage(places, most):
    """Bytes and entries below the directories; stops counting past `most` entries."""
    size, count, counted = 0, 0, set()
    pending = list(places)
    while pending and count <= most:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in found:
                    count += 1
                    info = entry.stat(follow_symlinks=False)
                    if info.st_nlink == 1 or info.st_ino not in counted:
                        size += info.st_blocks * 512
                        counted.add(info.st_ino)
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(entry.path)
        except OSError:
            continue
    return size, count
