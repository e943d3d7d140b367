"""Trees of files through directory descriptors: no link is followed, so none can lead out.

What a command left behind is hostile: names, modes, depth and kinds are its choice.
"""

import errno
import os
import stat

from . import tar

DEEPEST = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPAQUE = "user.overlay.opaque"
_CHUNK = 1 << 20


class Unfit(Exception):
    """A tree that cannot be taken as it is; says why."""


def walk(top):
    """(path, directory descriptor, name, stat) of all below `top`, parents first, siblings sorted."""
    yield from _walk(top, b"", 0)


def _walk(fd, prefix, depth):
    if depth > DEEPEST:
        raise Unfit(f"directories more than {DEEPEST} deep")
    for name in sorted(os.fsencode(each) for each in os.listdir(fd)):
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue  # a process of the box removed it meanwhile
        yield prefix + name, fd, name, info
        if stat.S_ISDIR(info.st_mode):
            try:
                inner = _open(name, _DIRECTORY, fd, info.st_mode)
            except (FileNotFoundError, NotADirectoryError):
                continue
            closed = info.st_mode & 0o500 != 0o500  # to its owner: opened for the time of the walk
            try:
                if closed:
                    os.fchmod(inner, 0o700)
                yield from _walk(inner, prefix + name + b"/", depth + 1)
            finally:
                if closed:
                    os.fchmod(inner, stat.S_IMODE(info.st_mode))
                os.close(inner)


def _open(name, flags, fd, mode):
    """Opens what its owner may have made unreadable, leaving the mode as it was."""
    try:
        return os.open(name, flags, dir_fd=fd)
    except PermissionError:
        wanted = stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o400)
        handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            through = f"/proc/self/fd/{handle}"
            os.chmod(through, wanted)
            opened = os.open(through, flags & ~os.O_NOFOLLOW)
            os.chmod(through, stat.S_IMODE(mode))
            return opened
        finally:
            os.close(handle)


def content(name, fd, info):
    """A regular file's bytes."""
    handle = _open(name, _READ, fd, info.st_mode)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileNotFoundError(errno.ENOENT, "changed meanwhile")
        return read_all(handle, info.st_size)
    finally:
        os.close(handle)


def read_all(handle, expected=0):
    """All bytes of a descriptor."""
    parts = []
    while True:
        part = os.read(handle, max(expected + 1, 4096) if not parts and expected < _CHUNK else _CHUNK)
        if not part:
            return b"".join(parts)
        parts.append(part)
        if len(parts) == 1 and len(part) == expected:
            return part


class Room:
    """Counts the bytes that are taken. Links to one file and holes in it make a tree larger than the disk it is on."""

    def __init__(self, most):
        self.most, self.left = most, most

    def take(self, size):
        """Unfit where that is more than there may be."""
        self.left -= size
        if self.left < 0:
            raise Unfit(f"its files have more than {self.most} bytes, links and holes written out")


def entries(top, room):
    """The entries of an archive, in its order. Sockets are left out: they mean nothing without their process."""
    for path, fd, name, info in walk(top):
        mode = stat.S_IMODE(info.st_mode) & 0o777
        if stat.S_ISREG(info.st_mode):
            room.take(info.st_size)
            try:
                yield path, tar.FILE, mode, content(name, fd, info)
            except FileNotFoundError:
                continue
        elif stat.S_ISDIR(info.st_mode):
            yield path, tar.DIRECTORY, mode, b""
        elif stat.S_ISLNK(info.st_mode):
            yield path, tar.LINK, 0o777, os.readlink(name, dir_fd=fd)
        elif stat.S_ISFIFO(info.st_mode):
            yield path, tar.FIFO, mode, b""


def fill(top, archive):
    """Writes an archive's entries below an empty directory; modes of directories come last, not to be in the way."""
    opened, modes = {b"": top}, []
    try:
        for path, kind, mode, data in archive:
            if not path:
                continue
            parent, _, name = path.rpartition(b"/")
            fd = opened[parent] if parent in opened else _make(opened, top, parent)
            if kind == tar.DIRECTORY:
                _directory(fd, name)
                modes.append((path, mode))
            elif kind == tar.LINK:
                os.symlink(data, name, dir_fd=fd)
            elif kind == tar.FIFO:
                os.mkfifo(name, mode, dir_fd=fd)
            else:
                write_file(fd, name, data, mode)
    finally:
        for path, fd in opened.items():
            if path:
                os.close(fd)
    for path, mode in reversed(modes):
        if mode != 0o755:
            os.chmod(path, mode, dir_fd=top)


def _make(opened, top, path):
    fd, so_far = top, b""
    for part in path.split(b"/"):
        so_far = so_far + b"/" + part if so_far else part
        if so_far not in opened:
            _directory(fd, part)
            if len(opened) > 200:  # keep few descriptors
                for each in [each for each in opened if each and not so_far.startswith(each + b"/")]:
                    os.close(opened.pop(each))
            opened[so_far] = os.open(part, _DIRECTORY, dir_fd=fd)
        fd = opened[so_far]
    return fd


def _directory(fd, name):
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            raise Unfit(f"{os.fsdecode(name)} is in the archive twice, once as a directory") from None


def write_file(fd, name, data, mode):
    """A new regular file with exactly these bytes and this mode."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags, mode, dir_fd=fd)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
    finally:
        os.close(handle)


def copy(source, target, room):
    """Copies a layer: plain entries, and an overlay's marks for what was removed or replaced. The number of entries."""
    return _copy(source, target, room, 0)


def _copy(source, target, room, depth):
    if depth > DEEPEST:
        raise Unfit(f"directories more than {DEEPEST} deep")
    count = 0
    for name in os.listdir(source):
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        mode = stat.S_IMODE(info.st_mode) & 0o777
        count += 1
        if stat.S_ISREG(info.st_mode):
            room.take(info.st_size)
            write_file(target, name, content(name, source, info), mode)
        elif stat.S_ISDIR(info.st_mode):
            count += _copy_directory(source, target, name, info, room, depth)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISFIFO(info.st_mode):
            os.mkfifo(name, mode, dir_fd=target)
        elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)  # a removed file
    return count


def _copy_directory(source, target, name, info, room, depth):
    os.mkdir(name, 0o700, dir_fd=target)
    inner = _open(name, _DIRECTORY, source, info.st_mode)
    try:
        outer = os.open(name, _DIRECTORY, dir_fd=target)
        try:
            count = _copy(inner, outer, room, depth + 1)
            if _OPAQUE in os.listxattr(inner):
                os.setxattr(outer, _OPAQUE, b"y")
            os.fchmod(outer, stat.S_IMODE(info.st_mode) & 0o777)
            return count
        finally:
            os.close(outer)
    finally:
        os.close(inner)


def clear(top):
    """Removes all below a directory, whatever the modes and the depth; no process may be at work in it.

    A directory within a directory is first moved up, so that no stack of descriptors grows.
    """
    pending = []
    for name in os.listdir(top):
        if stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
            pending.append(name)
        else:
            os.unlink(name, dir_fd=top)
    while pending:
        current = pending.pop()
        os.chmod(current, 0o700, dir_fd=top)
        handle = os.open(current, _DIRECTORY, dir_fd=top)
        try:
            for name in os.listdir(handle):
                if not stat.S_ISDIR(os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=handle)
                    continue
                os.chmod(name, 0o700, dir_fd=handle)
                pending.append(f".{os.urandom(8).hex()}")
                os.rename(name, pending[-1], src_dir_fd=handle, dst_dir_fd=top)
        finally:
            os.close(handle)
        os.rmdir(current, dir_fd=top)
