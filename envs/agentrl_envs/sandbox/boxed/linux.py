"""The system calls that Python has no name for, by ctypes."""

import ctypes
import errno
import os
import struct

# The library's `signal` and `socket` take as long to load as everything else here together; these are what they wrap.
from _signal import (  # pyright: ignore[reportMissingImports]
    SIG_DFL,
    SIG_IGN,
    SIGCHLD,
    SIGHUP,
    SIGINT,
    SIGKILL,
    SIGPIPE,
    SIGTERM,
    set_wakeup_fd,
    signal,
)  # fmt: skip
from _socket import CMSG_LEN, sethostname, socket

__all__ = [
    "SIGCHLD",
    "SIGHUP",
    "SIGINT",
    "SIGKILL",
    "SIGPIPE",
    "SIGTERM",
    "SIG_DFL",
    "SIG_IGN",
    "set_wakeup_fd",
    "sethostname",
    "signal",
    "socket",
]  # fmt: skip

MACHINE = os.uname().machine
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 0x1000, 0x4000, 1 << 18
DETACH = 2
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 24, 36, 38
_NUMBERS = {  # name: (x86_64, aarch64)
    "pivot_root": (155, 41), "capset": (126, 91), "seccomp": (317, 277), "pidfd_open": (434, 434),
    "openat2": (437, 437), "mount_setattr": (442, 442), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
}  # fmt: skip


def number(name):
    """The number of a system call on this machine's architecture."""
    return _NUMBERS[name][MACHINE == "aarch64"]


def _check(result, what):
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def call(name, *arguments):
    """A system call by name; OSError where it fails."""
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _check(_syscall(ctypes.c_long(number(name)), *wide), name)


def mount(source, target, kind="", flags=0, data=""):
    """mount(2)."""
    encoded = [ctypes.c_char_p(os.fsencode(each)) for each in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3] if data else None)
    _check(result, f"mount {target}")


def unmount(target):
    """umount2(2), detaching."""
    _check(_libc.umount2(ctypes.c_char_p(os.fsencode(target)), DETACH), f"umount {target}")


def unshare(flags):
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd, kind):
    """setns(2)."""
    _check(_libc.setns(fd, kind), "setns")


def pivot_root(new, old):
    """pivot_root(2)."""
    call("pivot_root", ctypes.c_char_p(os.fsencode(new)), ctypes.c_char_p(os.fsencode(old)))


def read_only(path):
    """Makes a mount and all below it read-only, without set-user-id programs or devices."""
    attributes = struct.pack("<QQQQ", 1 | 2, 0, 0, 0)  # MOUNT_ATTR_RDONLY | NOSUID
    call("mount_setattr", -100, ctypes.c_char_p(os.fsencode(path)), 0x8000, ctypes.c_char_p(attributes), 32)


def prctl(option, value=0):
    """prctl(2)."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def die_with_parent():
    """SIGKILL when the parent ends. Cleared by setresuid and by exec of a set-user-id program: call it after."""
    prctl(_PDEATHSIG, 9)


def undumpable():
    """Hides /proc/PID/{environ,mem,fd,...} of this process from others of its uid; exec and setresuid reset it."""
    prctl(_DUMPABLE, 0)


def subreaper():
    """Orphans among the descendants become children of this process."""
    prctl(_SUBREAPER, 1)


def no_new_privileges():
    """No exec gives more rights than the caller has: set-user-id bits are without effect."""
    prctl(_NO_NEW_PRIVS, 1)


def drop_capabilities():
    """No capability is left, nor can one come back by exec."""
    for capability in range(64):
        try:
            prctl(_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one this kernel knows, or not permitted: then none is held either
    header = struct.pack("<Ii", 0x20080522, 0)
    call("capset", ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))


def pidfd_open(pid):
    """A descriptor that becomes readable when the process ends."""
    return call("pidfd_open", pid, 0)


BENEATH, NO_MAGICLINKS = 0x08, 0x02


def open_beneath(directory, path, flags, mode=0, resolve=BENEATH | NO_MAGICLINKS):
    """openat2(2): no component of the path, nor any link in it, leaves the directory."""
    how = struct.pack("<QQQ", flags | os.O_CLOEXEC, mode, resolve)
    try:
        return call("openat2", directory, ctypes.c_char_p(os.fsencode(path)), ctypes.c_char_p(how), len(how))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    return walk_beneath(directory, os.fsencode(path), flags, mode)


def walk_beneath(directory, path, flags, mode=0):
    """The same for a kernel that lacks the call, as gVisor's does: component by component, links read and not followed.
    Each directory on the way is held open, and `..` goes back to the one before."""
    parts, opened, links = _parts(path), [], 0
    try:
        while parts:
            name, at = parts.pop(0), opened[-1] if opened else directory
            if name == b"..":
                if not opened:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                os.close(opened.pop())
                continue
            try:
                target = os.readlink(name, dir_fd=at)
            except OSError:  # no link, or nothing at all
                target = None
            if target is not None:
                links += 1
                if links > 40:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                parts = _parts(target) + parts
            elif parts:
                opened.append(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at))
            else:
                return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=at)
        return os.open(b".", flags | os.O_CLOEXEC, mode, dir_fd=opened[-1] if opened else directory)
    finally:
        for fd in opened:
            os.close(fd)


def _parts(path):
    if path.startswith(b"/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def install_filter(program):
    """Installs a seccomp program (bytes of struct sock_filter) for this thread and what it starts."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    call("seccomp", 1, 0, ctypes.c_char_p(header))


def receive_with_descriptor(control, size):
    """At most `size` bytes of a Unix socket, and the descriptor that came with them, or None."""
    data, ancillary, _, _ = control.recvmsg(size, CMSG_LEN(4), 0x40000000)  # MSG_CMSG_CLOEXEC
    return data, (struct.unpack("i", ancillary[0][2][:4])[0] if ancillary else None)
