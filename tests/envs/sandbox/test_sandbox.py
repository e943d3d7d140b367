"""What a box does, on every back end: commands, files, states, forks, and how it is opened and ended."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agentrl_envs.sandbox import (
    Ended,
    Limits,
    Sandbox,
    SandboxError,
    WorkspaceError,
    available,
    chosen,
    interpreter,
    namespaces,
    open_sandbox,
    opening,
    pack,
    reap,
)  # fmt: skip
from agentrl_envs.sandbox.boxed import frames, tar
from hypothesis import given, settings
from hypothesis import strategies as st
from ways import running, until

Make = Callable[..., Sandbox]
FILES = {"a.txt": b"alpha\n", "pkg/m.py": b"print('hello')\n", "pkg/empty/": b"", "big.bin": bytes(range(256)) * 5000}


def test_a_command_and_what_it_gives_back(make: Make) -> None:
    box = make(FILES)
    result = box.run("cat a.txt; echo oops >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr, result.ok) == (7, b"alpha\n", b"oops\n", False)
    assert box.run(["python3", "pkg/m.py"]).stdout == b"hello\n"
    assert box.run(["cat"], stdin=b"x" * 300_000).stdout == b"x" * 300_000
    assert box.run(["true"], stdin=b"x" * 300_000).ok  # it does not read
    assert box.run("pwd; echo $NEW", cwd="pkg", env={"NEW": "v=1"}).stdout == b"/workspace/pkg\nv=1\n"
    assert box.run(["no-such-program"]).exit_code == 127 and box.run(["./a.txt"]).exit_code == 126
    assert box.run("kill -TERM $$").exit_code in (-15, 0)  # under a shared uid and an old kernel, signals are denied
    assert box.run("cat /workspace/a.txt && ls /workspace").stdout.startswith(b"alpha\na.txt")
    with pytest.raises(WorkspaceError, match="no such file"):
        box.run(["true"], cwd="nowhere")
    with pytest.raises(ValueError, match="argument vector"):
        box.run([])


def test_the_environment_is_constant_and_small(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_TEST_SECRET", "s3cr3t")
    names = {line.split("=")[0] for line in make().run(["env"]).stdout.decode().splitlines()}
    assert {"PATH", "HOME", "TMPDIR", "LANG", "TZ"} <= names <= {
        "PATH", "HOME", "TMPDIR", "LANG", "TZ", "TERM", "PAGER", "USER", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED",
        "AGENTRL_BOX", "LC_CTYPE",
    }  # fmt: skip


def test_files(make: Make) -> None:
    box = make(FILES)
    assert [(each.path, each.kind) for each in box.files()] == [
        ("a.txt", "file"), ("big.bin", "file"), ("pkg", "directory"), ("pkg/empty", "directory"), ("pkg/m.py", "file"),
    ]  # fmt: skip
    assert box.read("big.bin") == FILES["big.bin"] and box.read("big.bin", limit=3) == b"\0\1\2"
    box.write("new/deep/x.sh", b"#!/bin/sh\necho run\n", mode=0o755)
    box.write("a.txt", b"shorter")
    assert box.read("a.txt") == b"shorter"
    result = box.run(["new/deep/x.sh"])
    assert result.stdout == b"run\n", result
    box.remove("pkg")
    box.remove("/workspace/a.txt")
    assert [each.path for each in box.files()] == ["big.bin", "new", "new/deep", "new/deep/x.sh"]
    for path in ("a.txt", "new", "", "..", "/etc/passwd"):
        with pytest.raises(WorkspaceError):
            box.read(path)
    for path in ("", ".", "/workspace", "none", "../x"):
        with pytest.raises(WorkspaceError):
            box.remove(path)


def test_a_state_s_hash_is_equal_iff_the_states_are(make: Make) -> None:
    one, two = make(FILES), make()
    state = one.archive()
    two.extract(state)
    assert two.archive() == state == pack(FILES) and one.digest() == two.digest()
    one.run("touch -d '2001-01-01' a.txt")
    assert one.archive() == state  # times are no part of it
    seen = {state}
    for change in ("echo x >> a.txt", "mkdir d", "ln -s a.txt l", "rm a.txt", "mv pkg pkg2", "rmdir pkg2/empty"):
        assert one.run(change).ok
        assert one.archive() not in seen
        seen.add(one.archive())
    two.write("a.txt", b"other")
    assert two.archive() != state
    two.extract(state)
    assert two.archive() == state
    with tarfile.open(fileobj=io.BytesIO(state)) as archive:
        assert sorted(archive.getnames()) == ["a.txt", "big.bin", "pkg", "pkg/empty", "pkg/m.py"]
    with pytest.raises(WorkspaceError, match="not a tar"):
        two.extract(b"nonsense" * 200)


def test_siblings_of_a_frozen_state_do_not_see_each_other(make: Make) -> None:
    box = make(FILES)
    box.run("echo changed > a.txt; rm -r pkg; mkdir pkg; echo new > pkg/n; ln -s pkg/n l; rm big.bin; chmod 750 pkg/n")
    state, frozen = box.archive(), box.freeze()
    box.write("later.txt", b"not in it")
    one, two = box.fork(frozen), box.fork(frozen)
    assert one.archive() == two.archive() == state
    one.run("rm -r pkg; echo one > a.txt")
    two.run("echo two > a.txt; mkdir pkg/sub; echo x > pkg/sub/x")
    assert (one.read("a.txt"), two.read("a.txt"), box.read("a.txt")) == (b"one\n", b"two\n", b"changed\n")
    third = two.fork(two.freeze())  # a fork of a fork
    assert third.archive() == two.archive() and third.read("pkg/sub/x") == b"x\n"
    assert one.fork(frozen).archive() == state
    box.close()
    assert one.run(["cat", "a.txt"]).stdout == b"one\n"
    frozen.release()
    frozen.release()
    assert two.run(["cat", "pkg/n"]).stdout == b"new\n"
    for each in (one, two, third):
        each.close()


def test_many_forks_deep(make: Make) -> None:
    box = make({"n": b"0", "keep": b"k"})
    last = 26 if box.backend == "namespaces" else 5  # there, layers are flattened on the way
    for n in range(1, last):
        box.write("n", str(n).encode())
        box.write(f"f{n}", b"")
        following = box.fork(box.freeze())
        box.close()
        box = following
    assert box.read("n") == str(last - 1).encode() and len(box.files()) == last + 1
    box.close()


def test_workspaces_without_an_overlay_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels before 6.6, by the same steps as with one."""
    if available()["namespaces"]:
        pytest.skip(f"namespaces: {available()['namespaces']}")
    original = namespaces.Keeper
    monkeypatch.setattr(namespaces, "Keeper", lambda view, label: original(view, label, overlay=False))

    def make(files: dict[str, bytes]) -> Sandbox:
        return open_sandbox(files, backend="namespaces", run_label="copies")

    test_siblings_of_a_frozen_state_do_not_see_each_other(make)
    test_many_forks_deep(make)
    box = make(FILES)
    assert b"overlay" not in box.run(["cat", "/proc/mounts"]).stdout
    box.close()


