"""Ways out of a box, each a function that tries one and asserts that it led nowhere; those of its limits are in `hogs`.

Standard library only and no pytest, so that `python escapes.py BACKEND [NAME ...]` also runs them as a plain user.
"""

# ruff: noqa: E501 (programs that are given to a box, one a line)

import contextlib
import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import hogs  # noqa: F401 (declares more)
from agentrl_envs.sandbox import Sandbox, SandboxError, WorkspaceError, open_sandbox
from ways import ESCAPES, LABEL, SECRET, SMALL, Make, escape, gone, outside, python, running, until


@escape
def reading_files_of_the_host(make: Make) -> None:
    with outside() as place, make() as box:
        tried = [place / "secret.txt", f"/proc/self/root{place}/secret.txt", f"/proc/1/root{place}/secret.txt",
                 f"/workspace/../../../../../..{place}/secret.txt", f"/proc/{os.getpid()}/root{place}/secret.txt",
                 f"/proc/self/cwd/../../../../..{place}/secret.txt", "/etc/shadow", "/root/.bashrc"]  # fmt: skip
        for path in tried:
            result = box.run(["cat", str(path)])
            assert result.exit_code and not result.stdout, (path, result)
        box.run(["ln", "-s", str(place / "secret.txt"), "link"])
        assert SECRET.encode() not in box.run("cat link; cp link copy; cat copy").stdout
        assert not box.run(["ls", str(place)]).ok


@escape
def reading_the_launcher(make: Make) -> None:
    """Trap: process 1 shows the environment of what started it, its memory and its descriptors."""
    os.environ["AGENTRL_TEST_SECRET"] = SECRET
    try:
        with make(fresh=True) as box:
            seen = box.run(
                "env; cat /proc/*/environ /proc/*/cmdline; ls -l /proc/*/fd /proc/*/cwd /proc/*/exe", timeout_s=20
            )
            assert SECRET.encode() not in seen.stdout + seen.stderr
            text = python(box, """
import os
for pid in [p for p in (os.listdir('/proc') if os.access('/proc', os.R_OK) else ['1', str(os.getppid())]) if p.isdigit()]:
    for name in ('environ', 'mem', 'maps', 'fd', 'root', 'fdinfo', 'auxv'):
        if int(pid) in (os.getpid(),):
            continue
        path = f'/proc/{pid}/{name}'
        try:
            print('LEAK', path, len(os.listdir(path)) if name in ('fd', 'root', 'fdinfo') else open(path, 'rb').read(10))
        except OSError:
            pass
""")  # fmt: skip
            assert "LEAK" not in text, text
            assert SECRET not in text
    finally:
        del os.environ["AGENTRL_TEST_SECRET"]


@escape
def reading_the_grader(make: Make) -> None:
    """The package's own source would tell how tasks are made and judged, even below a directory that is shown."""
    import agentrl_envs

    package = Path(agentrl_envs.__file__).resolve().parent
    with make(visible=(str(package.parent),)) as box:
        assert not box.run(["cat", str(package / "__init__.py")]).ok
        assert box.run(["ls", "-A", str(package)]).stdout == b""
        assert not box.run(["cat", str(package / "sandbox" / "opening.py")]).stdout
    with outside() as place:
        for name in ("shown", "shown/solutions", "shown/lib"):
            (place / name).mkdir()
            (place / name / "a.txt").write_text(name)
        with make(visible=(f"{place}/shown",), hidden=(f"{place}/shown/solutions",)) as box:
            assert box.run(["cat", f"{place}/shown/lib/a.txt"]).stdout == b"shown/lib"
            assert not box.run(["cat", f"{place}/shown/solutions/a.txt"]).ok
            assert not box.run(["sh", "-c", f"echo x > {place}/shown/lib/b.txt"]).ok
            assert not (place / "shown/lib/b.txt").exists()


