"""Landlock: which files a process may open, for good; and the check of what this kernel knows of it."""

import ctypes
import os
import struct

from . import linux

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
_KNOWN = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}  # rights over files, by version; 0xFFFF from 5 on
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | 1 << 15
SEES, DEVICE = EXECUTE | READ_FILE | READ_DIR, READ_FILE | WRITE_FILE | TRUNCATE
SCOPES = 6  # the version from which signals and abstract sockets stay within


def version():
    """The version that this kernel has, 0 for none."""
    try:
        return linux.call("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def ruleset(rules, known):
    """A descriptor for `restrict`: everything is denied but (path, rights) and what is below each path."""
    rights = _KNOWN.get(known, 0xFFFF)
    attributes = struct.pack("<QQQ", rights, 3 if known >= 4 else 0, 3 if known >= SCOPES else 0)
    size = 24 if known >= SCOPES else 16 if known >= 4 else 8
    handle = linux.call("landlock_create_ruleset", ctypes.c_char_p(attributes), size, 0)
    os.set_inheritable(handle, False)
    for path, wanted in rules:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        allowed = wanted & rights if os.path.isdir(path) else wanted & rights & _OF_FILES
        linux.call("landlock_add_rule", handle, 1, ctypes.c_char_p(struct.pack("<Qi", allowed, fd)), 0)
        os.close(fd)
    return handle


def restrict(handle):
    """Puts this process and what it starts under the rules."""
    linux.call("landlock_restrict_self", handle, 0)


def without(visible, hidden):
    """`visible` with the directories on the way to a hidden one replaced by what else is in them."""
    out = []
    for path in visible:
        inner = [each for each in hidden if each == path or each.startswith(path.rstrip(b"/") + b"/")]
        if not inner:
            out.append(path)
        elif path not in inner:
            out += without([os.path.join(path, name) for name in sorted(os.listdir(path))], inner)
    return out
