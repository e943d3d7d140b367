"""Runs commands: output and input by poll, a deadline, and limits on what all of them use together."""

import errno
import os
import resource
import select
import time

from . import linux

_TICK = 0.025  # how often what the box uses is looked at
_PIPE = 1 << 16
_HANDLED = (linux.SIGINT, linux.SIGTERM, linux.SIGHUP, linux.SIGPIPE, linux.SIGCHLD)
_PAGE = os.sysconf("SC_PAGESIZE")
_EXITING = 0x4  # PF_EXITING of the kernel
BASE_ENV = {
    b"PATH": b"/usr/local/bin:/usr/bin:/bin", b"HOME": b"/tmp", b"TMPDIR": b"/tmp", b"LANG": b"C.UTF-8", b"TZ": b"UTC",
    b"TERM": b"dumb", b"PAGER": b"cat", b"USER": b"agent", b"PYTHONDONTWRITEBYTECODE": b"1", b"PYTHONHASHSEED": b"0",
}  # fmt: skip


class Output:
    """The first and the last bytes of a stream, up to `most` of them.

    `names` are pairs of equal length: wherever the first one stands in the stream, also where two reads of it meet, the
    second is taken in its place.
    """

    def __init__(self, most, names=()):
        self.head, self.tail, self.most, self.total = bytearray(), bytearray(), most, 0
        self.names, self.held = names, b""

    def add(self, data):
        """Takes the next bytes."""
        self.total += len(data)
        if self.names:
            data = self._renamed(self.held + data)
        self._keep(data)

    def _renamed(self, data):
        """Without what may be the beginning of a name: it is held back until more is read."""
        for real, shown in self.names:
            data = data.replace(real, shown)
        begun = max(_begun(data, real) for real, _ in self.names)
        self.held = data[len(data) - begun :]
        return data[: len(data) - begun]

    def _keep(self, data):
        room = self.most - self.most // 2 - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data
            if len(self.tail) > self.most:
                del self.tail[: len(self.tail) - self.most // 2]

    def value(self):
        """What is kept, and whether that is less than all."""
        self._keep(self.held)
        self.held = b""
        kept = self.most // 2
        if self.total <= self.most:
            return bytes(self.head + self.tail), False
        tail = bytes(self.tail[len(self.tail) - kept :]) if kept else b""
        cut = self.total - len(self.head) - len(tail)
        return bytes(self.head) + b"\n[... %d bytes cut ...]\n" % cut + tail, True


def _begun(data, name):
    """How many of the last bytes are the first ones of the name, which is not whole."""
    return next((n for n in range(len(name) - 1, 0, -1) if data.endswith(name[:n])), 0)


class Runner:
    """Starts commands one after the other, and keeps watch over what they leave running."""

    def __init__(self, limits, restrict=None, reader=-1, watch=None, kill_all=None, pids=None, env=None, names=()):
        self.limits, self.restrict, self.reader = limits, restrict, reader
        self._watch, self._kill_all, self._pids = watch, kill_all, pids
        self.env = dict(BASE_ENV if env is None else env)
        self.names = names
        self.left = []  # ends of pipes that something still writes to
        self._empty = True
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._bell, ringing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        linux.signal(linux.SIGCHLD, lambda *_: None)
        linux.set_wakeup_fd(ringing, warn_on_full_buffer=False)

    def idle(self):
        """Nothing runs."""
        return self._empty and not self.left

    def run(self, argv, env, stdin, timeout, directory):
        """(exit code, timed out, truncated, limit, wall seconds, standard output, standard error)"""
        started = time.monotonic()
        out, err, feed = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC), None
        if stdin:
            feed = os.pipe2(os.O_CLOEXEC)
        ends = (feed[0] if feed else self._null, out[1], err[1])
        variables = {**self.env, **dict(each.split(b"=", 1) for each in env)}
        try:
            pid = (self._spawn if self.restrict is None else self._fork)(argv, variables, directory, ends)
        except OSError as error:
            for fd in (*out, *err, *(feed or ())):
                os.close(fd)
            return _not_started(argv, error, time.monotonic() - started)
        self._empty = False
        for fd in (out[1], err[1], *([feed[0]] if feed else [])):
            os.close(fd)
        streams = {end[0]: Output(self.limits.output_bytes, self.names) for end in (out, err)}
        code, limit = self._attend(pid, streams, feed[1] if feed else None, stdin, started + timeout)
        (first, cut), (second, cut_too) = [each.value() for each in streams.values()]
        wall = time.monotonic() - started
        return code, int(limit == "time"), int(cut or cut_too), limit or "", f"{wall:.6f}", first, second

    def _spawn(self, argv, env, directory, ends):
        """Without copying this process: a third of a fork's time. What the child inherits is set for that moment."""
        before = resource.getrlimit(resource.RLIMIT_DATA)
        most = min(self.limits.memory_bytes, before[1])  # the hard limit is set by `keeper.limit`
        os.fchdir(directory)
        os.umask(0o022)
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
            pid = _execute(argv, env, ends)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
            os.umask(0)
            os.chdir("/")
        _sacrifice(pid)
        return pid

    def _fork(self, argv, env, directory, ends):
        """Where a command must put itself under restrictions first."""
        pid = os.fork()
        if pid:
            return pid
        try:
            linux.set_wakeup_fd(-1)
            os.setpgid(0, 0)
            os.fchdir(directory)
            for fd, end in enumerate(ends):
                os.dup2(end, fd)
            os.umask(0o022)
            for each in _HANDLED:
                linux.signal(each, linux.SIG_DFL)
            _sacrifice("self")
            resource.setrlimit(resource.RLIMIT_DATA, (self.limits.memory_bytes,) * 2)
            if self.restrict is not None:
                self.restrict()
            os.execve(_found(argv, env), argv, env)
        except BaseException as error:
            code, text = _failure(argv, error)
            os.write(2, text)
            os._exit(code)

    def _attend(self, pid, streams, feed, stdin, deadline):
        ended = _end_of(pid)
        poll, pending = select.poll(), memoryview(stdin)
        if ended is not None:
            poll.register(ended, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        poll.register(self.reader, 0)  # only its end
        for fd in streams:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        if feed is not None:
            os.set_blocking(feed, False)
            poll.register(feed, select.POLLOUT)
        limit, open_ones = None, set(streams)
        look = time.monotonic() + _TICK
        try:
            while True:
                now = time.monotonic()
                events = poll.poll(max(0, min(deadline, look) - now) * 1000 + 0.5)
                for fd, event in events:
                    if fd == self.reader and event:
                        os._exit(0)  # nobody is there to answer
                    if fd == feed and pending is not None:
                        pending = self._feed(poll, feed, pending)
                    elif fd in open_ones and not self._drain(fd, streams[fd]):
                        poll.unregister(fd)
                        open_ones.discard(fd)
                if any(fd == self._bell for fd, _ in events):
                    os.read(self._bell, 512)
                    reap_but(pid)  # else orphans that ended count against the limit on processes
                if any(fd == ended for fd, _ in events) or (ended is None and _has_ended(pid)):
                    break
                now = time.monotonic()
                if limit is None and now >= deadline:
                    limit = "time"
                elif limit is None and now >= look:
                    limit = self._over()
                    look = now + _TICK
                    self._drain_left()
                if limit is not None:
                    self.kill(but=pid)
            return self._collect(pid, streams, open_ones), limit
        finally:
            if ended is not None:
                os.close(ended)
            if feed is not None and pending is not None:
                os.close(feed)

    def _feed(self, poll, feed, pending):
        try:
            pending = pending[os.write(feed, pending[:_PIPE]) :]
        except BlockingIOError:
            return pending
        except OSError:
            pending = pending[:0]
        if pending:
            return pending
        poll.unregister(feed)
        os.close(feed)
        return None

    @staticmethod
    def _drain(fd, output):
        """Reads once; False at the end of the stream."""
        try:
            data = os.read(fd, _PIPE)
        except BlockingIOError:
            return True
        output.add(data)
        return bool(data)

    def _collect(self, pid, streams, open_ones):
        """The command has ended: its code, and what is still in the pipes. What others hold open is drained later."""
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for fd, output in streams.items():
            more = fd in open_ones
            while more:
                before = output.total
                more = self._drain(fd, output)
                if more and (output.total == before or output.total > before + (1 << 20)):
                    break
            if more:
                self.left.append(fd)
            else:
                os.close(fd)
        self._reap()
        return code

    def _reap(self):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            self._empty = False
        except ChildProcessError:
            self._empty = True

    def _drain_left(self):
        for fd in list(self.left):
            try:
                for _ in range(64):
                    if not os.read(fd, _PIPE):
                        self.left.remove(fd)
                        os.close(fd)
                        break
            except BlockingIOError:
                continue

    def tend(self):
        """Between commands: reaps, drains, and kills everything where a limit is exceeded. True."""
        self._reap()
        self._drain_left()
        if not self._empty and self._over():
            self.kill()
        return True

    def pids(self):
        """The processes of the box, without the agent."""
        if self._pids is not None:
            return self._pids()
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]

    def _over(self):
        """The limit that is exceeded, or None."""
        if self._watch is not None and (found := self._watch()):
            return found
        pids = self.pids()
        if sum(_resident(pid) for pid in pids) <= self.limits.memory_bytes:
            return None
        # Pages that several share count in each: the exact figure takes longer to get.
        return "memory" if sum(_share(pid) for pid in pids) > self.limits.memory_bytes else None

    def kill(self, but=None):
        """Ends every process of the box but this one, and takes note of their ends, but for one."""
        for _ in range(200):
            if self._kill_all is not None:
                self._kill_all()
            else:
                try:
                    os.kill(-1, linux.SIGKILL)
                except ProcessLookupError:
                    break
            if not self._others():
                break
            time.sleep(0.002)
        reap_but(but)

    def _others(self):
        """Whether anything but zombies is left."""
        for pid in self.pids():
            try:
                with open(f"/proc/{pid}/stat", "rb") as handle:
                    if handle.read(512).rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                        return True
            except OSError:
                continue
        return False