@escape
def writing_outside(make: Make) -> None:
    with outside() as place, make() as box:
        before = sorted(os.listdir("/"))
        for path in (f"{place}/new", f"{place}/secret.txt", f"../../../../../../..{place}/new", "/usr/agentrl-new",
                     "/etc/agentrl-new", "/agentrl-new", "/usr/bin/agentrl-new", f"/proc/1/cwd{place}/new"):  # fmt: skip
            box.run(["sh", "-c", f"echo x > {path}"])
            box.run(["mkdir", "-p", f"{path}-d"])
        box.run(["rm", "-rf", str(place)])
        box.run(["chmod", "000", f"{place}/secret.txt"])
        box.run(["mv", f"{place}/secret.txt", "here"])
        box.run(["ln", f"{place}/secret.txt", "hard"])
        box.run(["truncate", "-s", "0", f"{place}/secret.txt"])
        assert os.listdir(place) == ["secret.txt"]
        assert (place / "secret.txt").read_text() == SECRET
        assert (place / "secret.txt").stat().st_mode & 0o777 == 0o666
        assert sorted(os.listdir("/")) == before
        assert not Path("/usr/agentrl-new").exists() and not Path("/etc/agentrl-new").exists()
        assert {entry.path for entry in box.files()} <= {"here"}


@escape
def reaching_the_network(make: Make) -> None:
    with outside() as place, contextlib.ExitStack() as stack, make() as box:
        listeners = []
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)), (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0agentrl-{os.getpid()}"), (socket.AF_UNIX, socket.SOCK_STREAM, f"{place}/s"),
        ):  # fmt: skip
            listener = stack.enter_context(socket.socket(family, kind))
            listener.bind(address)
            if kind is socket.SOCK_STREAM:
                listener.listen()
            listener.settimeout(0.05)
            listeners.append(listener)
        (place / "s").chmod(0o777)
        tcp, udp = listeners[0].getsockname()[1], listeners[1].getsockname()[1]
        text = python(box, f"""
import socket
def attempt(name, family, kind, address, send=False):
    try:
        s = socket.socket(family, kind)
        s.settimeout(0.3)
        s.sendto(b'x', address) if send else s.connect(address)
        print('REACHED' if not send else 'sent', name)
    except OSError as error:
        print('no', name, error)
I, U, S, D = socket.AF_INET, socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM
attempt('tcp', I, S, ('127.0.0.1', {tcp}))
attempt('udp', I, D, ('127.0.0.1', {udp}), True)
attempt('metadata', I, S, ('169.254.169.254', 80))
attempt('outside', I, S, ('1.1.1.1', 443))
attempt('six', socket.AF_INET6, S, ('2606:4700:4700::1111', 443))
attempt('abstract', U, S, '\\0agentrl-{os.getpid()}')
attempt('path', U, S, {str(place / 's')!r})
attempt('docker', U, S, '/var/run/docker.sock')
for family in (16, 17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW)
        print('REACHED family', family)
    except OSError:
        pass
try:
    print('REACHED dns', socket.getaddrinfo('example.com', 80))
except OSError:
    pass
""")  # fmt: skip
        assert "REACHED" not in text, text
        for listener in listeners:
            try:
                listener.recv(1) if listener.type is socket.SOCK_DGRAM else listener.accept()
            except TimeoutError:
                continue
            raise AssertionError("a listener of the host was reached")


