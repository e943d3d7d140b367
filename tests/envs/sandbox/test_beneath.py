"""Where a kernel lacks openat2: what is opened is the same, and what leaves the directory is refused the same way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from agentrl_envs.sandbox.boxed import linux

INSIDE = ["f", "d/f", "./d/../f", "d//f", "to_f", "to_d/f", "d/up", "d", ".", "", "to_d", "chain", "d/deep/back/f"]
OUTSIDE = [
    "..",
    "../f",
    "d/../../x",
    "/etc/hostname",
    "out",
    "out/hostname",
    "d/far",
    "nothing",
    "f/g",
    "loop",
    "to_out",
]


@pytest.fixture
def top(tmp_path: Path) -> int:
    (tmp_path / "x").write_text("outside")
    root = tmp_path / "root"
    (root / "d" / "deep").mkdir(parents=True)
    (root / "f").write_text("1")
    (root / "d" / "f").write_text("2")
    links = {"to_f": "f", "to_d": "d", "d/up": "../f", "out": "/etc", "d/far": "../../x", "loop": "loop",
             "chain": "to_d/up", "d/deep/back": "../../d", "to_out": "out/passwd"}  # fmt: skip
    for name, target in links.items():
        (root / name).symlink_to(target)
    return os.open(root, os.O_RDONLY | os.O_DIRECTORY)


def _found(opener, top: int, path: str) -> object:
    try:
        handle = opener(top, path.encode(), os.O_RDONLY)
    except OSError as error:
        return error.errno
    info = os.fstat(handle)
    os.close(handle)
    return info.st_dev, info.st_ino


@pytest.mark.parametrize("path", [*INSIDE, *OUTSIDE])
def test_the_walk_finds_what_the_call_finds(top, path):
    walked, called = (_found(opener, top, path) for opener in (linux.walk_beneath, linux.open_beneath))
    os.close(top)
    if called == errno.ENOSYS:
        pytest.skip("this kernel has no openat2")
    if path:  # the call takes no empty path; the walk takes it for the directory
        assert walked == called
    assert isinstance(walked, int) == (path in OUTSIDE)


def test_a_file_is_made_with_its_mode_and_no_descriptor_stays(top):
    before = len(os.listdir("/proc/self/fd"))
    handle = linux.walk_beneath(top, b"to_d/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    assert os.fstat(handle).st_mode & 0o777 == 0o640 & ~_umask()
    os.close(handle)
    with pytest.raises(OSError, match="cross-device"):
        linux.walk_beneath(top, b"d/deep/../../../x", os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(top)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