def words_of(pid):
    """The command line of a process, a list; None where it runs no further.

    On a busy machine one that was killed is there for a while, and one that starts a program has no words meanwhile.
    """
    argv = []
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as handle:
                argv = handle.read(1 << 16).split(b"\0")[:-1]
            if _is_ending(pid):
                return None
        except OSError:  # it is gone
            return None
        if argv:
            break
        time.sleep(0.001)
    return argv


def _is_ending(pid):
    """Whether a process is on its way out, or a SIGKILL on its way to it."""
    with open(f"/proc/{pid}/stat", "rb") as handle:
        fields = handle.read(1024).rpartition(b")")[2].split()
    state, flags, pending = fields[0], int(fields[6]), int(fields[28])
    return state in (b"Z", b"X") or bool(flags & _EXITING or pending & 1 << linux.SIGKILL - 1)


def _end_of(pid):
    """A descriptor that tells when the process has ended, or None: gVisor has none. There, each tick looks."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None


def _has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def reap_but(pid):
    """Takes note of children that have ended, but for one, which someone else is waiting for."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == pid:
            return
        os.waitpid(found.si_pid, 0)


def _sacrifice(pid):
    """Where the kernel runs out of memory, commands go before the agent."""
    try:
        handle = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(handle, b"900")
    except OSError:
        return
    finally:
        os.close(handle)