@escape
def links_in_the_workspace(make: Make) -> None:
    """Trap: the host follows a link that was left for it."""
    with outside() as place, make() as box:
        box.write("inner/real.txt", b"real")
        box.run(f"ln -s {place}/secret.txt absolute; ln -s {place} directory; ln -s /proc/self/environ magic; "
                "ln -s ../../../../../../../../../etc/passwd up; ln -s inner/real.txt fine; ln -s loop loop; mkfifo pipe; "
                "ln -s /proc/self/fd/0 descriptor; ln -s /proc/1/root root")  # fmt: skip
        bad = ["absolute", "directory/secret.txt", "magic", "up", "loop", "pipe", "descriptor", "root/etc/passwd", "inner",
               "../outside", "inner/../../x", str(place / "secret.txt"), "/workspace/../etc/passwd"]  # fmt: skip
        for path in bad:
            try:
                read = box.read(path)
            except WorkspaceError:
                continue
            raise AssertionError(f"{path} was read: {read[:40]!r}")
        assert box.read("fine") == b"real" and box.read("/workspace/fine") == b"real"
        for path in [*bad, "directory/new/file"]:
            with contextlib.suppress(WorkspaceError):
                box.write(path, b"written")
        with contextlib.suppress(WorkspaceError):
            box.remove("directory/secret.txt")
        assert os.listdir(place) == ["secret.txt"] and (place / "secret.txt").read_text() == SECRET
        assert SECRET.encode() not in box.archive()
        kinds = {entry.path: entry.kind for entry in box.files()}
        assert kinds["directory"] == kinds["absolute"] == "link" and kinds["pipe"] == "fifo"
        try:
            box.run(["true"], cwd="directory")
        except WorkspaceError:
            pass
        else:
            raise AssertionError("a command was started through a link")
        box.extract(box.archive())
        assert os.listdir(place) == ["secret.txt"]


@escape
def archives_that_lead_out(make: Make) -> None:
    import io
    import tarfile

    with outside() as place, make() as box:
        for name in ("../../../../../../../tmp/evil", f"{place}/evil", "a/../../b"):
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
            try:
                box.extract(packed.getvalue())
            except WorkspaceError:
                continue
            raise AssertionError(f"{name} was unpacked")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            link = tarfile.TarInfo("d")
            link.type, link.linkname = tarfile.SYMTYPE, str(place)
            archive.addfile(link)
            inner = tarfile.TarInfo("d/evil")
            inner.size = 1
            archive.addfile(inner, io.BytesIO(b"x"))
        with contextlib.suppress(WorkspaceError):
            box.extract(packed.getvalue())
        assert os.listdir(place) == ["secret.txt"]


@escape
def daemons_left_behind(make: Make) -> None:
    """They live as long as the box, cannot hold a command open, and end with it."""
    mark = f"77{os.getpid()}.25"
    with make() as box:
        begun = box.run(f"setsid nohup sleep {mark} & (sleep {mark} &) ; echo started")
        assert begun.stdout == b"started\n" and not begun.timed_out
        daemon = f"import os,time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nos.execvp('sleep', ['sleep', '{mark}'])"
        assert not box.run(["python3", "-c", daemon]).timed_out
        assert until(lambda: sum(each.argv[:2] == ("sleep", mark) for each in box.processes()) == 3), box.processes()
        assert box.run(["echo", "next"]).stdout == b"next\n"
        assert running(f"sleep\0{mark}")
    assert gone(f"sleep\0{mark}")


@escape
def a_killed_parent(make: Make) -> None:
    """Trap: what would kill the box with its parent is cleared by a change of uid."""
    with make() as box:
        backend = box.backend
    mark = f"78{os.getpid()}.5"
    program = (
        "import time\nfrom agentrl_envs.sandbox import open_sandbox\n"
        f"box = open_sandbox(backend={backend!r}, run_label='killed')\n"
        f"box.run('setsid sleep {mark} & (sleep {mark} &)')\n"
        f"print('ready', flush=True)\nbox.run('sleep {mark}', timeout_s=600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=dict(os.environ, PYTHONPATH=":".join(sys.path))
    )
    with parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
            assert until(lambda: running(f"sleep\0{mark}"))  # the shell may be back before they have begun
        finally:
            parent.kill()
            parent.wait()
        assert gone(f"sleep\0{mark}"), "processes of the box outlive its owner"


