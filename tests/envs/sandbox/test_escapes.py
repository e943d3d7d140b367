"""Every way out of a box is tried on every back end, and as a plain user where the tests run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agentrl_envs.sandbox
import escapes
import hogs
import pytest
import ways
from agentrl_envs.sandbox import Sandbox

PLAIN = 51_234  # a uid that owns nothing
# Those where a shared uid, or having no rights to begin with, makes a difference.
AS_PLAIN_USER = [
    "reading_the_launcher", "reading_files_of_the_host", "writing_outside", "fork_bomb", "becoming_root",
    "a_killed_parent",
    "killing_the_agent", "seeing_another_box", "settings_of_the_kernel", "daemons_left_behind",
]  # fmt: skip


UNDER_GVISOR = {  # what its kernel does otherwise; the host is out of reach in all of these
    "reading_the_launcher": "/proc/1 of a box is open to all of it, and holds nothing of the host",
    "forging_frames": "so are the descriptors of its agent: what a box answers can be forged by what runs in it",
    "fork_bomb": "threads are not counted",
    "memory_hog": "shared memory ends the box, not the command",
    "becoming_root": "/proc/self/status does not speak of NoNewPrivs",
    "trees_larger_than_their_disk": "a hole counts as what it seems to hold, so that the command is ended already",
    "daemons_left_behind": "the host sees no process of a box",
}


@pytest.mark.parametrize("name", ways.ESCAPES)
def test_no_way_out(make: Callable[..., Sandbox], name: str, backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "gvisor" and name in UNDER_GVISOR:
        request.applymarker(pytest.mark.xfail(reason=UNDER_GVISOR[name], strict=True))

    def small(**options: Any) -> Sandbox:
        return make(**{"limits": ways.SMALL, **options})

    ways.ESCAPES[name](small)


def as_plain_user(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    changed = ["setpriv", f"--reuid={PLAIN}", f"--regid={PLAIN}", "--clear-groups", *command]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment}
    return subprocess.run(changed, env=environment, cwd="/", capture_output=True, text=True, check=False)


def plain_python() -> str:
    """An interpreter that a plain user can start, and start again."""
    program = (
        "import subprocess, sys; assert sys.version_info >= (3, 11); subprocess.run([sys._base_executable, '-c', ''])"
    )
    for each in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(each) and as_plain_user(each, "-c", program).returncode == 0:
            return each
    pytest.skip("no Python 3.11 that another user can start: apt-get install python3")


@pytest.fixture
def sources() -> Iterator[Path]:
    """A copy of the package and of the escapes that everyone can read."""
    place = Path(tempfile.mkdtemp(prefix="agentrl-plain-"))
    place.chmod(0o755)
    shutil.copytree(Path(agentrl_envs.sandbox.__file__).parent, place / "agentrl_envs" / "sandbox", dirs_exist_ok=True)
    (place / "agentrl_envs" / "__init__.py").touch()
    for module in (escapes, hogs, ways):
        shutil.copy(module.__file__, place)
    yield place
    shutil.rmtree(place)


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv (apt-get install util-linux)"
)
@pytest.mark.parametrize("backend", ["namespaces", "landlock"], indirect=True)
def test_no_way_out_as_a_plain_user(backend: str, sources: Path) -> None:
    done = as_plain_user(plain_python(), str(sources / "escapes.py"), backend, *AS_PLAIN_USER, PYTHONPATH=str(sources))
    assert done.returncode == 0, done.stdout + done.stderr
