"""A box without a mount namespace shows no path, uid or mark of the host, and nothing that differs from box to box."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from agentrl_envs.sandbox import Limits, open_sandbox, pack
from agentrl_envs.sandbox.boxed.commands import Output
from agentrl_envs.sandbox.opening import works
from hypothesis import given
from hypothesis import strategies as st
from ways import until

REAL, SHOWN = b"/tmp/_k3x9", b"/workspace"
LOOKS = """pwd; pwd -P; readlink -f .; pwd | wc -c; echo $HOME $TMPDIR; env | sort; ls -ln; id -u; cat a.sh
ls no-such-file 2>&1; cd $TMPDIR && pwd && cd "$OLDPWD" && bash -c 'no_such_command' 2>&1
pwd > where; env | sort > variables; ln -s "$PWD/where" link; readlink link; ls -l link | wc -c; sh a.sh"""
FILES = {"a.sh": b"cat /workspace/where; echo /workspaces stay\n"}


@pytest.fixture(autouse=True)
def _landlock():
    if why_not := works("landlock"):
        pytest.skip(f"landlock: {why_not}")


@given(
    st.lists(st.sampled_from([REAL, REAL[:4], REAL[4:], REAL[:-1], b"ab", b"\xff\n", b"/tmp/_k3x"]), max_size=12),
    st.integers(1, 40),
    st.integers(1, 13),
)
def test_a_name_is_found_however_the_stream_is_cut(parts, most, piece):
    stream = b"".join(parts)
    found, plain = Output(most, [(REAL, SHOWN)]), Output(most)
    for start in range(0, len(stream), piece):
        found.add(stream[start : start + piece])
        assert found.total == min(start + piece, len(stream)), "what is held back has been read"
    plain.add(stream.replace(REAL, SHOWN))
    assert found.value() == plain.value()


def _looked(label: str) -> tuple[bytes, bytes, str]:
    with open_sandbox(FILES, backend="landlock", run_label=label) as box:
        found = box.run(["/bin/bash", "-c", LOOKS])
        return found.stdout + found.stderr, box.archive(), box.digest()


def test_two_boxes_show_the_same_whatever_they_are_called():
    one, two = _looked("tests"), _looked("another-run-with-a-longer-name")
    assert one == two
    said, archive, _ = one
    for text in (said, archive):
        assert b"/tmp/_" not in text and str(os.getpid()).encode() not in text and b"agentrl" not in text
    assert said.startswith(b"/workspace\n" * 3 + b"11\n/tmp/local /tmp/local\n")
    assert said.endswith(b"/workspace\n/workspaces stay\n"), "the name in a file leads where it leads in a command"
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:  # its checksums fit
        assert tar.getmember("link").linkname == "/workspace/where"
        where = tar.extractfile("where")
        assert where is not None and where.read() == b"/workspace\n"


def test_another_process_sees_the_same():
    program = "import test_names; import sys; sys.stdout.buffer.write(test_names._looked('elsewhere')[0])"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True,
                          env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
    assert done.stdout == _looked("here")[0]


def test_files_links_and_processes_are_renamed_both_ways():
    with open_sandbox(FILES, backend="landlock", run_label="tests") as box:
        box.run(
            "pwd > where; ln -s $PWD/where link; cp /bin/sleep service; $PWD/service 60 >/dev/null 2>&1 & sleep 0.1"
        )
        assert box.read("where") == b"/workspace\n" and box.read("where", limit=4) == b"/wor"
        assert {each.target for each in box.files() if each.kind == "link"} == {"/workspace/where"}
        assert until(lambda: ["/workspace/service", "60"] in [list(each.argv) for each in box.processes()])
        box.kill()
        box.write("run.sh", b"cat /workspace/where /workspace/link\n")
        assert box.run(["/bin/sh", "run.sh"]).stdout == b"/workspace\n" * 2
        assert box.run("cat /workspace/run.sh").stdout == b"cat /workspace/where /workspace/link\n"
        assert box.run("cat", stdin=b"/workspace").stdout == b"/workspace"
        state = box.archive()
        with box.fork(box.freeze()) as other, open_sandbox(state, backend="landlock", run_label="tests") as third:
            for each in (other, third):
                assert each.run("sh run.sh; readlink link").stdout == b"/workspace\n" * 2 + b"/workspace/where\n"
                assert each.archive() == state


def test_output_that_is_cut_within_a_name_shows_no_part_of_it():
    limits = Limits(output_bytes=64)
    with open_sandbox(backend="landlock", run_label="tests", limits=limits) as box:
        for padding in range(22, 42):
            found = box.run(f"printf '%{padding}s' ''; pwd; printf '%{64 - padding}s' ''")
            assert found.truncated and b"/tmp/" not in found.stdout and b"_" not in found.stdout, found.stdout


def test_nothing_of_a_closed_box_stays():
    before = set(Path("/tmp").glob("_????"))
    box = open_sandbox(backend="landlock", run_label="tests")
    box.run("touch here $TMPDIR/there")
    mine = [path for path in set(Path("/tmp").glob("_????")) - before if _holds(path)]
    assert len(mine) <= 2  # other processes have boxes too; root can look into these
    box.close()
    assert not any(path.exists() for path in mine)


def _holds(path: Path) -> bool:
    try:
        return bool({"here", "there"} & set(os.listdir(path)))
    except OSError:
        return False


def test_what_is_no_tar_is_refused_as_ever():
    with open_sandbox(backend="landlock", run_label="tests") as box:
        with pytest.raises(Exception, match="not a tar"):
            box.extract(b"/workspace" * 100)
        box.extract(pack({"a": b"1"}))
        assert box.read("a") == b"1"