@escape
def becoming_root(make: Make) -> None:
    """Trap: a box that keeps the host's uid 0."""
    with make() as box:
        text = python(box, """
import os, subprocess
def attempt(name, call):
    try:
        call()
        print('GOT IT', name)
    except OSError as error:
        print('no', name)
attempt('setuid', lambda: os.setuid(0))
attempt('setgid', lambda: os.setgid(0))
attempt('setgroups', lambda: os.setgroups([0]))
for path in ('/usr/bin/mount', '/usr/bin/sudo'):
    if os.path.exists(path):
        done = subprocess.run([path, '-c', 'id -u'], stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
        print('GOT IT' if done.stdout.strip() == b'0' else 'no', path)
print('GOT IT ids' if 0 in (*os.getresuid(), *os.getresgid(), *os.getgroups()) else 'no ids')
""")  # fmt: skip
        assert "GOT IT" not in text, text
        status = box.run(["cat", "/proc/self/status"]).stdout.decode()
        if status:
            assert "NoNewPrivs:\t1" in status and "CapEff:\t0000000000000000" in status and "Seccomp:\t2" in status


@escape
def settings_of_the_kernel(make: Make) -> None:
    """Trap: core_pattern, which names a program that the kernel runs as root."""
    names = [
        "kernel/core_pattern",
        "kernel/modprobe",
        "kernel/hotplug",
        "kernel/yama/ptrace_scope",
        "vm/overcommit_memory",
        "kernel/sysrq",
    ]
    before = {name: Path("/proc/sys", name).read_bytes() for name in names if Path("/proc/sys", name).exists()}
    with make() as box:
        for name in names:
            assert not box.run(["sh", "-c", f"echo '|/tmp/x' > /proc/sys/{name}"]).ok
        for path in (
            "/proc/sysrq-trigger",
            "/proc/1/oom_score_adj",
            "/sys/kernel/uevent_helper",
            "/sys/fs/cgroup/x",
            "/dev/mem",
            "/dev/sda",
            "/dev/vda",
        ):
            assert not box.run(["sh", "-c", f"echo x > {path}"]).ok, path
        assert not box.run(["dmesg"]).stdout
    assert before == {name: Path("/proc/sys", name).read_bytes() for name in before}


@escape
def system_calls_that_are_denied(make: Make) -> None:
    if os.uname().machine != "x86_64":
        return
    calls = {
        "ptrace attach": "101, 16, os.getppid(), 0, 0", "ptrace seize": "101, 0x4206, os.getppid(), 0, 0", "process_vm_readv": "310, os.getppid(), 0, 0, 0, 0, 0",
        "unshare user": "272, 0x10000000", "unshare net": "272, 0x40000000", "unshare mount": "272, 0x20000", "setns": "308, 0, 0", "clone user": "56, 0x10000011, 0, 0, 0, 0",
        "mount": "165, b'none', b'/tmp', b'tmpfs', 0, 0", "umount": "166, b'/tmp', 2", "pivot_root": "155, b'/', b'/'", "chroot": "161, b'/tmp'", "fsopen": "430, b'tmpfs', 0",
        "open_tree": "428, -100, b'/', 1", "open_by_handle_at": "304, 0, 0, 0", "bpf": "321, 0, 0, 0", "perf_event_open": "298, 0, 0, -1, -1, 0", "userfaultfd": "323, 1",
        "io_uring_setup": "425, 8, 0", "add_key": "248, b'user', b'x', b'y', 1, -3", "keyctl": "250, 0, -3, 1", "request_key": "249, b'user', b'x', 0, 0",
        "init_module": "175, 0, 0, b''", "kexec_load": "246, 0, 0, 0, 0", "reboot": "169, 0xfee1dead, 672274793, 0, 0", "swapon": "167, b'/tmp/x', 0",
        "settimeofday": "164, 0, 0", "personality": "135, 0x40000", "syslog": "103, 10, 0, 0", "pidfd_getfd": "438, os.pidfd_open(os.getppid()), 0, 0",
    }  # fmt: skip
    with make() as box:
        program = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        for name, arguments in calls.items():
            program += f"r = libc.syscall({arguments})\nprint('GOT IT' if r >= 0 or ctypes.get_errno() not in (1, 38) else 'no', {name!r}, r, ctypes.get_errno())\n"
        text = python(box, program)
        assert "GOT IT" not in text and text.count("no ") == len(calls), text
        old = "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        old += "print('ran', ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())"
        assert box.run(["python3", "-c", old]).exit_code < 0  # the calls of another architecture
        x32 = "import ctypes; print('ran', ctypes.CDLL(None).syscall(0x40000000 + 39))"
        assert box.run(["python3", "-c", x32]).exit_code < 0


