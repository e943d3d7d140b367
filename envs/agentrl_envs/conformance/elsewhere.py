"""The same episodes in a fresh process: another folder, another hash seed, nothing imported before."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_jax.protocol import EnvironmentRef, Suite, Task

from . import agents

HEAVY = ("jax", "jaxlib", "flax", "optax")
TIMEOUT_S = 300.0
_PROGRAM = "from agentrl_envs.conformance import elsewhere; elsewhere.main()"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What the other process saw: a digest of each task's transcripts, and what it had imported that it must not."""

    digests: tuple[str, ...]
    loaded: tuple[str, ...]

    @staticmethod
    def digest_of(suite: Suite, task: Task, seed: int) -> str:
        """A hash over the task and the transcripts of the reference solution and of random calls."""
        scripts = [list(suite.solve(task))] if suite.solve is not None else []
        scripts.append(list(agents.random_script(suite, random.Random(f"{seed}/{task.id}"))))
        played = [agents.play(suite, task, script, seed, every_state=True) for script in scripts]
        seen = [task.id, json.dumps(dict(task.data), default=repr), [one.transcript for one in played]]
        return hashlib.sha256(json.dumps([*seen, [repr(one.verdict) for one in played]]).encode()).hexdigest()


def visit(ref: EnvironmentRef, tasks: Sequence[Task], seed: int) -> Elsewhere:
    """Plays the tasks in another process, which draws them anew. Raises `RuntimeError` with its last words."""
    return _visit(pickle.dumps((ref, [(task.split, task.id) for task in tasks], len(tasks), seed)))


@functools.lru_cache(maxsize=4)
def _visit(order: bytes) -> Elsewhere:
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    here = int(os.environ.get("PYTHONHASHSEED", "0") or 0) if os.environ.get("PYTHONHASHSEED", "").isdigit() else 0
    environment = {**os.environ, "PYTHONPATH": search, "PYTHONHASHSEED": str(here + 1)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=order, capture_output=True, cwd=folder, env=environment,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"another process could not play in it: {lines[-1][:300]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Elsewhere(tuple(answer["digests"]), tuple(answer["loaded"]))


def main() -> None:
    """The other process: an order on its input, the answer as the last line of its output."""
    ref, wanted, count, seed = pickle.loads(sys.stdin.buffer.read())
    suite: Suite = ref.load()
    split = wanted[0][0]
    drawn = {task.id: task for task in suite.tasks(split, count, seed)}
    digests = [Elsewhere.digest_of(suite, drawn[name], seed) if name in drawn else "absent" for _, name in wanted]
    answer = {"digests": digests, "loaded": [name for name in HEAVY if name in sys.modules]}
    sys.stdout.write(json.dumps(answer) + "\n")
