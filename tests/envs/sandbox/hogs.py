"""Ways out of a box's limits: processes, memory, disk, output, time, and trees that are hard to copy."""

# ruff: noqa: E501 (programs that are given to a box, one a line)

from agentrl_envs.sandbox import WorkspaceError
from ways import Make, escape, python, until


@escape
def fork_bomb(make: Make) -> None:
    """Trap: a limit on processes that root is exempt from, or that boxes share."""
    with make() as bomb, make() as other:
        threads = "import threading,time\nfor n in range(400): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
        assert "can't start new thread" in python(bomb, threads) or bomb.backend == "landlock"
        bomb.write("bomb.sh", b"b() { b | b & }; b; sleep 30")
        result = bomb.run(["sh", "bomb.sh"], timeout_s=0.7)
        assert result.limit in ("time", "processes") or result.exit_code, result

        def works() -> bool:
            program = "for n in 1 2 3 4 5 6 7 8; do /bin/true & done; wait; echo fine"
            return other.run(["sh", "-c", program]).stdout == b"fine\n"

        # Under one uid the boxes share a limit: the other waits until the last of the bomb is gone.
        assert works() or (bomb.backend == "landlock" and until(works))
        bomb.kill()
        assert bomb.processes() == ()
        assert bomb.run(["echo", "alive"]).stdout == b"alive\n"


@escape
def orphans_that_end(make: Make) -> None:
    """Trap: zombies that nobody reaps eat the limit on processes."""
    with make() as box:
        result = box.run("n=0; while [ $n -lt 300 ]; do (true &); n=$((n + 1)); done; echo END")
        assert result.stdout == b"END\n" and result.limit is None, result
        assert until(lambda: box.processes() == ())


@escape
def memory_hog(make: Make) -> None:
    with make() as box:
        text = python(box, "x = bytearray(900 << 20); print('GOT IT')")
        assert "GOT IT" not in text
        raised = "import resource as r; r.setrlimit(r.RLIMIT_DATA, (r.getrlimit(r.RLIMIT_DATA)[1],) * 2)\nx = bytearray(b'x' * (400 << 20))\nprint('GOT IT')"
        assert "GOT IT" not in python(box, raised)
        many = """
import os, time
for n in range(12):
    if not os.fork():
        x = bytearray(60 << 20)
        for at in range(0, len(x), 4096): x[at] = 1
        time.sleep(20)
time.sleep(20)
print('GOT IT')
"""
        result = box.run(["python3", "-c", many], timeout_s=15)
        assert result.exit_code and result.limit == "memory", result
        shared = """
import mmap, time
kept = []
for n in range(60):
    kept.append(mmap.mmap(-1, 16 << 20))
    for at in range(0, 16 << 20, 4096): kept[-1][at] = 1
    time.sleep(0.01)
print('GOT IT')
"""
        result = box.run(["python3", "-c", shared], timeout_s=15)
        assert b"GOT IT" not in result.stdout, result
        assert box.run(["echo", "alive"]).stdout == b"alive\n"


@escape
def memory_that_no_process_maps(make: Make) -> None:
    """Anonymous files and System V segments are counted by no process's size."""
    with make() as box:
        text = python(box, """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, call in (('memfd', lambda: libc.memfd_create(b'x', 0)), ('shmget', lambda: libc.shmget(1, 1 << 28, 0o1600))):
    print('GOT IT' if call() >= 0 else 'no', name)
""")  # fmt: skip
        assert "GOT IT" not in text, text


@escape
def disk_hog(make: Make) -> None:
    """Trap: the limit on a file's size is per file."""
    with make() as box:
        big = box.run("dd if=/dev/zero of=big bs=1M count=100; ls -s big", timeout_s=10)
        assert big.limit == "disk" or b"100+0 records out" not in big.stderr, big
        box.run("rm -f big")
        several = "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do dd if=/dev/zero of=$0/part$n bs=1M count=8 2>&1; sleep $PAUSE; done; echo END"
        for place in (".", "/tmp"):
            pause = "0.1" if box.backend == "landlock" else "0"  # there, the disk is looked at now and then
            program = several if place == "." else several.replace("$0", "$TMPDIR")
            result = box.run(["sh", "-c", program, place], env={"PAUSE": pause})
            assert result.limit == "disk" or b"No space left" in result.stdout, result
            box.run("rm -f part* $TMPDIR/part*")
        many = box.run(
            [
                "python3",
                "-c",
                "import time\nfor n in range(5000):\n open(f'f{n}', 'w').close()\n time.sleep(0.0005)\nprint('END')",
            ]
        )
        assert many.limit in ("disk", "time") or b"No space left" in many.stderr, many
        assert sum(each.path.startswith("f") for each in box.files()) < 3000
        box.run("rm -f f*")
        assert box.run(["echo", "alive"]).stdout == b"alive\n"