@escape
def killing_the_agent(make: Make) -> None:
    with make() as box:
        before = box.run("kill -9 1; kill -9 $PPID; kill -STOP $PPID; kill -9 -- -1; echo after")
        assert before.exit_code == -9 or before.stdout == b"after\n"
        assert box.run(["echo", "alive"]).stdout == b"alive\n"
        python(
            box,
            "import os\nfor pid in range(1, 40):\n if pid != os.getpid():\n  for s in (19, 15, 9):\n   try: os.kill(pid, s)\n   except OSError: pass",
        )
        assert box.run(["echo", "alive"]).stdout == b"alive\n"


@escape
def forging_frames(make: Make) -> None:
    """The channel is not among a command's descriptors, whatever it closes or writes to."""
    with make() as box:
        text = python(box, """
import os, struct
forged = struct.pack('<I', 30) + b'x' * 30
for fd in range(3, 512):
    for call in (lambda: os.write(fd, forged), lambda: os.close(fd)):
        try:
            call()
            print('GOT IT', fd)
        except OSError:
            pass
for pid in ('1', str(os.getppid())):
    for fd in range(0, 20):
        try:
            os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY)
            print('GOT IT', pid, fd)
        except OSError:
            pass
os.close(0); os.close(2)
""")  # fmt: skip
        assert "GOT IT" not in text, text
        assert box.run("exec 0<&- 1>&- 2>&-; sleep 0.05; exit 4").exit_code == 4
        assert box.run(["echo", "alive"]).stdout == b"alive\n"


@escape
def seeing_another_box(make: Make) -> None:
    with make() as one, make() as two:
        one.write("mine.txt", SECRET.encode())
        one.run(f"sleep 79{os.getpid()}.5 & cp mine.txt $TMPDIR/mine.txt; chmod 777 $TMPDIR/mine.txt mine.txt")
        seen = two.run(
            "ps aux; cat /proc/*/cmdline; ls -R /tmp $TMPDIR; cat ../../*/workspace/mine.txt ../../*/tmp/mine.txt; echo *"
        )
        assert SECRET.encode() not in seen.stdout and f"79{os.getpid()}.5".encode() not in seen.stdout
        for process in one.processes():
            two.run(["kill", "-9", str(process.pid)])
        two.run("kill -9 -1")
        assert until(lambda: any(f"79{os.getpid()}.5" in each.argv for each in one.processes()))
        assert two.files() == ()


def attempt_all(backend: str, names: list[str]) -> int:
    """Tries them all; the number that led out."""

    def make(*, fresh: bool = False, **options: Any) -> Sandbox:
        label = f"{LABEL}-{time.monotonic_ns()}" if fresh else LABEL
        return open_sandbox(**{"limits": SMALL, **options}, backend=backend, run_label=label)

    failed = 0
    for name in names or ESCAPES:
        try:
            ESCAPES[name](make)
        except (AssertionError, SandboxError, OSError, ValueError) as error:
            failed += 1
            traceback.print_exc(limit=2, file=sys.stdout)
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(attempt_all(sys.argv[1], sys.argv[2:]), 100))
