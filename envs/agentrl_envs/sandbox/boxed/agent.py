"""The agent of a box: answers frames on its channel, runs commands, serves the workspace's files.

It is process 1 of the box where there are process namespaces, else the reaper of all that commands start. Commands
have its uid, so it is kept out of their reach: it cannot be dumped or traced, takes no signals from them, and its
channel is closed when they start. What it answers is checked on the other side all the same.
"""

import errno
import os
import select
import stat

from . import files, frames, linux, tar
from .commands import words_of

HOME = b"/workspace"


class Agent:
    """Serves one channel until it closes. `owner`: the uid that has the files, where it is not the agent's own."""

    def __init__(self, reader, writer, home, runner, owner=None):
        self.reader, self.writer, self.home, self.runner, self.owner = reader, writer, home, runner, owner

    def serve(self):
        """Answers until the channel ends."""
        while True:
            self._wait()
            request = self._receive()
            try:
                answer = self._answer(request)
            except (files.Unfit, tar.Malformed, OSError) as error:
                answer = ("refused", _reason(error, request))
            _write_all(self.writer, frames.pieces(*answer))

    def _wait(self):
        """Until a request comes; meanwhile reaps, drains what is left running, and watches the limits."""
        poll = select.poll()
        poll.register(self.reader, select.POLLIN)
        while not poll.poll(0 if self.runner.idle() else 25) and self.runner.tend():
            if self.runner.idle():
                break

    def _receive(self):
        size = frames.size_of(_exactly(self.reader, 4))
        return frames.unpack(_exactly(self.reader, size))

    def _answer(self, request):
        kind, *rest = request
        return getattr(self, f"_on_{kind.decode()}")(*rest)

    def _on_run(self, timeout, cwd, count, *rest):
        count = int(count)
        argv, (stdin, *env) = rest[:count], rest[count:]
        directory = linux.open_beneath(self.home, self._relative(cwd), os.O_DIRECTORY | os.O_PATH)
        try:
            return ("ran", *self.runner.run(argv, env, stdin, float(timeout), directory))
        finally:
            os.close(directory)

    def _on_read(self, path, limit):
        handle = linux.open_beneath(self.home, self._relative(path), os.O_RDONLY | os.O_NONBLOCK)
        try:
            info = os.fstat(handle)
            if not stat.S_ISREG(info.st_mode):
                raise files.Unfit("not a regular file")
            return "ok", os.read(handle, int(limit)) if int(limit) >= 0 else files.read_all(handle, info.st_size)
        finally:
            os.close(handle)

    def _on_write(self, path, mode, data):
        path = self._relative(path)
        for end in [n for n, byte in enumerate(path) if byte == 47 and n]:
            self._directory(path[:end])
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK
        handle = linux.open_beneath(self.home, path, flags, int(mode))
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise files.Unfit("not a regular file")
            if self.owner is not None:
                os.fchown(handle, self.owner, self.owner)
            os.ftruncate(handle, 0)
            _write(handle, data)
            os.fchmod(handle, int(mode))
        finally:
            os.close(handle)
        return ("ok",)

    def _directory(self, path):
        parent, _, name = path.rpartition(b"/")
        above = linux.open_beneath(self.home, parent or b".", os.O_DIRECTORY | os.O_PATH)
        try:
            os.mkdir(name, 0o755, dir_fd=above)
            self._hand_over(name, above)
        except FileExistsError:
            pass
        finally:
            os.close(above)

    def _hand_over(self, name, fd):
        if self.owner is not None:
            os.chown(name, self.owner, self.owner, dir_fd=fd, follow_symlinks=False)

    def _on_remove(self, path):
        parent, _, name = self._relative(path).rpartition(b"/")
        if name in (b"", b".", b".."):
            raise files.Unfit("the workspace itself stays")
        above = linux.open_beneath(self.home, parent or b".", os.O_DIRECTORY | os.O_RDONLY)
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
                files.clear(inner)
                os.close(inner)
                os.rmdir(name, dir_fd=above)
            else:
                os.unlink(name, dir_fd=above)
        finally:
            os.close(above)
        return ("ok",)

    def _on_files(self):
        out = ["ok"]
        for path, fd, name, info in files.walk(self.home):
            kind = next((k for k, test in _KINDS if test(info.st_mode)), None)
            if kind:
                target = os.readlink(name, dir_fd=fd) if kind == "link" else b""
                size = info.st_size if kind == "file" else 0
                out += [path, kind, size, stat.S_IMODE(info.st_mode) & 0o777, target]
        return out

    def _on_archive(self):
        return "ok", tar.pieces(files.entries(self.home, files.Room(self.runner.limits.disk_bytes)))

    def _on_extract(self, archive):
        self.runner.kill()
        files.clear(self.home)
        files.fill(self.home, tar.unpack(archive))
        if self.owner is not None:
            for _, fd, name, _ in files.walk(self.home):
                self._hand_over(name, fd)
        return ("ok",)

    def _on_processes(self):
        out = ["ok"]
        for pid in self.runner.pids():
            argv = words_of(pid)
            if argv is not None:
                out += [pid, len(argv), *argv]
        return out

    def _on_kill(self):
        self.runner.kill()
        return ("ok",)

    def _on_ping(self):
        return ("ok",)

    def _relative(self, path):
        if path == HOME or path.startswith(HOME + b"/"):
            path = path[len(HOME) :].lstrip(b"/")
        if path.startswith(b"/"):
            raise files.Unfit(f"outside of {HOME.decode()}")
        if b"\0" in path:
            raise files.Unfit("a name with a zero byte")
        return path or b"."


_TOGETHER = 1 << 16
_KINDS = (("file", stat.S_ISREG), ("directory", stat.S_ISDIR), ("link", stat.S_ISLNK), ("fifo", stat.S_ISFIFO))


def _reason(error, request):
    if not isinstance(error, OSError):
        return str(error)
    if error.errno == errno.EXDEV:
        return "leads out of the workspace"
    if error.errno == errno.ELOOP:
        return "a link that leads out of the workspace, or to itself"
    return os.strerror(error.errno or errno.EIO).lower()


def _exactly(fd, size):
    parts, missing = [], size
    while missing:
        part = os.read(fd, min(missing, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _write_all(fd, pieces):
    """Small pieces together, large ones without a copy."""
    small = bytearray()
    for piece in pieces:
        if len(small) + len(piece) > _TOGETHER:
            _write(fd, small)
            small = bytearray()
        if len(piece) > _TOGETHER:
            _write(fd, piece)
        else:
            small += piece
    _write(fd, small)


def start(reader, writer, home, runner, owner=None):
    """Becomes the agent of a workspace; never returns."""
    for each in (linux.SIGINT, linux.SIGTERM, linux.SIGHUP, linux.SIGPIPE):
        linux.signal(each, linux.SIG_IGN)
    os.umask(0)
    try:
        Agent(reader, writer, home, runner, owner).serve()
    finally:
        os._exit(1)