def test_close_is_safe_at_any_time(make: Make) -> None:
    box = make()
    box.run("sleep 50 &")
    box.close()
    box.close()
    for use in (lambda: box.run(["true"]), lambda: box.read("x"), box.archive, box.freeze, box.kill):
        with pytest.raises(Ended, match="open another"):
            use()
    with make() as other:
        assert other.run(["true"]).ok
    del other


def test_another_thread_can_close_a_box_that_is_busy(make: Make, backend: str) -> None:
    box = make()
    with once_it_runs(box.close, seen=backend != "gvisor") as command:
        result = box.run(command)
    assert result.ended


def test_a_box_that_is_killed_ends_its_command_and_only_itself(make: Make, backend: str) -> None:
    if backend == "gvisor":
        pytest.skip("gvisor: the host sees no process of a box, so that none can be picked out")
    box, other = make(), make()
    agent = agent_of(box)
    with once_it_runs(lambda: os.kill(agent, 9)) as command:
        result = box.run(command)
    assert result.ended and result.exit_code == -9 and not result.ok
    with pytest.raises(Ended):
        box.run(["true"])
    assert other.run(["echo", "fine"]).stdout == b"fine\n"


@contextlib.contextmanager
def once_it_runs(act: Callable[[], object], *, seen: bool = True) -> Iterator[list[str]]:
    """A command that sleeps for hours; `act` is called, in another thread, when it is seen to run. Where the host sees
    no process of a box: when it surely does."""
    length = f"{os.getpid()}7.5"

    def work() -> None:
        if until(lambda: running(f"sleep\0{length}"), 60 if seen else 5) or not seen:
            act()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ["sleep", length]
    finally:
        thread.join()


def agent_of(box: Sandbox) -> int:
    """The agent of a box, found by a command that it runs."""
    box.run(f"sleep {os.getpid()}9.5 & true")
    assert until(lambda: running(f"sleep\0{os.getpid()}9.5"), 60)
    (pid,) = running(f"sleep\0{os.getpid()}9.5")
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_threads_take_turns(make: Make) -> None:
    box, outputs = make(), {}

    def work(n: int) -> None:
        outputs[n] = box.run(["sh", "-c", f"echo {n} > f{n}; cat f{n}"]).stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {n: f"{n}\n".encode() for n in range(8)}


