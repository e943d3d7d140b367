"""The system calls a box may not make, as a seccomp program.

A list of what is denied: whatever changes the machine, looks into other processes, makes namespaces, or reaches parts
of the kernel that an ordinary program never needs. Other architectures' calls (x32, i386) end the process.
"""

import errno
import struct

from . import linux

# name: (x86_64, aarch64); None where the architecture lacks it
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "move_mount": (429, 429), "open_tree": (428, 428), "open_tree_attr": (467, 467), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "personality": (135, 92),
    "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    "mbind": (237, 235), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "set_mempolicy": (238, 237), "vmsplice": (278, 75),
}  # fmt: skip
# Answered "no such call", so that programs fall back: these make memory that no process has mapped.
_ABSENT = {
    "clone3": (435, 435), "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
_CLONE, _SOCKET, _IOCTL = (56, 220), (41, 198), (16, 29)
_NAMESPACES = 0x7E020080  # every CLONE_NEW*, the time namespace too
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FAMILIES = (1, 2, 10)  # unix, inet, inet6: of a network that has nothing but loopback
# Where there are no namespaces: what others on the machine made, or, under a shared uid, own.
SHARED = {
    "shmat": (30, 196), "shmctl": (31, 195), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_unlink": (241, 181),
}  # fmt: skip
SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
METADATA = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "ioprio_set": (251, 30),
}  # fmt: skip
# Said to have worked under a shared uid: times are no part of a state, and tar and cp insist on setting them.
_TIMES = {"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)}
_PRLIMIT = (302, 261)

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def _op(code, value, yes=0, no=0):
    return struct.pack("<HBBI", code, yes, no, value)


def _answer(number, value):
    return _op(_EQUAL, number, 0, 1) + _op(_RETURN, value)


def program(denied=(), sockets=True, own_uid=True):
    """The filter: `denied` are further tables of this module; without `sockets` none can be made at all; without
    `own_uid` other processes and files of the machine belong to the same user."""
    which = linux.MACHINE == "aarch64"
    architecture = 0xC00000B7 if which else 0xC000003E
    out = [_op(_LOAD, 4), _op(_EQUAL, architecture, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
    if not which:
        out += [_op(_AT_LEAST, 0x40000000, 0, 1), _op(_RETURN, _KILL)]  # x32
    tables = [(_DENIED, errno.EPERM), (_ABSENT, errno.ENOSYS), *[(each, errno.EPERM) for each in denied]]
    tables += [] if own_uid else [(_TIMES, 0)]
    for table, code in tables:
        out += [_answer(numbers[which], _ERRNO | code) for numbers in table.values() if numbers[which] is not None]
    refuse = _op(_RETURN, _ERRNO | errno.EPERM)
    out += [_op(_EQUAL, _CLONE[which], 0, 3), _op(_LOAD, 16), _op(_ANY, _NAMESPACES, 0, 1), refuse, _op(_LOAD, 0)]
    if not own_uid:  # limits of this process only: the argument is 0
        out += [_op(_EQUAL, _PRLIMIT[which], 0, 4), _op(_LOAD, 16), _op(_EQUAL, 0, 1, 0), refuse, _op(_LOAD, 0)]
    out += [_op(_EQUAL, _IOCTL[which], 0, 4), _op(_LOAD, 24), _op(_EQUAL, _TIOCSTI, 1, 0)]
    out += [_op(_EQUAL, _TIOCLINUX, 0, 1), refuse, _op(_LOAD, 0)]
    if sockets:
        out += [_op(_EQUAL, _SOCKET[which], 0, 5), _op(_LOAD, 16)]
        out += [_op(_EQUAL, family, len(_FAMILIES) - n, 0) for n, family in enumerate(_FAMILIES)]
        out.append(_op(_RETURN, _ERRNO | errno.EAFNOSUPPORT))
    else:
        out.append(_answer(_SOCKET[which], _ERRNO | errno.EACCES))
    return b"".join(out) + _op(_RETURN, _ALLOW)