@escape
def trees_larger_than_their_disk(make: Make) -> None:
    """Links to one file, and files that are mostly holes, written out by whoever copies them."""
    for program in ("dd if=/dev/zero of=f bs=1M count=6; for n in $(seq 20); do ln f g$n; done",
                    "for n in $(seq 20); do truncate -s 6M hole$n; done"):  # fmt: skip
        with make() as box:
            assert box.run(program).exit_code == 0
            for take in (box.archive, box.freeze):
                try:
                    take()
                except WorkspaceError as error:
                    assert "more than" in str(error)
                else:
                    raise AssertionError(f"{program} was copied")
            assert box.run(["echo", "alive"]).stdout == b"alive\n"


@escape
def output_hog(make: Make) -> None:
    with make() as box:
        result = box.run("yes", timeout_s=0.5)
        assert result.timed_out and result.truncated and len(result.stdout) < 21_000
        assert result.stdout.startswith(b"y\ny\n") and b"bytes cut" in result.stdout
        result = box.run(["python3", "-c", "import sys; sys.stderr.write('e' * 3000000); print('END')"])
        assert result.stdout == b"END\n" and len(result.stderr) < 21_000 and result.truncated
        result = box.run(["cat"], stdin=b"i" * 3_000_000)
        assert result.truncated and result.ok


@escape
def output_without_a_newline(make: Make) -> None:
    """Trap: a protocol of marker lines hangs, or is fooled by what looks like a marker."""
    with make() as box:
        assert box.run("printf abc").stdout == b"abc"
        assert box.run("printf 'a\\0b\\n\\n\\377'").stdout == b"a\0b\n\n\377"
        assert box.run("exit 3").exit_code == 3
        assert box.run("cat").stdout == b""  # no input: the end of it at once


@escape
def trees_that_are_hard_to_take(make: Make) -> None:
    with make() as box:
        box.run(
            "mkdir -p locked/in; echo a > locked/in/f; chmod 000 locked/in/f locked/in; chmod 500 locked; printf x > $(printf 'new\\nline')"
        )
        box.run(["python3", "-c", "open(b'\\xff\\xfe', 'w').close()"])
        state = box.archive()
        if box.run("stat -c %a locked").stdout == b"500\n":
            assert b"locked/in/f" in state and box.run("stat -c %a locked").stdout == b"500\n"
        copy = box.fork(box.freeze())
        assert copy.archive() == state
        copy.close()
        box.extract(state)
        assert box.archive() == state
        deep = "import os\nfor n in range(300):\n os.mkdir('d'); os.chdir('d')\nopen('bottom', 'w').close()"
        box.run(["python3", "-c", deep])
        try:
            box.archive()
        except WorkspaceError as error:
            assert "deep" in str(error)
        else:
            raise AssertionError("300 directories deep were archived")
        box.remove("d")
        assert box.archive() == state


@escape
def never_ending(make: Make) -> None:
    with make() as box:
        stubborn = "import signal, time\nfor s in range(1, 32):\n try: signal.signal(s, signal.SIG_IGN)\n except OSError: pass\ntime.sleep(600)"
        result = box.run(["python3", "-c", stubborn], timeout_s=0.4)
        assert result.timed_out and result.limit == "time" and result.exit_code == -9
        result = box.run("while :; do :; done", timeout_s=0.3)
        assert result.timed_out
        assert box.run("sleep 0.05; echo in time", timeout_s=900_000).stdout == b"in time\n"
        for nonsense in (0, -1, float("inf"), float("nan"), 1e9):
            try:
                box.run(["true"], timeout_s=nonsense)
            except ValueError:
                continue
            raise AssertionError(f"timeout_s={nonsense} was taken")