# What JAX, and Python from 3.12 on, say where an earlier test of this process loaded JAX or left a thread.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_has_boxes_of_its_own(make: Make) -> None:
    box = make()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            try:
                box.run(["true"])
            except SandboxError as error:
                code = 2 if "forked from" in str(error) else 3
            box.close()
            with open_sandbox({"x": b"child"}, backend=box.backend) as mine:
                code = 0 if code == 2 and mine.run(["cat", "x"]).stdout == b"child" else 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert box.run(["echo", "still"]).stdout == b"still\n"


def test_the_interpreter_of_the_tests_can_be_shown(make: Make) -> None:
    executable, visible = interpreter()
    others_may = all(parent.stat().st_mode & 1 for path in visible for parent in Path(path).parents)
    box = make({"t.py": b"import sys, json; print(json.dumps(sys.version_info[:2]))"}, visible=visible)
    if box.backend == "landlock" and not others_may:
        pytest.skip("landlock: the interpreter lies below a directory that only root may enter")
    result = box.run([executable, "t.py"])
    assert result.stdout.decode().strip() == str(list(sys.version_info[:2])), result


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is gone
        return b""


def test_reaping_ends_what_a_dead_owner_left() -> None:
    """Without namespaces a daemon can outlive everything that watches over it, all killed at once."""
    if available()["landlock"]:
        pytest.skip(f"landlock: {available()['landlock']}")
    mark = f"sleep\0{os.getpid()}8.5"
    program = (
        "import os\nfrom agentrl_envs.sandbox import open_sandbox\n"
        "box = open_sandbox(backend='landlock', run_label='reaped')\n"
        f"box.run('setsid sleep {os.getpid()}8.5 & sleep 0.1')\nprint(os.getpid(), flush=True)\n"
        "box.run('sleep 9', timeout_s=100)\n"
    )
    environment = dict(os.environ, PYTHONPATH=":".join(sys.path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None and owner.stdout.readline()
        assert until(lambda: running(mark))  # the shell may be back before it has begun
        family = [owner.pid, *below(owner.pid)]
        daemon = [pid for pid in family if mark.encode() in _command_line(pid)]
        assert len(daemon) == 1
        others = [pid for pid in family if pid not in daemon]
        for pid in others:
            os.kill(pid, 19)  # stopped first, so that none can act
        for pid in others:
            os.kill(pid, 9)
        owner.wait()
    assert Path(f"/proc/{daemon[0]}").exists()
    assert reap("another-run") == 0 or os.getuid() == 0
    reap("reaped")
    assert until(lambda: mark.encode() not in _command_line(daemon[0]), 60)
    assert not list(Path("/tmp").glob(f"agentrl-{owner.pid}-*"))


def below(pid: int) -> list[int]:
    parents = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found, pending = [], [pid]
    while pending:
        inner = [child for child, parent in parents.items() if parent == pending[0]]
        pending = pending[1:] + inner
        found += inner
    return found


def test_where_namespaces_are_refused_landlock_is_taken_and_without_both_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"namespaces": "refused", "landlock": None}
    monkeypatch.setattr(opening, "_known", known)
    assert chosen() == "landlock"
    known["landlock"] = "absent"
    with pytest.raises(SandboxError, match=r'namespaces: refused; landlock: absent.*backend="docker".*"unsafe"'):
        open_sandbox()
    with pytest.raises(ValueError, match="expected auto or one of"):
        open_sandbox(backend="chroot")
    with open_sandbox({"a": b"1"}, backend="unsafe") as box:  # only in so many words
        assert box.backend == "unsafe" and box.run(["cat", "a"]).stdout == b"1"


REFUSED = """
import sys
from agentrl_envs.sandbox.boxed import linux, seccomp
linux.no_new_privileges()
linux.install_filter(seccomp.program())
from agentrl_envs.sandbox import available, chosen, open_sandbox
assert "unshare" in available()["namespaces"], available()
with open_sandbox({"a": b"1"}) as box:
    print(box.backend, box.run(["cat", "a"]).stdout)
"""


def test_a_machine_that_refuses_namespaces() -> None:
    """As inside a container: the filter of system calls denies them to the whole process."""
    if available()["landlock"]:
        pytest.skip(f"landlock: {available()['landlock']}")
    environment = dict(os.environ, PYTHONPATH=":".join(sys.path))
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "landlock b'1'\n", done.stderr


SHARED_UID = """
import ctypes, os, resource, subprocess, sys
from agentrl_envs.sandbox.boxed import linux, seccomp
target = subprocess.Popen(["sleep", "30"])
path = sys.argv[1]
linux.no_new_privileges()
linux.install_filter(seccomp.program([seccomp.SHARED, seccomp.METADATA, seccomp.SIGNALS], sockets=False, own_uid=False))
attempts = {
    "kill": lambda: os.kill(target.pid, 9), "chmod": lambda: os.chmod(path, 0o777),
    "chown": lambda: os.chown(path, 0, 0),
    "prlimit": lambda: resource.prlimit(target.pid, resource.RLIMIT_NOFILE, (9, 9)),
    "setxattr": lambda: os.setxattr(path, "user.x", b"y"),
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, target.pid, 5),
    "socket": lambda: __import__("socket").socket(),
}
for name, attempt in attempts.items():
    try:
        attempt()
        print("GOT IT", name)
    except PermissionError:
        pass
resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))
os.utime(path, (1, 1))
print(os.stat(path).st_mtime > 1, target.poll())
os.execvp("true", ["true"])
"""


def test_what_is_denied_under_a_shared_uid_and_an_old_kernel(tmp_path: Path) -> None:
    """Where the kernel's Landlock does not keep signals in, nor chmod: the filter of system calls does."""
    (tmp_path / "f").write_text("x")
    environment = dict(os.environ, PYTHONPATH=":".join(sys.path))
    command = [sys.executable, "-c", SHARED_UID, str(tmp_path / "f")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0) as child:
        assert child.stdout is not None and child.stdout.readline() == "True None\n"
        assert child.wait(20) == 0
        os.killpg(child.pid, 9)


def test_an_interrupted_request_closes_the_box(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next request would get the answer of this one."""
    box = make()

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(box, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        box.run(["echo", "one"])
    monkeypatch.undo()
    with pytest.raises(Ended):
        box.run(["echo", "two"])


def test_bad_arguments_say_what_was_expected() -> None:
    for files in ({"../x": b""}, {"/x": b""}, {"a//b": b""}, {"a": b"", "a/b": b""}, {"": b""}):
        with pytest.raises(ValueError, match="files"):
            pack(files)
    with pytest.raises(ValueError, match="run_label"):
        open_sandbox(run_label="a b")
    with pytest.raises(ValueError, match="visible"):
        open_sandbox(visible=("relative",))
    for inside in (Path(opening.__file__).parent, Path(opening.__file__).parents[1]):
        with pytest.raises(ValueError, match="is hidden from boxes"):
            open_sandbox(visible=(str(inside),))
    with pytest.raises(ValueError, match="processes"):
        Limits(processes=0)
    with pytest.raises(WorkspaceError, match="not a tar"), open_sandbox(b"x" * 1024):
        pass


NAMES = st.builds(
    lambda name, times: name * times, st.sampled_from(["a", "é b", "x\n", "\x7f'", "..a"]), st.integers(1, 60)
)


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(NAMES, st.binary(max_size=2000), max_size=6), st.dictionaries(NAMES, NAMES, max_size=3))
def test_the_tar_is_one_that_the_library_reads_and_the_reader_reads_the_library_s(files, links) -> None:
    entries = [(name.encode(), tar.FILE, 0o640, data) for name, data in files.items()]
    entries += [(f"l/{name}".encode(), tar.LINK, 0o777, target.encode()) for name, target in links.items()]
    packed = tar.pack(entries)
    assert list(tar.unpack(packed)) == entries
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = archive.getmembers()
        found = [archive.extractfile(m).read() if m.isreg() else m.linkname.encode() for m in members]  # type: ignore[union-attr]
        assert [member.name.encode() for member in members] == [entry[0] for entry in entries]
        assert found == [entry[3] for entry in entries]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        other = io.BytesIO()
        with tarfile.open(fileobj=other, mode="w", format=form) as archive:
            for name, kind, mode, data in entries:
                info = tarfile.TarInfo(name.decode())
                info.mode, info.size, info.type = mode, len(data) if kind == tar.FILE else 0, kind
                info.linkname = data.decode() if kind == tar.LINK else ""
                archive.addfile(info, io.BytesIO(data))
        assert list(tar.unpack(other.getvalue())) == entries


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=600))
def test_arbitrary_bytes_are_refused_not_believed(data: bytes) -> None:
    for read, error in ((frames.unpack, frames.Broken), (lambda d: list(tar.unpack(d)), tar.Malformed)):
        try:
            read(data)
        except error:
            continue


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=50), max_size=6))
def test_frames_give_back_what_was_put_in(parts: list[bytes]) -> None:
    framed = frames.frame(*parts)
    assert frames.size_of(framed[:4]) == len(framed) - 4 and frames.unpack(framed[4:]) == parts