def _found(argv, env):
    """The file of a program, by PATH. Not the library's search, which imports what is out of reach by now."""
    if b"/" in argv[0]:
        return argv[0]
    for place in env.get(b"PATH", b"").split(b":"):
        path = place + b"/" + argv[0]
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(argv[0])


def _execute(argv, env, ends):
    moves = [(os.POSIX_SPAWN_DUP2, end, fd) for fd, end in enumerate(ends)]
    return os.posix_spawn(_found(argv, env), argv, env, file_actions=moves, setpgroup=0, setsigdef=_HANDLED)


def _failure(argv, error):
    """The exit code and the words that a shell would have."""
    if isinstance(error, FileNotFoundError):
        return 127, argv[0] + b": command not found\n"
    return 126, argv[0] + b": " + os.strerror(getattr(error, "errno", 0) or errno.ENOEXEC).encode() + b"\n"


def _not_started(argv, error, wall):
    code, text = _failure(argv, error)
    return code, 0, 0, "processes" if error.errno == errno.EAGAIN else "", f"{wall:.6f}", b"", text


def _resident(pid):
    try:
        with open(f"/proc/{pid}/statm", "rb") as handle:
            return int(handle.read(128).split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _share(pid):
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as handle:
            return next(int(line.split()[1]) * 1024 for line in handle if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)
